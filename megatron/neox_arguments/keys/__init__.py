"""Every configuration key, in one file per subject, and tables of the names some keys accept."""
