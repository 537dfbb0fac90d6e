"""Continuous batching: requests, their scheduling, the blocks of the KV cache, and forward passes."""
