"""Checks a configuration: single keys, combinations of keys, and values that a run refuses."""
