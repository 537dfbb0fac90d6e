"""Lists the private names of DeepSpeed that this package uses, and checks the installed DeepSpeed.

It must have all of them, and must not be a version known for wrong gradients.
"""

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from megatron.neox_arguments.validation.deepspeed_versions import FIX, wrong_deepspeed


class Private(NamedTuple):
    """A private name of DeepSpeed that this package uses.

    location: its module; after a colon, its class.
    name: with `()`, a method or function of that module or class; else an attribute that the module's code
        sets on objects or parameters at run time.
    purpose: what this package uses it for, as words after "to".
    """

    location: str
    name: str
    purpose: str


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PIPE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_FRAGMENT = "deepspeed.utils.tensor_fragment:tensor_fragment"
_FP16 = "deepspeed.runtime.fp16.loss_scaler"

# By the files that rely on them; blanks separate the names of one line.
_RELIED_ON = (
    # attach
    ("deepspeed.ops", "__compatible_ops__", "leave out an op that is compiled at start and only inference uses"),
    ("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", "is_fp16_supported()", "train in fp16 on a CPU"),
    ("deepspeed.runtime.zero.partition_parameters:Init", "_convert_to_zero_parameters()", "shard a model by layers"),
    ("deepspeed.comm.comm", "cdb", "make no group on ranks that are not in it"),
    # hooks
    (_ENGINE, "_take_model_step()", "look at gradients before each update, and leave one out"),
    (_ZERO_1_2, "scaled_global_norm()", "let the norm see that a rank's gradients were not finite"),
    (_ZERO_3, "_get_norm_groups()", "let the norm see that a rank's gradients were not finite"),
    (_BF16, "get_grads_for_norm()", "let the norm see that a rank's gradients were not finite"),
    # engine
    (_FP16, "raise_error_at_min_scale", "end a run of overflows as GPT-NeoX does"),
    (_ZERO_1_2, "loss_scaler overflow", "know that an update was left out, and the loss scale"),
    (_ZERO_3, "loss_scaler overflow", "know that an update was left out, and the loss scale"),
    (_BF16, "overflow", "know that an update was left out"),
    (_ENGINE, "micro_steps", "let a step have another number of micro-batches"),
    (_PIPE, "total_loss", "see the loss before the update"),
    (_PIPE, "reset_activation_shape()", "change the length of rows between steps"),
    ("deepspeed.comm.comm", "comms_logger", "end its log with the run"),
    ("deepspeed.runtime.utils", "tensor_model_parallel", "count copies on tensor ranks once in the norm"),
    # pipeline
    ("deepspeed.runtime.constants", "ds_pipe_replicated", "count copies on pipeline stages once in the norm"),
    ("deepspeed.runtime.pipe.schedule", "SendGrad() RecvGrad() BackwardPass()", "send no gradient further"),
    ("deepspeed.utils.timer", "NoopTimer()", "leave out timers that keep CUDA events"),
    (_ENGINE, "timers", "leave out timers that keep CUDA events"),
    (_PIPE, "_INSTRUCTION_MAP pipe_buffers grad_layer", "send no gradient below the lowest trained layer"),
    ("deepspeed.runtime.pipe.module:PipelineModule", "get_tied_weights_and_groups()", "sum gradients of copies"),
    (_ZERO_1_2, "grad_accum", "find the gradients of copies"),
    (_BF16, "_hp_grad", "find the gradients of copies"),
    (_ENGINE, "_common_checkpoint_state()", "write what GPT-NeoX's files hold"),
    (_ENGINE, "_get_zero_param_shapes()", "read the state of 8-bit Adam"),
    (_FP16, "cur_scale cur_iter last_overflow_iter cur_hysteresis", "go on with the loss scale"),
    # optimizers
    ("deepspeed.ops.adam.cpu_adam", "ds_opt_adam", "give its step counts back as it counts"),
    # optimizer_parts: which part of a parameter this rank holds
    ("deepspeed.runtime.base_optimizer", "_hp_mapping", "find weights and moments of ZeRO 1 and 2"),
    (_FRAGMENT, "hp_fragment hp_fragment_address param_group_index", "find weights and moments of ZeRO 1 and 2"),
    (_FRAGMENT, "lp_fragment_address get_lp_grad_fragment()", "find gradients of ZeRO 1 and 2"),
    ("deepspeed.utils.mixed_precision_linkage", "_index_in_param_group", "find gradients of ZeRO 1 and 2"),
    (_ZERO_3, "get_local_fp32_grad_for_param()", "find gradients of ZeRO 3"),
    (_ZERO_3, "fp32_partitioned_groups_flat", "find weights and moments of ZeRO 3"),
    (_ZERO_3, "grad_position get_param_id()", "find weights and moments of ZeRO 3"),
    ("deepspeed.runtime.zero.partition_parameters", "ds_shape ds_numel", "find the padding of ZeRO 3"),
)
PRIVATE_NAMES = tuple(
    Private(location, name, purpose) for location, names, purpose in _RELIED_ON for name in names.split()
)


def is_present(private: Private) -> bool:
    """Returns whether the installed DeepSpeed has this name."""
    name, (path, _, owner) = private.name.removesuffix("()"), private.location.partition(":")
    try:
        module = import_module(path)
        namespace = getattr(module, owner) if owner else module
    except (ImportError, AttributeError):
        return False
    if name != private.name:
        return hasattr(namespace, name)
    return re.search(rf"\b{name}\b", Path(module.__file__ or "").read_text(encoding="utf-8")) is not None


def check_version(installed: str) -> None:
    """Raise RuntimeError for a DeepSpeed version that trains wrongly, or is older than any version
    checked."""
    wrong = wrong_deepspeed(installed)
    if wrong is not None:
        raise RuntimeError(f"{wrong}; {FIX}")


def check_deepspeed() -> None:
    """Check the installed DeepSpeed: raises RuntimeError for a bad version (`check_version`) or a missing
    private name."""
    check_version(version("deepspeed"))
    for private in PRIVATE_NAMES:
        if not is_present(private):
            raise RuntimeError(
                f"deepspeed {version('deepspeed')} has no {private.location.replace(':', '.')}.{private.name}, "
                f"which is needed to {private.purpose}; {FIX}"
            )
