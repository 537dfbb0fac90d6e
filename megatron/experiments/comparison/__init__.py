"""Compares runs: their keys, curves, speed and scores, as text, JSON or one page of HTML.

command.py: `python deepy.py compare`. comparison.py: all that is compared. curves.py: values at common
points. scores.py: scores of result files, and which test fits two of them. significance.py: the tests.
tables.py: sections for text and page alike. page.py: the page.
"""
