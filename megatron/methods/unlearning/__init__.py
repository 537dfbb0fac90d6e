"""Unlearning: steps on a set to forget, among steps on the training set."""
