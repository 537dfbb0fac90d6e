"""How a command reads its words. Not in the package's `__init__`: argparse is for commands alone."""

import argparse
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Every command's parser: a flag is taken by its whole name, and help keeps the lines of its texts.

    argparse takes the beginning of a flag for the flag, so that a name of another script's can mean one of
    ours that does something else. Parsers of subcommands are of this class too. Who makes one may say
    otherwise.
    """

    def __init__(self, **options: Any) -> None:
        as_written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**as_written, **options})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; where a word is no flag of ours the error names the nearest."""
        return self._all_known(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words that may stand among the flags, as `parse_args` does."""
        return self._all_known(*self.parse_known_intermixed_args(args, namespace))

    def _all_known(self, parsed: Any, unknown: Sequence[str]) -> Any:
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            nearest = dict.fromkeys(name for flag in flags for name in self._nearest(flag))
            meant = f"; do you mean {' or '.join(nearest)}?" if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed

    def _nearest(self, flag: str) -> list[str]:
        names = sorted(name for name in self._flags() if name.startswith("--"))
        return [name for name in names if name.startswith(flag)] or get_close_matches(flag, names, 1)

    def _flags(self) -> Iterator[str]:
        """The flags of this parser and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._flags()
