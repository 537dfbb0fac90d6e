"""Prompts: from files, from conversations, typed at a terminal."""
