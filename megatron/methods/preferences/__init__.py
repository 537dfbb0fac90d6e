"""Preference training (DPO and related losses): learns from pairs of a chosen and a rejected answer."""
