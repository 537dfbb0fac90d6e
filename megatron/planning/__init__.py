"""Plans a run without its machines: what it needs, how long it takes, and whether its ranks fit together.

command.py: `python deepy.py plan`. tracing.py: a step of a few blocks on fake CUDA, recorded by layer.
step_model.py: memory, bytes and seconds of all blocks. machines.py: seconds of operations. ways.py: changes
by which a step fits. dry_run.py, checks.py: ranks with all their blocks, compared. fake_cuda/: the device.
"""
