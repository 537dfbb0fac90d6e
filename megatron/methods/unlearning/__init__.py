"""Unlearning: some steps train the model to forget a dataset, between ordinary steps on the training set."""
