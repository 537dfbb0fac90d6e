"""Checks of a configuration: single keys, keys that must fit each other, and what is refused."""
