"""The jobs of a cluster, the runs of this machine, and the state of each: `tools/jobs.py`.

`scheduler.py` asks Slurm, `local_runs.py` finds runs that no scheduler started, `joblog.py` reads both ends
of a log. `verdict.py` decides from these what a job is doing, `overview.py` joins them into rows, `table.py`
draws the rows. `submission.py` submits a run and watches its first iterations, `failures.py` classifies what
went wrong. Nothing here imports torch.
"""
