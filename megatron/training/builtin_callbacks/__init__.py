"""The trainer's own callbacks: log, validate, save, stop."""
