"""Operates runs outside training: cluster jobs and their state, uploads to the HuggingFace Hub, reports,
monitoring.

`run_folder.py` reads the folders of a run; the other modules use it. The training loop does not import this
package: train.py passes the callbacks of this package to it.
"""
