"""Cleans and deduplicates raw text before it is tokenised; training imports nothing from this package.

It applies quality rules with datatrove's thresholds, removes exact and near-duplicates and text shared with
evaluation sets, and counts every removal. `job.clean` runs a job.
"""
