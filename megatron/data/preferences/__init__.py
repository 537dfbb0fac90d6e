"""Sets of preference training: pairs, KTO's examples, and the scores that a reference model gave to their
rows."""
