"""Operates runs outside training: cluster jobs and their state, uploads to the HuggingFace Hub, reports,
monitoring.

`run_folder.py` reads a run's folders, for all of them. Training does not import this package; the entry
script passes its callbacks to the training loop.
"""
