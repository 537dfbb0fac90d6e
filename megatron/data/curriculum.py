"""Short sequences first: how many tokens of each sample an optimizer step reads (`curriculum_learning`).

The formulas are those of DeepSpeed's CurriculumScheduler; the step counts from 1, as GPT-NeoX passes it. Li et al.,
"The Stability-Efficiency Dilemma" (arXiv 2108.06084).
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments import ConfigError, NeoXArgs


def curriculum_section(args: NeoXArgs) -> Mapping[str, Any] | None:
    """The section `curriculum_learning`, None when it is off."""
    section = args.curriculum_learning
    return section if section is not None and section["enabled"] else None


def step_length(args: NeoXArgs, step: int) -> int:
    """Tokens that optimizer step `step` (the first is 1) reads of each sample; at most `seq_length`."""
    section = curriculum_section(args)
    return args.seq_length if section is None else min(args.seq_length, difficulty(section, step))


def difficulty(section: Mapping[str, Any], step: int) -> int:
    """What the schedule of a `curriculum_learning` section says for a step."""
    schedule = section["schedule_config"]
    if section["schedule_type"] == "fixed_discrete":
        for length, last in zip(schedule["difficulty"], schedule["max_step"], strict=False):
            if step <= last:
                return length
        return schedule["difficulty"][-1]
    root = schedule["root_degree"] if section["schedule_type"] == "fixed_root" else 1
    least, most, multiple = section["min_difficulty"], section["max_difficulty"], schedule["difficulty_step"]
    share = (step / schedule["total_curriculum_step"]) ** (1.0 / root)
    length = math.floor(share * (most - least) + least) // multiple * multiple
    return min(max(length, -(-least // multiple) * multiple), most)


def check_curriculum(args: NeoXArgs) -> None:
    """Raise ConfigError for lengths that are none, or that tensor ranks cannot share under sequence parallelism."""
    section = curriculum_section(args)
    if section is None:
        return
    name = "difficulty" if section["schedule_type"] == "fixed_discrete" else "difficulty_step"
    given = section["schedule_config"][name]
    lengths = given if name == "difficulty" else (given,)
    path = f"curriculum_learning.schedule_config.{name}"
    if min(lengths) < 1:
        raise ConfigError([f"{args.origin(path)}: {path}: expected lengths of at least one token"])
    odd = [length for length in lengths if length % args.tp]
    if args.sequence_parallel and odd:
        problem = f"sequence_parallel cuts sequences over {args.tp} ranks, which does not divide {odd[0]}"
        raise ConfigError([f"{args.origin(path)}: {path}: {problem}; use multiples of {args.tp}"])
