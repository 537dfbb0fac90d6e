"""Next-token prediction: pretraining and supervised fine-tuning."""
