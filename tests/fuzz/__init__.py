"""Inputs broken on purpose: whatever a user hands to the program ends in success or in one clear error."""
