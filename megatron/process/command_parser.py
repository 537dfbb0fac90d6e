"""Parses the command-line arguments of all commands.

The package's `__init__` does not import this module, because only commands need argparse.
"""

import argparse
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from megatron.process.completion import is_completing


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose flags cannot be abbreviated and whose help keeps line breaks.

    By default argparse accepts any unique prefix of a flag, so a flag meant for another script could be taken
    for one of ours. Subcommands get parsers of this class too. Pass `allow_abbrev` or `formatter_class` to
    override.
    """

    def __init__(self, **options: Any) -> None:
        as_written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**as_written, **options})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments like argparse. The error for an unknown flag suggests the most similar known
        flags."""
        self._complete()
        return self._refuse_unknown(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments in which positional arguments may stand between flags. Reports unknown flags as
        `parse_args` does."""
        self._complete()
        return self._refuse_unknown(*self.parse_known_intermixed_args(args, namespace))

    def _complete(self) -> None:
        """Ends the process after printing what may follow, if a shell only wants to complete the line."""
        if is_completing():
            from argcomplete import autocomplete

            autocomplete(self)

    def _refuse_unknown(self, parsed: Any, unknown: Sequence[str]) -> Any:
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            nearest = dict.fromkeys(name for flag in flags for name in self._nearest(flag))
            hint = f"; do you mean {' or '.join(nearest)}?" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed

    def _nearest(self, flag: str) -> list[str]:
        names = sorted(name for name in self._flags() if name.startswith("--"))
        return [name for name in names if name.startswith(flag)] or get_close_matches(flag, names, 1)

    def _flags(self) -> Iterator[str]:
        """Yields the flags of this parser and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._flags()
