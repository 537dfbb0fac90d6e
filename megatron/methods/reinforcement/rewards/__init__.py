"""Judges completions by users' functions and built-in verifiers, in processes beside the ranks.

These processes run `worker.py` and must never import torch, so this file imports nothing.
"""
