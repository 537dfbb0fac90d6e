"""The modules of `make gpu`: the parts, their order, a process for each, and the table of results."""
