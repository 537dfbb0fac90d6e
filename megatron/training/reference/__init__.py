"""The reference model of preference training and its cached log-probabilities."""
