"""What happens beside the steps of a run: log, validate, save, stop."""
