"""What is measured of a run, and where the numbers go."""
