"""What follows from keys: derived values, batch sizes, the MLP's width, the losses of a run, remote
folders."""
