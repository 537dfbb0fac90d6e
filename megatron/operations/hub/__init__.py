"""Publishes checkpoints on the HuggingFace Hub: one repository per experiment, one revision per checkpoint.

`names.py` names repositories, `checkpoints.py` lists checkpoints, `submission.py` submits one Slurm job per
checkpoint, `upload.py` converts, publishes and evaluates one checkpoint. `repository.py` talks to the Hub,
`retrying.py` retries requests, `journal.py` records progress, `card.py` writes the model card.
`in_training.py` publishes checkpoints while the run still trains (`push_to_hub`).
"""
