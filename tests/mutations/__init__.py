"""Seeded mistakes by which the test suite is judged: tables of them (*.toml), and what applies each to a copy
of the tree and runs the tests that CI would run for that change (`make mutations`)."""
