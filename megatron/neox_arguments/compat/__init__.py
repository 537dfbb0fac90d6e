"""For programs written for GPT-NeoX: its methods of `NeoXArgs`, its groups of keys, and a configuration to
write to."""
