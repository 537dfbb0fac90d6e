"""Cleaning and deduplication of raw text, before it is tokenised: rules with datatrove's thresholds, exact
and near duplicates, contamination, and an account of all that went. `job.clean` runs a job; training reads
none of it."""
