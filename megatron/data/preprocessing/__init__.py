"""Turns raw inputs into `.bin/.idx` pairs: readers, chat templates and labels, worker processes. Training
imports none of it."""

from megatron.data.preprocessing.encode_job import EncodeJob, Job
from megatron.data.preprocessing.job_runner import PreprocessProgress, PreprocessResult, preprocess
