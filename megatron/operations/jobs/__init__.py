"""The jobs of a cluster and the runs of this machine, and what each is doing: `tools/jobs.py`.

`scheduler.py` asks Slurm, `local_runs.py` looks for runs that no scheduler started, `joblog.py` reads a log's
ends, `verdict.py` decides from these what a job is doing, `overview.py` joins them into rows and `table.py`
draws them. `submission.py` submits a run and sees it through its first iterations, `failures.py` names what
went wrong. Nothing here imports torch.
"""
