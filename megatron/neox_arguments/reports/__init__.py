"""Renders a configuration and its keys as text: `--print-config`, `--help-config`, the reference, the
schema."""
