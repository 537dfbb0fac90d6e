"""Environments that converse with the model: instances of a user's class, one per conversation.

Each instance has its own process. `host.py` is the program of these processes. So that they never import
torch, this file imports nothing.
"""
