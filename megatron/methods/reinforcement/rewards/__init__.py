"""Rewards: functions of the user and verifiers of ours judge completions, in processes beside the ranks.

`worker.py` is what those processes run, so this file imports nothing, and that one never torch.
"""
