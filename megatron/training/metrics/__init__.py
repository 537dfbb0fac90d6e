"""Measurements of a run, and their destinations."""
