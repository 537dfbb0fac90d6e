"""Environments of conversations: a class of the user's, of which each conversation has an instance in a
process of its own. `host.py` is what those processes run, so this file imports nothing, and torch is never
imported.
"""
