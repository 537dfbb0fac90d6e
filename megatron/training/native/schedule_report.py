"""Shows a pipeline schedule as text and as a picture: who does what when (`--print-schedule`)."""

from collections import deque
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from string import ascii_lowercase
from typing import Generic, NamedTuple, TypeVar

from megatron.model.pipeline_partition import StagePlacement
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.native.pipeline_schedule import Action, action_tables, micro_batches_of

# In units of time: a backward has two matrix products for each of the forward, one for each gradient.
_DURATION = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
_LETTER = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
_COLOR = {"forward": "tab:blue", "backward": "tab:orange", "backward_input": "tab:red", "backward_weight": "tab:green"}


Time = TypeVar("Time", int, float)


class Timeline(NamedTuple, Generic[Time]):
    """A step over all pipeline ranks.

    begins: for each rank, its actions with the time at which each begins. length: of the step.
    busy: for each rank, the time in which it does not wait.
    held: for each rank, the most forwards whose activations it holds at a time.
    """

    begins: list[list[tuple[Time, Action]]]
    length: Time
    busy: list[Time]
    held: list[int]

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (self.length * len(self.busy))


def units(action: Action) -> int:
    """Returns the units of time of an action: 1 for a forward, 2 for a backward, 1 for a part of one."""
    return _DURATION[action.kind]


def timeline(
    tables: list[list[Action]], placement: StagePlacement, duration: Callable[[Action], Time],
    message: Callable[[int, int], Time],
) -> Timeline[Time]:
    """Returns when each rank runs each action of its table, as soon as it and its input are ready.

    message: the time of a message from one pipeline rank to another, during which both go on.
    """
    todo = [deque(table) for table in tables]
    begins: list[list[tuple[Time, Action]]] = [[] for _ in todo]
    ends: dict[tuple[bool, int, int], Time] = {}  # by whether it is a forward, stage and micro-batch
    zero = message(0, 0) - message(0, 0)
    clocks, busy = [zero] * len(todo), [zero] * len(todo)
    while any(todo):
        for rank, actions in enumerate(todo):
            while actions:
                kind, stage, micro_batch = actions[0]
                is_forward, has_input = kind == "forward", kind != "backward_weight"
                source = (is_forward, stage + (-1 if is_forward else 1), micro_batch)
                if has_input and 0 <= source[1] < placement.stages and source not in ends:
                    break  # its input comes later
                arrival = zero
                if has_input and source in ends:
                    sender = placement.rank_of(source[1])
                    arrival = ends[source] + (message(sender, rank) if sender != rank else zero)
                action, begin = actions.popleft(), max(clocks[rank], arrival)
                begins[rank].append((begin, action))
                time = duration(action)
                clocks[rank] = begin + time
                busy[rank] += time
                if has_input:
                    ends[is_forward, stage, micro_batch] = clocks[rank]
    changes = {"forward": 1, "backward_input": 0}  # both gradients need the activations
    held = [max(accumulate(changes.get(action.kind, -1) for action in table)) for table in tables]
    return Timeline(begins, max(clocks), busy, held)


def schedule_lines(args: NeoXArgs) -> list[str]:
    """Returns the pipeline schedule of a configuration as text: a line for each rank, with its actions.

    `F3` is the forward of micro-batch 3, `B3 --` its backward; dots are idle time. Zero-bubble schedules
    divide a backward into `I3`, the gradients of hidden states, and `W3`, those of weights. With virtual
    stages, `F3a` is of the rank's first stage, `F3b` of its second.
    Raises ConfigError if the number of micro-batches is not known, or not supported.
    """
    placement, step = _step_of(args)
    micro_batches = micro_batches_of(args) or 1
    width = len(f"F{micro_batches - 1}") + (placement.chunks > 1)
    stages = f"{placement.stages} stage{'s' * (placement.stages > 1)}"
    ranks = f" on {placement.ranks} ranks" * (placement.chunks > 1)
    lines = [
        f"{args.pipeline_schedule}, {stages}{ranks}, {micro_batches} micro-batches a step: idle for {step.idle:.1%} of "
        "the time, if stages are equal, each gradient takes as long as a forward, and messages take no time"
    ]
    if args.defers_weight_gradients and args.lora is not None:
        lines.append("with lora almost no weight gradients are deferred, so W takes no time and ranks wait for longer")
    for rank, actions in enumerate(step.begins):
        cells = ["." * width] * step.length
        for begin, action in actions:
            cells[begin] = f"{_LETTER[action.kind]}{_label(rank, action, placement)}".ljust(width)
            for i in range(begin + 1, begin + _DURATION[action.kind]):
                cells[i] = "-" * width
        holder = "stage" if placement.chunks == 1 else "rank"
        stage_share = f" of one of its {placement.chunks} stages" * (placement.chunks > 1)
        held = f"holds activations of {step.held[rank]} forward{'s' * (step.held[rank] != 1)}{stage_share}"
        lines.append(f"{holder} {rank:<3} {' '.join(cells)}  {held}")
    return lines


def draw_schedule(args: NeoXArgs, path: Path) -> None:
    """Writes the pipeline schedule of a configuration as a picture, by matplotlib. The suffix of `path` gives
    the format. Raises ConfigError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    placement, step = _step_of(args)
    figure, axes = pyplot.subplots(figsize=(max(6.0, step.length * 0.35), 1.5 + 0.4 * args.pp), layout="constrained")
    kinds = {action.kind for actions in step.begins for _, action in actions}
    for kind, color in ((kind, color) for kind, color in _COLOR.items() if kind in kinds):
        for rank, actions in enumerate(step.begins):
            for begin, action in actions:
                if action.kind == kind:
                    chunk = placement.stages_of(rank).index(action.stage)
                    shade = 1.0 - 0.6 * chunk / placement.chunks  # later stages are paler
                    axes.broken_barh(
                        [(begin, _DURATION[kind])], (rank - 0.4, 0.8), color=color, alpha=shade, edgecolor="white"
                    )
                    middle = begin + _DURATION[kind] / 2
                    axes.text(middle, rank, _label(rank, action, placement), ha="center", va="center", fontsize=7)
        axes.bar(0, 0, color=color, label=kind.replace("_", ", "))  # for the legend
    axes.set_yticks(range(args.pp), [f"rank {rank}" for rank in range(args.pp)])
    axes.set_xlim(0, step.length)
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward passes of a stage")
    axes.set_title(f"{args.pipeline_schedule}: idle for {step.idle:.1%}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as problem:  # ValueError: a suffix that matplotlib does not know
        raise ConfigError([f"--schedule-picture {path}: cannot be written ({problem}); name a .png or .svg"]) from None
    finally:
        pyplot.close(figure)


def _label(rank: int, action: Action, placement: StagePlacement) -> str:
    """Returns a micro-batch's number, with a letter for the stage if its rank has several."""
    if placement.chunks == 1:
        return str(action.micro_batch)
    return f"{action.micro_batch}{ascii_lowercase[placement.stages_of(rank).index(action.stage) % 26]}"


def _step_of(args: NeoXArgs) -> tuple[StagePlacement, Timeline[int]]:
    micro_batches = micro_batches_of(args)
    if micro_batches is None:
        text = "is not set, so the number of micro-batches is not known; add --set gradient_accumulation_steps=N"
        raise args.error("gradient_accumulation_steps", text)
    placement = StagePlacement.configured(args, args.pp)
    return placement, timeline(action_tables(args, placement, micro_batches), placement, units, lambda *_: 0)
