"""Lists the settings that the native engine leaves to DeepSpeed. Pure: imports no torch."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.neox_arguments import ModelArgs, NeoXArgs

# Keys of zero_optimization that the native engine reads; the others size and order DeepSpeed's reductions.
_HONOURED_KEYS = ("stage", "zero_hpz_partition_size", "offload_optimizer", "offload_param", "cpu_offload")


NATIVE_OPTIMIZERS = ("muon",)
"""Values of `optimizer.type`, in lower case, that run on the native engine alone."""


class Limit(NamedTuple):
    """A setting that only DeepSpeed can do."""

    key: str
    reason: str


def limits(args: NeoXArgs) -> Iterator[Limit]:
    """Yields each setting that only DeepSpeed can do."""
    zero = args.zero_optimization
    if args.pp > 1:
        yield Limit("pipe_parallel_size", f"{args.pp}: pipelines run on DeepSpeed")
    if args.params_dtype == "fp16":
        yield Limit("precision", "fp16: its loss scale is DeepSpeed's")
    for key in ("offload_optimizer", "offload_param"):
        section = zero[key]
        if section is not None and section["device"] != "none":
            yield Limit(f"zero_optimization.{key}", "keeps state off the device on DeepSpeed alone")
    if zero["cpu_offload"]:
        yield Limit("zero_optimization.cpu_offload", "keeps state off the device on DeepSpeed alone")
    if args.optimizer_name in ("cpu_adam", "cpu_torch_adam"):
        yield Limit("optimizer.type", f"{args.optimizer['type']} is DeepSpeed's")
    if args.use_bnb_optimizer:
        yield Limit("use_bnb_optimizer", "runs on DeepSpeed")
    if args.prescale_gradients:
        yield Limit("prescale_gradients", "divides gradients in DeepSpeed's reductions")
    if args.gradient_predivide_factor != 1.0:
        yield Limit("gradient_predivide_factor", "divides gradients in DeepSpeed's reductions")
    if args.communication_data_type not in (None, "fp32"):
        yield Limit("communication_data_type", "is of DeepSpeed's reductions; here gradients travel in fp32")
    for key in ("deepspeed_extra_args", "comms_logger", "dump_state"):
        if getattr(args, key):
            yield Limit(key, "is DeepSpeed's")


def native_only_feature(args: NeoXArgs) -> str | None:
    """Returns a setting that only the native engine can do, with its place and value; None without one."""
    if args.optimizer_name in NATIVE_OPTIMIZERS:
        return f"optimizer.type ({args.origin('optimizer.type')}) {args.optimizer['type']}"
    if args.optimizer_state_dtype == "bf16":
        return f"optimizer_state_dtype ({args.origin('optimizer_state_dtype')}) bf16"
    if args.expert_parallel_size > 1:
        return f"expert_parallel_size ({args.origin('expert_parallel_size')}) {args.expert_parallel_size}"
    return None


def layout_problems(args: NeoXArgs) -> Iterator[str]:
    """Yields an error line for each setting that does not fit the layout.

    These are `zero_hpz_partition_size` that does not fit the ZeRO stage or the data ranks, and recomputation
    of expert weights that ZeRO gathers.
    """
    selective = args.checkpoint_activations and args.recompute_granularity == "selective"
    if selective and args.expert_parallel_size > 1 and args.zero_stage > 0:
        # torch asks for the same operations both times, and `fully_shard` has hooks at the experts.
        yield (
            f"{args.origin('recompute_granularity')}: recompute_granularity: selective goes with expert_parallel_size "
            f"{args.cite('expert_parallel_size')} at ZeRO 0 alone; write full"
        )
    key = "zero_optimization.zero_hpz_partition_size"
    neighbours, data = args.zero_optimization["zero_hpz_partition_size"], args.data_parallel_size
    if neighbours > 1 and args.zero_stage != 3:
        yield f"{args.origin(key)}: {key} {neighbours} needs zero_optimization.stage 3, not {args.zero_stage}"
    elif neighbours > 1 and args.expert_parallel_size > 1:
        yield f"{args.origin(key)}: {key} {neighbours} does not go with expert_parallel_size; remove one of them"
    elif data % neighbours:
        yield f"{args.origin(key)}: {key} {neighbours} does not divide the {data} data-parallel ranks"


def idle_keys(args: ModelArgs) -> list[str]:
    """Returns the keys of `zero_optimization` that the user set and that only DeepSpeed reads."""
    names = [name for name in args.zero_optimization if name not in _HONOURED_KEYS]
    return [name for name in names if args.origin(f"zero_optimization.{name}") != "default"]
