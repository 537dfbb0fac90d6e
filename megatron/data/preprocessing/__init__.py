"""Raw inputs to `.bin/.idx`: readers, chat templates and labels, worker processes. Training reads none of it."""
