"""Which iterations of a run step on `ga_dataset`: what unlearning asks of the order of steps."""

from megatron.neox_arguments.resolved import ResolvedArgs


def is_ascent(args: ResolvedArgs, iteration: int) -> bool:
    """Whether the step after `iteration` others is one on `ga_dataset`.

    As the fork's trainer: the first is ordinary, then `interleaved` has one of `ga_interleave_ratio` + 1.
    `interval` has `ga_iters` in the place of each `ga_interval`-th ordinary one.
    """
    if args.ga_dataset is None or iteration == 0:
        return False
    if args.ga_mode == "interleaved":
        return iteration % (args.ga_interleave_ratio + 1) == 0
    return _place_in_burst(args, iteration) is not None


def begins_burst(args: ResolvedArgs, iteration: int) -> bool:
    """Whether the step after `iteration` others is the first of a burst; each of `interleaved` is one."""
    return is_ascent(args, iteration) and (args.ga_mode == "interleaved" or _place_in_burst(args, iteration) == 0)


def _place_in_burst(args: ResolvedArgs, iteration: int) -> int | None:
    assert args.ga_interval is not None and args.ga_iters is not None
    place = (iteration - args.ga_interval) % (args.ga_interval - 1 + args.ga_iters)
    return place if iteration >= args.ga_interval and place < args.ga_iters else None


def ascent_steps(args: ResolvedArgs, first: int, end: int) -> int:
    """How many of the steps [first, end), counted from 0, are on `ga_dataset`."""
    return _ascents_before(args, end) - _ascents_before(args, first) if first < end else 0


def _ascents_before(args: ResolvedArgs, end: int) -> int:
    if args.ga_dataset is None or end == 0:
        return 0
    if args.ga_mode == "interleaved":
        return (end - 1) // (args.ga_interleave_ratio + 1)
    assert args.ga_interval is not None and args.ga_iters is not None
    cycles, place = divmod(max(0, end - args.ga_interval), args.ga_interval - 1 + args.ga_iters)
    return cycles * args.ga_iters + min(place, args.ga_iters)


def optimizer_steps(args: ResolvedArgs, iterations: int) -> int:
    """The optimizer steps of `iterations` as `train_iters` counts them: a burst of `interval` is one of
    them."""
    if args.ga_dataset is None or args.ga_mode == "interleaved":
        return iterations
    assert args.ga_interval is not None and args.ga_iters is not None
    return iterations + (iterations - 1) // args.ga_interval * (args.ga_iters - 1)
