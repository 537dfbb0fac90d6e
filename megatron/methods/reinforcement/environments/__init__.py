"""Environments of conversations: a class of the user's, with one instance per conversation, each in its
own process. `host.py` is the program of those processes, so this file imports nothing, and torch is never
imported.
"""
