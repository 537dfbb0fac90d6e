"""Text of tokens as they are generated: incremental detokenization and stop strings."""

from collections.abc import Callable, Sequence

_HALF = "\N{REPLACEMENT CHARACTER}"  # what bytes become whose character is not whole


class IncrementalDetokenizer:
    """Pieces of text that are safe to show: whole characters, and nothing that may turn out to begin a stop
    string."""

    def __init__(self, detokenize: Callable[[Sequence[int]], str], stop: Sequence[str] = (), minimum: int = 0) -> None:
        """minimum: tokens before stop strings count (vLLM's min_tokens: one that ends within them is passed
        over)."""
        self.minimum = minimum
        self.detokenize, self.stop = detokenize, [string for string in stop if string]
        self.tokens: list[int] = []
        # Text of tokens[:read] was taken; those from `start` are needed to write the next ones as in their
        # place.
        self.start = self.read = 0
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole, or a stop string may have
        begun."""
        self.tokens.append(token)
        text = self.detokenize(self.tokens[self.start :])
        if text.endswith(_HALF):
            return ""
        return self._show(text, final=False)

    def finish(self) -> str:
        """The text that was held back, at the end; bytes that are no whole character become U+FFFD."""
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
    """Characters at the end of text that may begin the string."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
