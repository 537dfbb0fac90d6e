"""Cleaning and deduplication of raw text before tokenisation: datatrove's thresholds, exact and near
duplicates, contamination, an account of all removals. `job.clean` runs a job; training reads none of it."""
