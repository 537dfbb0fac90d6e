"""Text of tokens as they are generated: incremental detokenization and stop strings."""

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"  # what bytes become whose character is not whole


class IncrementalDetokenizer:
    """Turns generated tokens into text, piece by piece, and ends it at a stop string.

    A piece holds whole characters only. Text that may be the beginning of a stop string is held back. After a
    stop string, `stopped` is true.
    """

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = (), minimum: int = 0) -> None:
        """Starts with no tokens.

        detokenize: returns the text of token ids.
        stop: strings that end the text and are left out of it.
        minimum: number of tokens before which stop strings are ignored (vLLM's `min_tokens`).
        """
        self.minimum = minimum
        self.detokenize, self.stop = detokenize, [string for string in stop if string]
        self.tokens: list[int] = []
        # Text of tokens[:read] was taken; those from `start` are needed to write the next ones as in their
        # place.
        self.start = self.read = 0
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Adds a token and returns the new text; empty while a character is incomplete or a stop string may
        have begun.
        """
        self.tokens.append(token)
        text = self.detokenize(self.tokens[self.start :])
        if text.endswith(_HALF):
            return ""
        return self._show(text, final=False)

    def finish(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters; empty after a stop string."""
        return "" if self.stopped else self._show(self.detokenize(self.tokens[self.start :]), final=True)

    def _show(self, text: str, final: bool) -> str:
        new = text[len(self.detokenize(self.tokens[self.start : self.read])) :]
        if new:
            self.start, self.read = self.read, len(self.tokens)
        text, self.held = self.held + new, ""
        counts = len(self.tokens) > self.minimum
        stop_places = [place for string in self.stop if counts and (place := text.find(string)) >= 0]
        if stop_places:
            self.stopped = True
            return text[: min(stop_places)]
        if final or not self.stop:
            return text
        keep = max(_overlap(text, string) for string in self.stop)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `string`."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
