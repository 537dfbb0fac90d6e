"""Reward models: learn to score answers from pairs of a chosen and a rejected answer."""
