"""Reward models: scores of answers, learned from pairs."""
