"""Packs scoring requests into rows for tree attention: a context, followed by its continuations as
branches."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ScoreRequest = tuple[Sequence[int], Sequence[int]]
"""(token ids of a context, at least one; token ids of the continuation to score)."""
SHARED, PADDING = 0, -1


@dataclass
class TreeRow:
    """A row of tokens for tree attention: a context, followed by branches that each see only the context and
    themselves.

    tokens, positions, branches: one value per column; `branches` is SHARED for the context, then 1, 2, ...
    logit_columns: {column whose logits are needed: index of these logits}.
    picks: (request number, indices, labels) for each request in the row: it scores the tokens `labels` with
        the logits at `indices`.
    """

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    logit_columns: dict[int, int] = field(default_factory=dict)
    picks: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    @property
    def branched(self) -> bool:
        """Whether the row has more than one branch."""
        return self.branches[-1] > 1

    def begin(self, inputs: Sequence[int], context: int) -> int:
        """Appends a branch to the row, and returns the column of the branch's first token.

        inputs: tokens of the branch. context: number of tokens of the context, which is the first position of
            the branch.
        """
        first_column, number = len(self.tokens), self.branches[-1] + 1
        self.tokens += inputs
        self.positions += range(context, context + len(inputs))
        self.branches += [number] * len(inputs)
        return first_column

    def read(self, request: int, columns: Sequence[int], labels: Sequence[int]) -> None:
        """Records that a request scores the tokens `labels` with the logits at `columns`. request: its
        number."""
        places = [self.logit_columns.setdefault(column, len(self.logit_columns)) for column in columns]
        self.picks.append((request, places, list(labels)))


def make_tree_rows(
    requests: Sequence[tuple[int, ScoreRequest]],
    hidden_size: int,
    apart_above: int | None = None,
    *,
    branching: bool = True,
) -> list[TreeRow]:
    """Packs numbered requests into rows. Requests with the same context share a row.

    If a row with many branches costs more than repeating the context, the branches are split over several
    rows. Rows with several branches come before other rows; within each of the two kinds, longer rows come
    first.

    hidden_size: the model's hidden size, from which the costs are estimated.
    apart_above: a request with more tokens than this gets a row of its own; None: no limit.
    branching: False for models with Mamba states: every row holds one branch. Continuations still share a
        branch if one is the beginning of the other.
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
    # Per block, a token costs 24 hidden^2; two tokens of different branches cost 4 hidden in each direction.
    foreign = 3 * hidden_size * len(context)
    row = _context(context)
    for inputs, owners in _branches(members):
        num_branch_tokens = len(row.tokens) - len(context)
        if num_branch_tokens * len(inputs) > foreign or (num_branch_tokens and not branching):
            yield row
            row = _context(context)
        first_column = row.begin(inputs, len(context))
        for number, continuation in owners:
            columns = [len(context) - 1, *range(first_column, first_column + len(continuation) - 1)]
            row.read(number, columns[: len(continuation)], continuation)
    yield row


def _context(tokens: tuple[int, ...]) -> TreeRow:
    return TreeRow(list(tokens), list(range(len(tokens))), [SHARED] * len(tokens))


def _branches(
    members: list[tuple[int, Sequence[int]]],
) -> list[tuple[tuple[int, ...], list[tuple[int, Sequence[int]]]]]:
    """Returns the branches of one context, each as (input tokens, numbered continuations that are scored in
    it).

    The input tokens are a continuation without its last token. A continuation that is the beginning of
    another continuation shares that one's branch.

    members: (request number, continuation) of each request.
    """
    branches: list[tuple[tuple[int, ...], list[tuple[int, Sequence[int]]]]] = []
    for member in sorted(members, key=lambda member: tuple(member[1][:-1]), reverse=True):
        inputs = tuple(member[1][:-1])
        if not branches or branches[-1][0][: len(inputs)] != inputs:
            branches.append((inputs, []))
        branches[-1][1].append(member)
    return branches


def rolling_windows(tokens: Sequence[int], prefix: int, positions: int) -> list[ScoreRequest]:
    """Splits a text into requests that score each of its tokens once, with as much context as fits in
    `positions`.

    The first request has only the token `prefix` as context (lm-eval's disjoint windows of context length 1).
    """
    windows: list[ScoreRequest] = []
    for start in range(0, len(tokens), positions):
        end = min(start + positions, len(tokens))
        context = list(tokens[end - positions - 1 : start]) if start else [prefix]
        windows.append((context, list(tokens[start:end])))
    return windows
