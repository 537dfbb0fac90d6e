"""Orders the forward and backward passes of a step over pipeline ranks (`pipeline_schedule`)."""

from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from megatron.model.pipeline_partition import StagePlacement
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.methods import declaration_of

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    kind: zero-bubble schedules divide a backward. "backward_input" computes the gradients of hidden states,
        for which other ranks wait, and "backward_weight" those of weights, later.
    stage: its number in the model. With virtual stages a rank holds several (`StagePlacement`).
    """

    kind: Kind
    stage: int
    micro_batch: int


def action_tables(args: ModelArgs, placement: StagePlacement, micro_batches: int) -> list[list[Action]]:
    """Returns the actions of each pipeline rank in a step of `micro_batches`, in order.

    Raises ConfigError if the schedule does not support this number of micro-batches.
    """
    if (problem := _problem(args, placement.ranks, micro_batches)) is not None:
        raise args.error("pipeline_schedule", problem)
    if placement.ranks == 1 or args.pipeline_schedule == "1f1b":
        return [one_forward_one_backward(rank, placement.ranks, micro_batches) for rank in range(placement.ranks)]
    return _torch_tables(args.pipeline_schedule, placement, micro_batches)


def schedule_problems(args: NeoXArgs) -> list[str]:
    """Returns an error line if the configured schedule does not support the number of micro-batches of a
    step."""
    if args.gradient_accumulation_steps is None:
        return []
    micro_batches = args.gradient_accumulation_steps * declaration_of(args).sets_per_step(args)
    problem = _problem(args, args.pp, micro_batches)
    return [] if problem is None else [f"{args.origin('pipeline_schedule')}: pipeline_schedule: {problem}"]


def _problem(args: ModelArgs, ranks: int, micro_batches: int) -> str | None:
    if ranks == 1 or args.pipeline_schedule in ("1f1b", "zbv"):
        return None
    text = f"{args.pipeline_schedule} on {ranks} pipeline ranks"
    if args.pipeline_schedule == "dualpipev":
        problem = f"{text} needs {2 * ranks} micro-batches a step or more, not {micro_batches}"
        return None if micro_batches >= 2 * ranks else f"{problem}; raise gradient_accumulation_steps"
    if micro_batches % (rounds := _rounds(ranks, micro_batches)) == 0:
        return None
    fitting = next(n for n in range(micro_batches, 0, -1) if n % _rounds(ranks, n) == 0)
    return (
        f"{text} runs the {micro_batches} micro-batches of a step in {rounds} rounds, which must be equally long; set "
        f"gradient_accumulation_steps to {fitting}, or to a multiple of {ranks}"
    )


def _rounds(ranks: int, micro_batches: int) -> int:
    """Returns the number of times in which ranks take turns over their stages."""
    return max(1, micro_batches // ranks)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Returns the actions of a stage in the order of 1F1B (arXiv 2006.09503, PipeDream-Flush).

    A stage first runs one forward for each later stage. Then it runs a forward and a backward in turns, and
    at last the remaining backwards. With one stage each micro-batch is finished before the next begins.
    """
    # torch's Schedule1F1B needs as many micro-batches as stages.
    forwards = [Action("forward", stage, i) for i in range(micro_batches)]
    backwards = [Action("backward", stage, i) for i in range(micro_batches)]
    warm_up = min(stages - 1 - stage, micro_batches)
    turns = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return [*forwards[:warm_up], *turns, *backwards[micro_batches - warm_up :]]


def _torch_tables(schedule: str, placement: StagePlacement, micro_batches: int) -> list[list[Action]]:
    """Returns the table of one of torch's schedules for each rank.

    interleaved: ranks run their stages in turns, each for as many micro-batches as there are ranks (arXiv
    2104.04473). zero_bubble: ZB1P of arXiv 2401.10241. zbv: its ZB-V. dualpipev: DeepSeek's DualPipe (arXiv
    2412.19437), cut in half.
    """
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _ComputationType as Computation

    # The constructors want torch's own stages; the tables need these numbers only.
    sizes: Any = SimpleNamespace(
        pp_group_size=placement.ranks,
        n_local_stages=placement.chunks,
        num_stages=placement.stages,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // _rounds(placement.ranks, micro_batches),
    )
    names: dict[str, Any] = {
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
        "zbv": pipelining.ScheduleZBVZeroBubble,
        "dualpipev": pipelining.ScheduleDualPipeV,
    }
    kinds: dict[Computation, Kind] = {
        Computation.FORWARD: "forward",
        Computation.FULL_BACKWARD: "backward",
        Computation.BACKWARD_INPUT: "backward_input",
        Computation.BACKWARD_WEIGHT: "backward_weight",
    }
    tables = []
    for rank in range(placement.ranks):
        table = names[schedule]._calculate_single_rank_operations(sizes, rank)
        # A forward and a backward that torch runs at once (`sub_actions`) run one after the other here.
        actions = [part for action in table if action for part in action.sub_actions or (action,)]
        tables.append([Action(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in actions])
    return tables
