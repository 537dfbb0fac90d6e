"""Lists, submits and watches Slurm jobs and local runs, with the state of each, for `tools/jobs.py`.

`scheduler.py` asks Slurm, `local_runs.py` finds runs that no scheduler started, `joblog.py` reads the begin
and end of a log. `verdict.py` decides from these sources what a job is doing. `overview.py` builds one row
per job, `table.py` draws the rows. `submission.py` submits a run and watches its first iterations,
`failures.py` classifies failures, `remedies.py` removes their causes. No module here imports torch.
"""
