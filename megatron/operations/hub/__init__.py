"""Checkpoints on the HuggingFace Hub: one repository an experiment, one revision a checkpoint.

`names.py` names repositories, `checkpoints.py` lists what is to be sent, `submission.py` makes a Slurm job of
each, `upload.py` converts one and publishes it; `repository.py` talks to the Hub, `retrying.py` says what is
tried again, `journal.py` keeps what has been done, `card.py` writes the model card, `scores.py` evaluates.
`in_training.py` does the same beside a run (`push_to_hub`).
"""
