"""Staged runs: from raw text to a promoted model, a stage beginning only when the gate before it has passed;
`python deepy.py pipeline`."""
