"""Reinforcement learning: answers that the model writes, with rewards.

`rollouts.Rollouts` makes the steps: prompts, answers by the model under training, their rewards and
micro-batches. `rewards` judges answers in processes of its own, for which this file imports nothing.
"""
