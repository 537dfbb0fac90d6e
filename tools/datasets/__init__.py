"""Commands that clean, tokenise, inspect and check datasets, with the names and flags of GPT-NeoX."""
