"""Runs pipelines of stages, from raw text to a promoted model, for `python deepy.py pipeline`.

A stage starts only after the stage before it has passed its gate, a list of bounds on metrics.
"""
