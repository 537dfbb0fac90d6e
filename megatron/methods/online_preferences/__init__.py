"""Online preference training (online DPO): learns from pairs of answers that the model writes during
training."""
