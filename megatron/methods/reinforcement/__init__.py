"""Reinforcement learning: the model writes answers to prompts during training, and learns from their rewards.

`rollouts.Rollouts` makes the steps: it takes prompts, samples answers, has them judged, and builds
micro-batches. Processes that judge answers import the package `rewards` from here, so this file imports
nothing.
"""
