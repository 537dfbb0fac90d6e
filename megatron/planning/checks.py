"""Compares the ranks of a dry run: would they wait for each other for ever, or exchange the wrong tensors?"""

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
    """All ranks of a group start the same collectives in it, in one order."""
    group_orders: dict[tuple[int, ...], tuple[RankReport, list[Collective]]] = {}
    for report in reports:
        for ranks in {collective.ranks for collective in report.collectives}:
            order = [c for c in report.collectives if c.ranks == ranks and c.peer is None]
            peer_report, expected = group_orders.setdefault(ranks, (report, order))
            for number, (a, b) in enumerate(zip_longest(expected, order), 1):
                if a != b:
                    yield (
                        f"collective {number} of the group of ranks {_joined(ranks)}: {_place(peer_report)} starts "
                        f"{_described(a)}, {_place(report)} {_described(b)}"
                    )
                    break


def _message_problems(reports: Sequence[RankReport]) -> Iterator[str]:
    """A rank receives all that another sends it, in the same order."""
    rank_reports = {report.rank: report for report in reports}
    for report in reports:
        peers = {collective.peer for collective in report.collectives if collective.peer is not None}
        for peer in sorted(peers & rank_reports.keys()):
            sent = [c for c in report.collectives if c.kind == "send" and c.peer == peer]
            received = [c for c in rank_reports[peer].collectives if c.kind == "receive" and c.peer == report.rank]
            for number, (a, b) in enumerate(zip_longest(sent, received), 1):
                if a is None or b is None or (a.size, a.dtype) != (b.size, b.dtype):
                    yield (
                        f"message {number} from {_place(report)} to {_place(rank_reports[peer])}: "
                        f"{_described(a)} is met by {_described(b)}"
                    )
                    break


def _described(collective: Collective | None) -> str:
    return "nothing" if collective is None else f"{collective.kind} of {collective.size:,} bytes in {collective.dtype}"


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]}, {numbers[1]}, .., {numbers[-1]}"
