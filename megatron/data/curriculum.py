"""Computes sequence lengths for curricula that train on short sequences first.

`curriculum_learning`: each optimizer step reads only the first tokens of each sample. The formulas are those
  of DeepSpeed's CurriculumScheduler; steps count from 1, as in GPT-NeoX. Li et al., "The Stability-Efficiency
  Dilemma" (arXiv 2108.06084).
`seq_curriculum`: no token is dropped. The micro-batch [batch, seq_length] of a step is read as [batch *
  seq_length / seq_len, seq_len], so steps, their tokens and the resume position are the same as without a
  curriculum.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments import NeoXArgs


def curriculum_section(args: NeoXArgs) -> Mapping[str, Any] | None:
    """Return the configuration section `curriculum_learning`; None if it is missing or not enabled."""
    section = args.curriculum_learning
    return section if section is not None and section["enabled"] else None


def step_length(args: NeoXArgs, step: int) -> int:
    """Return how many tokens of each sample optimizer step `step` (the first is 1) reads, at most
    `seq_length`."""
    section = curriculum_section(args)
    return args.seq_length if section is None else min(args.seq_length, difficulty(section, step))


def has_curriculum(args: NeoXArgs) -> bool:
    return args.seq_curriculum is not None or curriculum_section(args) is not None


def row_length(args: NeoXArgs, step: int) -> int:
    """Return the length in tokens of the model's input rows in optimizer step `step` (the first is 1)."""
    section = args.seq_curriculum
    return step_length(args, step) if section is None else section["seq_len"][bisect_left(section["until"], step)]


def difficulty(section: Mapping[str, Any], step: int) -> int:
    """Return the sequence length of optimizer step `step` by the schedule of a `curriculum_learning`
    section."""
    schedule = section["schedule_config"]
    if section["schedule_type"] == "fixed_discrete":
        for length, last in zip(schedule["difficulty"], schedule["max_step"], strict=False):
            if step <= last:
                return length
        return schedule["difficulty"][-1]
    root = schedule["root_degree"] if section["schedule_type"] == "fixed_root" else 1
    min_length, max_length, multiple = section["min_difficulty"], section["max_difficulty"], schedule["difficulty_step"]
    share = (step / schedule["total_curriculum_step"]) ** (1.0 / root)
    length = math.floor(share * (max_length - min_length) + min_length) // multiple * multiple
    return min(max(length, -(-min_length // multiple) * multiple), max_length)


def check_curriculum(args: NeoXArgs) -> None:
    """Raise ConfigError if a curriculum has unusable sequence lengths.

    They are unusable below 1, or, with `sequence_parallel` and without context parallelism, if the number of
    tensor-parallel ranks does not divide them.
    """
    section = curriculum_section(args)
    if args.seq_curriculum is not None:
        lengths, path = args.seq_curriculum["seq_len"], "seq_curriculum.seq_len"
    elif section is not None:
        name = "difficulty" if section["schedule_type"] == "fixed_discrete" else "difficulty_step"
        value = section["schedule_config"][name]
        lengths, path = value if name == "difficulty" else (value,), f"curriculum_learning.schedule_config.{name}"
    else:
        return
    if min(lengths) < 1:
        raise args.error(path, "expected lengths of at least one token")
    odd = [length for length in lengths if length % args.tp]
    if args.sequence_parallel and odd and args.context_parallel_size == 1:  # which pads rows
        problem = f"sequence_parallel splits rows over {args.tp} ranks, but {args.tp} does not divide length {odd[0]}"
        raise args.error(path, f"{problem}; use multiples of {args.tp}")
