"""Compares the ranks of a dry run: do they start the same collectives, and exchange the same tensors?

The order in which a rank waits for what it has started is not known, so not every deadlock is found.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron.model.weight_map import layer_specs
from megatron.neox_arguments import NeoXArgs
from megatron.planning.ranks import expected_groups
from megatron.planning.report import Collective, RankReport


def problems(args: NeoXArgs, reports: Sequence[RankReport]) -> list[str]:
    """Returns what is wrong with the ranks of a dry run, one line for each problem."""
    failed = [f"{_place(report)}: {report.error}" for report in reports if report.error is not None]
    if failed:
        return failed
    return [
        *_group_problems(args, reports),
        *_layer_problems(args, reports),
        *_creation_problems(reports),
        *_order_problems(reports),
        *_message_problems(reports),
    ]


def _place(report: RankReport) -> str:
    coordinates = ", ".join(f"{axis} {report.coordinates[axis]}" for axis in ("pipe", "data", "context", "tensor")
                            if report.coordinates.get(axis))  # fmt: skip
    return f"rank {report.rank}" + (f" ({coordinates})" if coordinates else "")


def _group_problems(args: NeoXArgs, reports: Sequence[RankReport]) -> Iterator[str]:
    """Compares process groups with those that follow from the documented order of ranks."""
    for report in reports:
        for axis, ranks in expected_groups(args, report.rank).items():
            actual = report.groups.get(axis, (report.rank,))
            if actual != ranks:
                yield f"{_place(report)}: its {axis} group has ranks {_joined(actual)}, not {_joined(ranks)}"


def _creation_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    """torch names a process group by the number of groups before it, so ranks must create equally many."""
    for report in reports[1:]:
        if report.num_groups != reports[0].num_groups:
            yield (
                f"{_place(report)} creates {report.num_groups} process groups, {_place(reports[0])} "
                f"{reports[0].num_groups}"
            )


def _layer_problems(args: NeoXArgs, reports: Sequence[RankReport]) -> Iterator[str]:
    """Each layer is on one pipeline rank, the same for all ranks of a stage."""
    stage_reports: dict[int, RankReport] = {}
    for report in reports:
        same_stage = stage_reports.setdefault(report.coordinates.get("pipe", 0), report)
        if report.layers != same_stage.layers:
            expected = f"{_place(same_stage)} {_joined(same_stage.layers)}"
            yield f"{_place(report)} holds layers {_joined(report.layers)}, {expected}"
    holders = Counter(layer for report in stage_reports.values() for layer in report.layers)
    for spec in layer_specs(args):
        if holders[spec.index] != 1:
            yield f"layer {spec.index} ({spec.kind}) is on {holders[spec.index]} pipeline ranks, not on one"


def _order_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    """All ranks of a group start the same collectives in it, in one order, from the set-up on."""
    orders = {report.rank: _orders(report) for report in reports}
    for ranks in dict.fromkeys(ranks for order in orders.values() for ranks in order):
        members = [report for report in reports if report.rank in ranks]
        expected = orders[members[0].rank].get(ranks, [])
        for report in members[1:]:
            for number, (a, b) in enumerate(zip_longest(expected, orders[report.rank].get(ranks, [])), 1):
                if a != b:
                    yield (
                        f"collective {number} of the group of ranks {_joined(ranks)}: {_place(members[0])} starts "
                        f"{_described(a)}, {_place(report)} {_described(b)}"
                    )
                    break


def _orders(report: RankReport) -> dict[tuple[int, ...], list[Collective]]:
    """Returns the collectives of a rank by the ranks of their group."""
    orders: dict[tuple[int, ...], list[Collective]] = {}
    for collective in (*report.setup, *report.collectives):
        if collective.peer is None:
            orders.setdefault(collective.ranks, []).append(collective)
    return orders


def _message_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    """A rank receives all that another sends it, in the same order."""
    messages: dict[tuple[str, int, int], list[Collective]] = {}
    for report in reports:
        for collective in (*report.setup, *report.collectives):
            if collective.peer is not None:
                ends = (report.rank, collective.peer)
                key = collective.kind, *(ends if collective.kind == "send" else ends[::-1])
                messages.setdefault(key, []).append(collective)
    rank_reports = {report.rank: report for report in reports}
    for sender, receiver in dict.fromkeys((sender, receiver) for _, sender, receiver in messages):
        if sender not in rank_reports or receiver not in rank_reports:
            continue
        sent, received = (messages.get((kind, sender, receiver), []) for kind in ("send", "receive"))
        for number, (a, b) in enumerate(zip_longest(sent, received), 1):
            if a is None or b is None or (a.size, a.dtype) != (b.size, b.dtype):
                yield (
                    f"message {number} from {_place(rank_reports[sender])} to {_place(rank_reports[receiver])}: "
                    f"{_described(a)} is met by {_described(b)}"
                )
                break


def _described(collective: Collective | None) -> str:
    if collective is None:
        return "nothing"
    source = "" if collective.source is None else f" with number {collective.source} of the group as source"
    return f"{collective.kind} of {collective.size:,} bytes in {collective.dtype}{source}"


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]}, {numbers[1]}, .., {numbers[-1]}"
