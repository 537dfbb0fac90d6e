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
    """A context followed by branches. Each branch sees the context and itself, not the other branches.

    tokens, positions, branches: one value per column; `branches` is SHARED for the context, then 1, 2, ...
    logit_columns: each column whose logits are needed, with the index of its logits.
    picks: (request number, indices, labels): the request scores the tokens `labels` with the logits at
        `indices`.
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
        """Appends a branch, and returns the column of its first token.

        inputs: tokens of the branch. context: number of tokens of the context, at which the branch's
            positions begin.
        """
        first_column, number = len(self.tokens), self.branches[-1] + 1
        self.tokens += inputs
        self.positions += range(context, context + len(inputs))
        self.branches += [number] * len(inputs)
        return first_column

    def read(self, request: int, columns: Sequence[int], labels: Sequence[int]) -> None:
        """Records that a request scores the tokens `labels` with the logits of `columns`."""
        places = [self.logit_columns.setdefault(column, len(self.logit_columns)) for column in columns]
        self.picks.append((request, places, list(labels)))


def make_tree_rows(
    requests: Sequence[tuple[int, ScoreRequest]],
    hidden_size: int,
    apart_above: int | None = None,
    *,
    branching: bool = True,
) -> list[TreeRow]:
    """Returns rows for numbered requests, in which requests with the same context share a row.

    A context is repeated in another row if that costs less than attention between its branches. Rows with
    several branches come first. Among the others, and among them, the longest come first.

    hidden_size: of the model, from which the cost is computed.
    apart_above: requests with more tokens get rows of their own.
    branching: False for models with Mamba states: a row holds one branch. Continuations share it if one is
        the beginning of the other.
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
    """Returns each branch as (input tokens, numbered continuations that are scored in it).

    The input tokens are a continuation without its last token. A continuation that is the beginning of
    another shares its branch.
    """
    branches: list[tuple[tuple[int, ...], list[tuple[int, Sequence[int]]]]] = []
    for member in sorted(members, key=lambda member: tuple(member[1][:-1]), reverse=True):
        inputs = tuple(member[1][:-1])
        if not branches or branches[-1][0][: len(inputs)] != inputs:
            branches.append((inputs, []))
        branches[-1][1].append(member)
    return branches


def rolling_windows(tokens: Sequence[int], prefix: int, positions: int) -> list[ScoreRequest]:
    """Returns requests that score each of `tokens` once, with as much context as the positions leave.

    The first window has only `prefix` as context (lm-eval's disjoint windows of context length 1).
    """
    windows: list[ScoreRequest] = []
    for start in range(0, len(tokens), positions):
        end = min(start + positions, len(tokens))
        context = list(tokens[end - positions - 1 : start]) if start else [prefix]
        windows.append((context, list(tokens[start:end])))
    return windows
