"""Commands and helpers beside the package."""
