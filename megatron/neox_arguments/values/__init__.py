"""Values derived from keys: batch sizes, the MLP's width, the losses of a run, remote folders."""
