"""Inspects data: samples as text or HTML, statistics, and checks of full sets."""
