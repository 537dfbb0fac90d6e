"""From YAML files, `key=value` overrides and the command line to values that know where they were written."""
