"""Provides the datasets of preference training: pairs, KTO's examples, and a reference model's scores of
responses."""
