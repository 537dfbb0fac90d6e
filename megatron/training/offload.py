"""Reads the sections of `zero_optimization` that keep weights and optimizer states in host memory."""

from collections.abc import Iterator
from typing import Any

from megatron.neox_arguments import ModelArgs, NeoXArgs


def offload(args: ModelArgs, section_name: str) -> dict[str, Any] | None:
    """Returns the set keys of a section of `zero_optimization`; None if it offloads nothing.

    section_name: offload_optimizer or offload_param. `cpu_offload: true` counts as the former with `device:
    cpu`.
    """
    section = args.zero_optimization[section_name]
    if section is None and section_name == "offload_optimizer" and args.zero_optimization["cpu_offload"]:
        section = {"device": "cpu"}
    if section is None or section["device"] == "none":
        return None
    return {key: value for key, value in section.items() if value is not None}


def offloads_optimizer(args: ModelArgs) -> bool:
    """Returns whether master weights and optimizer states are kept in host memory."""
    return offload(args, "offload_optimizer") is not None


def offload_problems(args: NeoXArgs) -> Iterator[str]:
    """Yields an error line for each setting of these sections that no engine supports."""
    zero, stage = args.zero_optimization, args.zero_stage
    if zero["cpu_offload"] and zero["offload_optimizer"] is not None:
        place = args.origin("zero_optimization.cpu_offload")
        yield f"{place}: zero_optimization.cpu_offload: offload_optimizer is set too; remove cpu_offload"
    for section, min_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        keys = offload(args, section)
        if keys is None:
            continue
        name = f"zero_optimization.{section if zero[section] is not None else 'cpu_offload'}"
        place = f"{args.origin(name)}: {name}"
        if stage < min_stage:
            bound = "" if min_stage == 3 else " or more"
            yield f"{place}: needs zero_optimization.stage {min_stage}{bound}, not {stage}"
        if keys.get("ratio", 1.0) != 1.0:
            yield (
                f"{place}.ratio: {keys['ratio']}: the native engine offloads all states, and DeepSpeed 0.19.8 updates "
                "the part that is not offloaded with the learning rate of the start; remove ratio"
            )
    if args.use_bnb_optimizer and offloads_optimizer(args):
        place = f"{args.origin('use_bnb_optimizer')}: use_bnb_optimizer"
        yield f"{place}: its state cannot leave the GPU; remove it or zero_optimization.offload_optimizer"
