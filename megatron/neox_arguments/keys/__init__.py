"""Declares every configuration key, in one file per subject, and tables of the names that some keys
accept."""
