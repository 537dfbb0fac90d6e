"""Plans a run without its machines: what it needs, and whether its ranks fit together.

command.py: `python deepy.py plan`. dry_run.py: set-up and steps of one rank on fake CUDA. ranks.py: which
ranks stand for all, and processes that run them. checks.py: compares ranks. fake_cuda/: the device.
"""
