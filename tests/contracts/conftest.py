"""Adds the option that writes the golden files; pytest knows it only if this folder is named."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-contracts", action="store_true", help="write the golden files of tests/contracts again")
