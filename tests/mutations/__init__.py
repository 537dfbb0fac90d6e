"""Seeded mistakes judge the test suite (`make mutations`). Tables (*.toml) list them. Each is applied to a
copy of the tree, and the tests run that CI would run for that change."""
