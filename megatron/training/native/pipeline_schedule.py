"""Orders the passes of micro-batches over pipeline stages, and shows who does what when."""

from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

from megatron.neox_arguments import ConfigError, NeoXArgs

# In units of time: a backward has two matrix products for each of the forward.
_DURATION = {"forward": 1, "backward": 2}


class Action(NamedTuple):
    """One pass of one micro-batch through this rank's stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Returns the actions of a stage in the order of 1F1B (arXiv 2006.09503, PipeDream-Flush).

    A stage first runs one forward for each later stage. Then it runs a forward and a backward in turns, and
    at last the remaining backwards. With one stage each micro-batch is finished before the next begins.
    """
    forwards = [Action("forward", i) for i in range(micro_batches)]
    backwards = [Action("backward", i) for i in range(micro_batches)]
    warm_up = min(stages - 1 - stage, micro_batches)
    turns = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *turns, *backwards[micro_batches - warm_up :]]


class Timeline(NamedTuple):
    """A step over all stages, if messages take no time.

    begins: for each stage, its actions with the unit of time at which each begins.
    length: of the step, in units of time: 1 for a forward, 2 for a backward.
    idle: share of all stages' time in which they wait.
    held: for each stage, the most micro-batches whose activations it holds at a time.
    """

    begins: list[list[tuple[int, Action]]]
    length: int
    idle: float
    held: list[int]


def timeline(stages: int, micro_batches: int) -> Timeline:
    """Returns when each stage runs each action of 1F1B, as soon as it and its input are ready."""
    todo = [one_forward_one_backward(stage, stages, micro_batches) for stage in range(stages)]
    begins: list[list[tuple[int, Action]]] = [[] for _ in range(stages)]
    ends: dict[tuple[int, Action], int] = {}
    clocks = [0] * stages
    while any(todo):
        for stage, actions in enumerate(todo):
            while actions:
                action = actions[0]
                source = (stage - 1 if action.kind == "forward" else stage + 1, action)
                if 0 <= source[0] < stages and source not in ends:
                    break  # its input comes later
                begin = max(clocks[stage], ends.get(source, 0))
                begins[stage].append((begin, actions.pop(0)))
                clocks[stage] = ends[stage, action] = begin + _DURATION[action.kind]
    length, busy = max(clocks), micro_batches * sum(_DURATION.values())
    held = [max(accumulate(1 if a.kind == "forward" else -1 for _, a in actions)) for actions in begins]
    return Timeline(begins, length, 1 - busy / length, held)


def schedule_lines(args: NeoXArgs) -> list[str]:
    """Returns the pipeline schedule of a configuration as text: a line for each stage, with its actions.

    `F3` is the forward of micro-batch 3, `B3 --` its backward; dots are idle time. Raises ConfigError if the
    number of micro-batches is not known.
    """
    step = _timeline_of(args)
    width = len(f"F{len(step.begins[0]) // 2 - 1}")
    stages, micro_batches = f"{args.pp} stage{'s' * (args.pp > 1)}", args.gradient_accumulation_steps
    lines = [
        f"1F1B, {stages}, {micro_batches} micro-batches a step: idle for {step.idle:.1%} of the time, if stages are "
        "equal, a backward takes two forwards, and messages take no time"
    ]
    for stage, actions in enumerate(step.begins):
        cells = ["." * width] * step.length
        for begin, action in actions:
            cells[begin] = f"{action.kind[0].upper()}{action.micro_batch}".ljust(width)
            if action.kind == "backward":
                cells[begin + 1] = "-" * width
        lines.append(f"stage {stage:<3} {' '.join(cells)}  holds activations of {step.held[stage]}")
    return lines


def draw_schedule(args: NeoXArgs, path: Path) -> None:
    """Writes the pipeline schedule of a configuration as a picture, by matplotlib. The suffix of `path` gives
    the format. Raises ConfigError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    step = _timeline_of(args)
    figure, axes = pyplot.subplots(figsize=(max(6.0, step.length * 0.35), 1.5 + 0.4 * args.pp), layout="constrained")
    for kind, color in (("forward", "tab:blue"), ("backward", "tab:orange")):
        for stage, actions in enumerate(step.begins):
            bars = [(begin, action.micro_batch) for begin, action in actions if action.kind == kind]
            spans = [(begin, _DURATION[kind]) for begin, _ in bars]
            axes.broken_barh(
                spans, (stage - 0.4, 0.8), color=color, edgecolor="white", label=kind if stage == 0 else None
            )
            for begin, micro_batch in bars:
                axes.text(begin + _DURATION[kind] / 2, stage, str(micro_batch), ha="center", va="center", color="white")
    axes.set_yticks(range(args.pp), [f"stage {stage}" for stage in range(args.pp)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forward passes of a stage")
    axes.set_title(f"1F1B: idle for {step.idle:.1%}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as problem:  # ValueError: a suffix that matplotlib does not know
        raise ConfigError([f"--schedule-picture {path}: cannot be written ({problem}); name a .png or .svg"]) from None
    finally:
        pyplot.close(figure)


def _timeline_of(args: NeoXArgs) -> Timeline:
    if args.gradient_accumulation_steps is None:
        text = "is not set, so the number of micro-batches is not known; add --set gradient_accumulation_steps=N"
        raise args.error("gradient_accumulation_steps", text)
    return timeline(args.pp, args.gradient_accumulation_steps)
