"""Preference training: pairs of answers (DPO and its relatives)."""
