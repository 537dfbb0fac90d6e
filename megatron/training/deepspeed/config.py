"""Converts NeoXArgs to DeepSpeed's configuration, without importing DeepSpeed."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.training.native.limits import NATIVE_KEYS
from megatron.training.offload import offload, offload_problems

# Keys of DeepSpeed that are passed on unchanged. `deepspeed_extra_args` may hold only these and our own keys.
_PASSED = ("comms_logger", "dump_state")
# The key `optimizer` itself refuses the last three.
_OPTIMIZERS = (
    "adam", "adamw", "sgd", "lion", "cpu_adam", "cpu_torch_adam", "onebitadam", "sm3", "madgrad_wd",
)  # fmt: skip


def zero_stage_used(args: NeoXArgs) -> int:
    """Returns the ZeRO stage that DeepSpeed runs: the configured one, except that 0 may become 1.

    It becomes 1 with pipelines and with 16-bit weights, where DeepSpeed's stage 0 computes wrongly or is
    refused.
    """
    if args.zero_stage == 0 and (args.pp > 1 or args.params_dtype != "fp32"):
        return 1
    return args.zero_stage


def deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """Returns the full DeepSpeed configuration. No value that matters is left to DeepSpeed's defaults.

    Raises ConfigError for settings that DeepSpeed refuses or computes wrongly, and for `deepspeed_extra_args`
    that contradict other keys.
    """
    problems = [*_native_only(args), *offload_problems(args), *_gradient_problems(args)]
    stage = zero_stage_used(args)
    zero = {key: value for key, value in args.zero_optimization.items() if "offload" not in key and value is not None}
    zero["stage"] = stage
    # Stage 3 reduces the same buckets with and without overlap_comm. With it, stages 1 and 2 wait for the
    # device at every bucket that is not contiguous, and stage 1 fills its buckets in another order, so that
    # sums over more than two ranks may differ in the last bits.
    zero.setdefault("overlap_comm", stage == 3)
    zero |= {section: keys for section in ("offload_optimizer", "offload_param") if (keys := offload(args, section))}
    config: dict[str, Any] = {
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        # Without ZeRO in fp32 our engine clips: DeepSpeed would neither report that norm nor stop at a NaN in
        # it.
        "gradient_clipping": args.gradient_clipping if stage > 0 else 0.0,
        "prescale_gradients": args.prescale_gradients,
        "gradient_predivide_factor": args.gradient_predivide_factor,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # the key `optimizer` chooses which one updates offloaded state
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": args.communication_data_type or "fp32",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device at every micro-batch
        "pipeline": {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,
        },
    }
    if args.params_dtype == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": False}
    if args.params_dtype == "fp16":
        assert args.fp16 is not None
        config["fp16"] = {key: value for key, value in args.fp16.items() if key not in ("type", "fp16")}
    if args.comms_logger is not None:
        config["comms_logger"] = thaw(args.comms_logger)
    if args.dump_state:
        config["dump_state"] = True
    problems += _add_extra(config, args)
    if problems:
        raise ConfigError(problems)
    return config


def _native_only(args: NeoXArgs) -> Iterator[str]:
    if args.optimizer_name not in _OPTIMIZERS:
        name = f"optimizer.type {args.optimizer['type']}"
        yield f"{args.origin('optimizer.type')}: {name} runs on the native engine only; write engine: native"
    for key in NATIVE_KEYS:
        if getattr(args, key) is not None:
            yield f"{args.origin(key)}: {key}: runs on the native engine only; write engine: native, or remove it"
    if args.on_out_of_memory == "split":
        place = f"{args.origin('on_out_of_memory')}: on_out_of_memory: split"
        fix = "write engine: native, or on_out_of_memory: stop"
        yield f"{place}: DeepSpeed takes an equal number of micro-batches in each step; {fix}"
    if args.expert_parallel_size > 1:
        key = "expert_parallel_size"
        size = args.expert_parallel_size
        yield f"{args.origin(key)}: {key} {size} runs on the native engine only; write engine: native"
    if args.context_parallel_size > 1:
        key = "context_parallel_size"
        size = args.context_parallel_size
        yield f"{args.origin(key)}: {key} {size} runs on the native engine only; write engine: native"
    if args.pp > 1 and args.zero_stage > 1:
        key, stage = "pipe_parallel_size", f"zero_optimization.stage {args.zero_stage}"
        place = f"{args.origin(key)}: {key} {args.pp}"
        yield f"{place}: DeepSpeed runs pipelines with ZeRO 0 and 1, not {stage}; write engine: native, or lower it"
    if args.pipeline_schedule != "1f1b":
        place = f"{args.origin('pipeline_schedule')}: pipeline_schedule {args.pipeline_schedule}"
        yield f"{place}: DeepSpeed runs pipelines in the order of 1F1B only; write engine: native, or 1f1b"
    if args.pipeline_layers is not None and 0 in args.pipeline_layers:
        place = f"{args.origin('pipeline_layers')}: pipeline_layers {list(args.pipeline_layers)}"
        yield f"{place}: stages without a block run on the native engine only; write engine: native"
    if args.moe_router_bias_update_rate is not None and args.zero_stage == 3:
        key = "moe_router_bias_update_rate"
        yield f"{args.origin(key)}: {key}: DeepSpeed's ZeRO 3 would shard the bias; write engine: native, or use ZeRO 2"


def _gradient_problems(args: NeoXArgs) -> Iterator[str]:
    stage, factor = args.zero_stage, args.gradient_predivide_factor
    flags = [("prescale_gradients", args.prescale_gradients), ("gradient_predivide_factor", factor != 1.0)]
    for key in (key for key, is_set in flags if is_set):
        place = f"{args.origin(key)}: {key}"
        if key == "gradient_predivide_factor" and args.prescale_gradients:
            yield f"{place}: no effect with prescale_gradients ({args.origin('prescale_gradients')}); remove either"
        elif key == "gradient_predivide_factor" and stage == 3:
            # Seen in a run: if the factor equals the data-parallel size, DeepSpeed does not multiply by it
            # again.
            yield f"{place}: {factor} gives wrong gradients in DeepSpeed's ZeRO 3; remove it"
        elif stage >= 2 and args.zero_optimization["reduce_scatter"]:
            yield f"{place}: works with ZeRO {stage} only when zero_optimization.reduce_scatter is false; set that too"


def _add_extra(config: dict[str, Any], args: NeoXArgs) -> Iterator[str]:
    """Adds `deepspeed_extra_args` to `config`; yields an error line for each key that is unknown or
    contradicts another one."""
    off = {"enabled": False}
    stage = {**config["zero_optimization"], "stage": args.zero_stage}
    fixed = {
        "fp16": off,
        "bf16": off,
        **config,
        "gradient_clipping": args.gradient_clipping,
        "zero_optimization": stage,
    }
    place = f"{args.origin('deepspeed_extra_args')}: deepspeed_extra_args"
    declared = keys_of(NeoXArgs)
    for key, value in thaw(args.deepspeed_extra_args or {}).items():
        name = "precision" if key in ("fp16", "bf16") else key
        if key in fixed:
            for path, extra, configured in _differences(key, value, fixed[key]):
                other_key = f"{name} ({args.origin(name)})" if name in declared else "what this engine needs"
                yield f"{place}.{path}: {extra} contradicts {other_key}: {configured}; remove one of them"
        elif key in _PASSED:
            config[key] = value
        elif key in declared:
            yield f"{place}.{key}: {declared[key].refuse or f'write `{key}` outside deepspeed_extra_args'}"
        else:
            yield f"{place}.{key}: unknown to DeepSpeed 0.19.8, or not supported by this engine; remove it"


def _differences(path: str, extra: Any, fixed: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(extra, Mapping) and isinstance(fixed, Mapping):
        for key, value in extra.items():
            yield from _differences(f"{path}.{key}", value, fixed.get(key))
    elif extra != fixed:
        yield path, extra, fixed
