"""What `make gpu` is made of: its parts in order, a process for each, and a table that a cut run leaves."""
