"""Turns raw inputs into `.bin/.idx` pairs; training imports nothing from this package.

It holds the readers of input files, chat templates and labels, and the worker processes.
"""

from megatron.data.preprocessing.encode_job import EncodeJob, Job
from megatron.data.preprocessing.job_runner import PreprocessProgress, PreprocessResult, preprocess
