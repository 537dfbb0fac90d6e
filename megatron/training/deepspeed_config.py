"""What DeepSpeed is told. Pure: the engine is the file that imports it."""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments import NeoXArgs


def zero_stage_used(args: NeoXArgs) -> int:
    """The stage DeepSpeed runs: 1 where its stage 0 is wrong or refused (pipelines, 16-bit weights)."""
    if args.zero_stage == 0 and (args.pp > 1 or args.params_dtype != "fp32"):
        return 1
    return args.zero_stage


def deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """The whole DeepSpeed configuration; nothing that matters is left to its defaults."""
    stage = zero_stage_used(args)
    zero = {key: value for key, value in args.zero_optimization.items() if "offload" not in key}
    zero["stage"] = stage
    config: dict[str, Any] = {
        "train_batch_size": args.train_batch_size,
        "train_micro_batch_size_per_gpu": args.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        # Plain fp32 without ZeRO is clipped by us: DeepSpeed neither reports that norm nor stops at a NaN in it.
        "gradient_clipping": args.gradient_clipping if stage > 0 else 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
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
    return config
