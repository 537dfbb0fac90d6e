"""Reads YAML files, `key=value` overrides and command lines, and records the file and line of each value."""
