"""Reinforcement learning's samples: prompts, the answers that the model under training writes to them, what
these are worth, and the micro-batches that are trained. `rollouts.Rollouts` puts them together for the loop
of training; `rewards` judges answers in processes of its own, for which this file imports nothing.
"""
