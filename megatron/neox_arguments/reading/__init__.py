"""From YAML files, `key=value` overrides and the command line to values with their file and line."""
