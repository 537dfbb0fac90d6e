"""Continuous batching: requests, the blocks of the cache, and forwards over rows of texts."""
