"""Derives values from keys: batch sizes, the MLP's width, the losses of a run, folders for remote files."""
