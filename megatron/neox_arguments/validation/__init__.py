"""Checks of a configuration: single keys, combinations of keys, and refusals."""
