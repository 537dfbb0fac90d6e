"""Settles the configuration of a run that is planned: world size, vocabulary, context ranks."""

from collections.abc import Callable

from megatron.launch.environment import ProcessInfo
from megatron.mpu import check_experts, settle_context
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.methods import declaration_of, method_name, planned_methods
from megatron.neox_arguments.values.losses import check_scored_before
from megatron.tokenizer import build_tokenizer, with_vocabulary
from megatron.training.offload import offload

_UNPLANNED = {
    "zero_optimization": "memory of the host cannot be planned yet; leave out the offload sections",
    "lora": "quantized weights cannot be planned yet; leave out lora.quantization",
    "skip_step_above_sigma": "a step that depends on its loss cannot be planned; leave it out",
    "precision_fp8": "mxfp8 cannot be planned: the planned GPU has compute capability 9.0; set tensorwise or rowwise",
}


def settled_args(args: NeoXArgs, world: int, gpus_per_node: int, log: Callable[[str], None]) -> NeoXArgs:
    """Returns the configuration on `world` ranks.

    Raises ConfigError for what cannot be planned yet.
    """
    if args.engine == "deepspeed":
        raise args.error("engine", "deepspeed cannot be planned; set engine: native")
    if not declaration_of(args).is_planned:
        names = ", ".join(planned_methods())
        raise ConfigError([f"deepy.py plan: {method_name(args)} cannot be planned yet; planned are SFT, {names}"])
    check_scored_before(args)
    for key, is_set in {
        "zero_optimization": any(offload(args, name) for name in ("offload_optimizer", "offload_param")),
        "lora": (args.user_values.get("lora") or {}).get("quantization") is not None,
        "skip_step_above_sigma": args.skip_step_above_sigma is not None,
        "precision_fp8": args.precision_fp8 == "mxfp8",
    }.items():
        if is_set:
            raise args.error(key, _UNPLANNED[key])
    if args.padded_vocab_size is None:
        args = with_vocabulary(args, build_tokenizer(args))
    args = args.for_world(world)
    process = ProcessInfo(0, world, 0, min(gpus_per_node, world), "localhost", 0, "alone")
    check_experts(args, process)
    return settle_context(args, process, log)
