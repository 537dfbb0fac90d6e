"""Computes log-probabilities and reward scores of given texts, and writes them to files."""
