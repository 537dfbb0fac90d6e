"""Every configuration key, in the files of its subject, and the tables of what keys may name."""
