"""Checkpoint commands, with the names and flags of GPT-NeoX."""
