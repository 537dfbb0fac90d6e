"""Lists the settings that only one of the two engines supports, without importing torch."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.training.offload import offload, offloads_optimizer

# Keys of zero_optimization that the native engine reads; the others tune DeepSpeed's gradient reduction.
_HONOURED_KEYS = ("stage", "zero_hpz_partition_size", "offload_optimizer", "offload_param", "cpu_offload")


NATIVE_OPTIMIZERS = ("muon",)
"""Values of `optimizer.type`, in lower case, that only the native engine supports."""
NATIVE_KEYS = ("ema_decay", "mtp_num_layers", "qk_clip_threshold")
"""Keys that only the native engine supports."""


class Limit(NamedTuple):
    """A setting that only the DeepSpeed engine supports. key: its key. reason: why, worded to follow the
    key."""

    key: str
    reason: str


def limits(args: NeoXArgs) -> Iterator[Limit]:
    """Yields each setting of this configuration that only the DeepSpeed engine supports."""
    if offload(args, "offload_param") is not None and not offloads_optimizer(args):
        yield Limit(
            "zero_optimization.offload_param",
            "offloads weights without their optimizer states (offload_optimizer), on the DeepSpeed engine only",
        )
    if args.optimizer_name in ("cpu_adam", "cpu_torch_adam"):
        yield Limit("optimizer.type", f"{args.optimizer['type']} runs on the DeepSpeed engine only")
    if args.use_bnb_optimizer:
        yield Limit("use_bnb_optimizer", "runs on the DeepSpeed engine only")
    if args.prescale_gradients:
        yield Limit("prescale_gradients", "changes gradient reduction, on the DeepSpeed engine only")
    if args.gradient_predivide_factor != 1.0:
        yield Limit("gradient_predivide_factor", "changes gradient reduction, on the DeepSpeed engine only")
    if args.communication_data_type not in (None, "fp32"):
        yield Limit(
            "communication_data_type", "works on the DeepSpeed engine only; the native one reduces gradients in fp32"
        )
    for key in ("deepspeed_extra_args", "comms_logger", "dump_state"):
        if getattr(args, key):
            yield Limit(key, "works on the DeepSpeed engine only")


def native_only_feature(args: NeoXArgs) -> str | None:
    """Returns a setting of this configuration that only the native engine supports; None if there is none.

    The text has its key, origin and value: `expert_parallel_size (a.yml:3) 4`.
    """
    if args.optimizer_name in NATIVE_OPTIMIZERS:
        return f"optimizer.type ({args.origin('optimizer.type')}) {args.optimizer['type']}"
    if args.optimizer_state_dtype == "bf16":
        return f"optimizer_state_dtype ({args.origin('optimizer_state_dtype')}) bf16"
    for key in NATIVE_KEYS:
        if (value := getattr(args, key)) is not None:
            return f"{key} ({args.origin(key)}) {value}"
    if args.on_out_of_memory == "split":
        return f"on_out_of_memory ({args.origin('on_out_of_memory')}) split"
    if args.expert_parallel_size > 1:
        return f"expert_parallel_size ({args.origin('expert_parallel_size')}) {args.expert_parallel_size}"
    if args.context_parallel_size > 1:
        return f"context_parallel_size ({args.origin('context_parallel_size')}) {args.context_parallel_size}"
    if args.pp > 1 and args.zero_stage > 1:
        stage = f"zero_optimization.stage {args.zero_stage}"
        return f"pipe_parallel_size ({args.origin('pipe_parallel_size')}) {args.pp} with {stage}"
    if args.pipeline_schedule != "1f1b":
        return f"pipeline_schedule ({args.origin('pipeline_schedule')}) {args.pipeline_schedule}"
    if args.pipeline_layers is not None and 0 in args.pipeline_layers:
        return f"pipeline_layers ({args.origin('pipeline_layers')}) with a stage without blocks"
    return None


def layout_problems(args: NeoXArgs) -> Iterator[str]:
    """Yields an error line for each setting that the native engine cannot combine with this parallel layout.

    These are `zero_hpz_partition_size`, if it does not fit the data ranks, selective
    recomputation with expert parallelism and ZeRO, and ZeRO 2 and 3 and asynchronous tensor parallelism with
    deferred weight gradients.
    """
    selective = args.checkpoint_activations and args.recompute_granularity == "selective"
    if selective and args.expert_parallel_size > 1 and args.zero_stage > 0:
        # torch requires the recomputation to run the same operations, but `fully_shard` hooks the experts.
        yield (
            f"{args.origin('recompute_granularity')}: recompute_granularity: selective works with expert_parallel_size "
            f"{args.cite('expert_parallel_size')} only at ZeRO 0; write full"
        )
    if args.defers_weight_gradients and args.zero_stage > 1:
        yield (
            f"{args.origin('pipeline_schedule')}: pipeline_schedule: {args.pipeline_schedule} sums gradients over data "
            f"ranks once a step, so it runs with ZeRO 0 and 1, not {args.zero_stage}; lower zero_optimization.stage, "
            "or write interleaved"
        )
    if args.defers_weight_gradients and args.async_tensor_parallel is True:
        yield (
            f"{args.origin('async_tensor_parallel')}: async_tensor_parallel: true computes both gradients of a linear "
            f"at once; pipeline_schedule {args.cite('pipeline_schedule')} needs them apart; change one"
        )
    key = "zero_optimization.zero_hpz_partition_size"
    neighbours = args.zero_optimization["zero_hpz_partition_size"]
    data = args.data_parallel_size * args.context_parallel_size
    if args.zero_stage != 3:  # it has no effect there, on both engines
        return
    if neighbours > 1 and args.expert_parallel_size > 1:
        yield f"{args.origin(key)}: {key} {neighbours} cannot be used with expert_parallel_size; remove one of them"
    elif data % neighbours:
        kinds = "data-parallel" if args.context_parallel_size == 1 else "data- and context-parallel"
        yield f"{args.origin(key)}: {key} {neighbours} does not divide the {data} {kinds} ranks; set a divisor"


def idle_keys(args: ModelArgs) -> list[str]:
    """Returns the keys of `zero_optimization` that the user set but that the native engine does not read."""
    names = [name for name in args.zero_optimization if name not in _HONOURED_KEYS]
    if args.zero_optimization["stage"] != 3 and args.zero_optimization["zero_hpz_partition_size"] > 1:
        names.append("zero_hpz_partition_size")
    names += ["offload_param.pin_memory"] if args.zero_optimization["offload_param"] is not None else []
    return [name for name in names if args.origin(f"zero_optimization.{name}") != "default"]
