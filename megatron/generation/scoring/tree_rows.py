"""Requests as rows of tokens, for tree attention: each context once, followed by its continuations as
branches."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ScoreRequest = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, at least one, and of its continuation."""
SHARED, PADDING = 0, -1


@dataclass
class TreeRow:
    """A context followed by branches, which all see the context but not each other.

    tokens, positions, branches: one value a column; branches are SHARED for the context, then 1, 2, .. .
    wanted: the columns whose logits are needed, each with its place among them. picks: (request, places,
    labels) of each request: which of the wanted logits its tokens are read from, and the tokens.
    """

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    wanted: dict[int, int] = field(default_factory=dict)
    picks: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    @property
    def branched(self) -> bool:
        """Whether it is more than one text."""
        return self.branches[-1] > 1

    def begin(self, inputs: Sequence[int], context: int) -> int:
        """Append a branch behind a context of `context` tokens; the column of its first token."""
        first, number = len(self.tokens), self.branches[-1] + 1
        self.tokens += inputs
        self.positions += range(context, context + len(inputs))
        self.branches += [number] * len(inputs)
        return first

    def read(self, request: int, columns: Sequence[int], labels: Sequence[int]) -> None:
        """Note that a request reads the logits of `columns`, at the tokens `labels`."""
        places = [self.wanted.setdefault(column, len(self.wanted)) for column in columns]
        self.picks.append((request, places, list(labels)))


def make_tree_rows(
    requests: Sequence[tuple[int, ScoreRequest]],
    hidden_size: int,
    apart_above: int | None = None,
    *,
    branching: bool = True,
) -> list[TreeRow]:
    """The rows of numbered requests, those with texts of equal contexts together, the longest first.

    A context is run once for all its continuations, and what begins several continuations once, as far as
    that is less work than running a short context again: hidden_size says what a token costs. apart_above:
    texts longer than that stay alone. branching: False for models with states, whose rows are one text each:
    only continuations that begin another one are read from its row.
    """
    groups: dict[tuple[int, ...], list[tuple[int, Sequence[int]]]] = defaultdict(list)
    rows: list[TreeRow] = []
    for number, (context, continuation) in requests:
        if apart_above is not None and len(context) + len(continuation) - 1 > apart_above:
            rows += _rows_of(tuple(context), [(number, continuation)], hidden_size, branching)
        else:
            groups[tuple(context)].append((number, continuation))
    for context, members in groups.items():
        rows += _rows_of(context, members, hidden_size, branching)
    return sorted(rows, key=lambda row: (-row.branched, -len(row.tokens)))


def _rows_of(
    context: tuple[int, ...], members: list[tuple[int, Sequence[int]]], hidden_size: int, branching: bool
) -> Iterator[TreeRow]:
    # Work of a token is 24 hidden^2 in a block, of its attention to another row's branch 4 hidden, both ways.
    foreign = 3 * hidden_size * len(context)
    row = _context(context)
    for inputs, owners in _branches(members):
        others = len(row.tokens) - len(context)
        if others * len(inputs) > foreign or (others and not branching):
            yield row
            row = _context(context)
        first = row.begin(inputs, len(context))
        for number, continuation in owners:
            columns = [len(context) - 1, *range(first, first + len(continuation) - 1)]
            row.read(number, columns[: len(continuation)], continuation)
    yield row


def _context(tokens: tuple[int, ...]) -> TreeRow:
    return TreeRow(list(tokens), list(range(len(tokens))), [SHARED] * len(tokens))


def _branches(
    members: list[tuple[int, Sequence[int]]],
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, Sequence[int]]]]]:
    """(tokens to run, the continuations read from them): a continuation without its last token; what begins
    another one is not run again."""
    ordered = sorted(members, key=lambda member: tuple(member[1][:-1]), reverse=True)
    inputs: tuple[int, ...] | None = None
    owners: list[tuple[int, Sequence[int]]] = []
    for member in ordered:
        member_inputs = tuple(member[1][:-1])
        if inputs is None or inputs[: len(member_inputs)] != member_inputs:
            if inputs is not None:
                yield inputs, owners
            inputs, owners = member_inputs, []
        owners.append(member)
    if inputs is not None:
        yield inputs, owners


def rolling_windows(tokens: Sequence[int], prefix: int, positions: int) -> list[ScoreRequest]:
    """Requests whose continuations are all of `tokens`, each once, after as much context as the positions
    leave; the first ones after `prefix` alone (lm-eval's windows of context length 1, disjoint)."""
    windows: list[ScoreRequest] = []
    begun = 0
    while begun < len(tokens):
        end = min(begun + positions, len(tokens))
        if begun == 0:
            windows.append(([prefix], list(tokens[:end])))
        else:
            first = end - positions - 1
            windows.append((list(tokens[first:begun]), list(tokens[begun:end])))
        begun = end
    return windows
