"""Supports programs written for GPT-NeoX: its methods of `NeoXArgs`, its key groups, a writable
configuration."""
