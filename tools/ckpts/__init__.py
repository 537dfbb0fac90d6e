"""Commands that convert, merge, inspect and check checkpoints, with the names and flags of GPT-NeoX."""
