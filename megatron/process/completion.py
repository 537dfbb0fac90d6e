"""Completes command lines in a shell, with argcomplete.

The shell runs the command itself, with the typed line in COMP_LINE; its parser (`CommandParser`) then prints
what may follow and ends the process.
"""

import os

_WORDS_TO_SKIP = "_ARGCOMPLETE"  # set by the shell: 1 + the number of words before the program


def is_completing() -> bool:
    """Returns whether this process runs only to complete a line."""
    return _WORDS_TO_SKIP in os.environ


def typed_words() -> list[str]:
    """Returns the complete words after the program, when `is_completing`."""
    from argcomplete.lexers import split_line

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    # COMP_POINT counts bytes
    _, _, _, words, _ = split_line(line, len(line.encode()[:point].decode(errors="ignore")))
    return list(words[int(os.environ[_WORDS_TO_SKIP]) :])


def skip_word() -> None:
    """Lets the parser of a subcommand see only the words after the subcommand. Does nothing if the process is
    not completing."""
    if is_completing():
        os.environ[_WORDS_TO_SKIP] = str(int(os.environ[_WORDS_TO_SKIP]) + 1)
