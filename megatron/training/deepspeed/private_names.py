"""Lists the private names of DeepSpeed that this package uses, and checks the installed DeepSpeed.

The installed version must have all of these names, and must not be known for wrong gradients.
"""

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from megatron.neox_arguments.validation.deepspeed_versions import FIX, wrong_deepspeed


class Private(NamedTuple):
    """A private name of DeepSpeed that this package uses.

    location: its module, and after a colon its class, such as `deepspeed.comm.comm` or `a.module:Class`.
    name: with `()`, a method or function of that module or class; without, an attribute that the module's
        code sets on objects or parameters at run time.
    purpose: the reason for its use, worded to follow "to".
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

# In the order of this package's files. Spaces separate the names of a line.
_RELIED_ON = (
    # attach
    ("deepspeed.ops", "__compatible_ops__", "avoid compiling an op that only inference uses"),
    ("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator", "is_fp16_supported()", "train in fp16 on a CPU"),
    ("deepspeed.runtime.zero.partition_parameters:Init", "_convert_to_zero_parameters()", "shard a model by layers"),
    ("deepspeed.comm.comm", "cdb", "create a process group only on its members"),
    # hooks
    (_ENGINE, "_take_model_step()", "read gradients before each update, and skip updates"),
    (_ZERO_1_2, "scaled_global_norm()", "let the norm see that a rank's gradients were not finite"),
    (_ZERO_3, "_get_norm_groups()", "let the norm see that a rank's gradients were not finite"),
    (_BF16, "get_grads_for_norm()", "let the norm see that a rank's gradients were not finite"),
    # engine
    (_FP16, "raise_error_at_min_scale", "allow as many fp16 overflows in a row as GPT-NeoX"),
    (_ZERO_1_2, "loss_scaler overflow", "read the loss scale, and whether an update was skipped"),
    (_ZERO_3, "loss_scaler overflow", "read the loss scale, and whether an update was skipped"),
    (_BF16, "overflow", "read whether an update was skipped"),
    (_ENGINE, "micro_steps", "change the number of micro-batches between steps"),
    (_PIPE, "total_loss", "read the loss before the update"),
    (_PIPE, "reset_activation_shape()", "change the length of rows between steps"),
    ("deepspeed.comm.comm", "comms_logger", "end DeepSpeed's communication log with the run"),
    ("deepspeed.runtime.utils", "tensor_model_parallel", "count copies on tensor ranks once in the norm"),
    # pipeline
    ("deepspeed.runtime.constants", "ds_pipe_replicated", "count copies on pipeline stages once in the norm"),
    (
        "deepspeed.runtime.pipe.schedule",
        "SendGrad() RecvGrad() BackwardPass()",
        "end the backward pass at the lowest trained layer",
    ),
    ("deepspeed.utils.timer", "NoopTimer()", "turn off timers that leak CUDA events"),
    (_ENGINE, "timers", "turn off timers that leak CUDA events"),
    (_PIPE, "_INSTRUCTION_MAP pipe_buffers grad_layer", "send no gradient below the lowest trained layer"),
    (
        "deepspeed.runtime.pipe.module:PipelineModule",
        "get_tied_weights_and_groups()",
        "sum gradients of tied weights over stages",
    ),
    (_ZERO_1_2, "grad_accum", "find the gradients of tied weights"),
    (_BF16, "_hp_grad", "find the gradients of tied weights"),
    (_ENGINE, "_common_checkpoint_state()", "write the entries of GPT-NeoX's checkpoint files"),
    (_ENGINE, "_get_zero_param_shapes()", "read the state of 8-bit Adam"),
    (_FP16, "cur_scale cur_iter last_overflow_iter cur_hysteresis", "save and restore the loss scale"),
    # optimizers
    ("deepspeed.ops.adam.cpu_adam", "ds_opt_adam", "restore step counts in the type that it needs"),
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
    """Raise RuntimeError for a DeepSpeed version that computes wrong gradients, or is older than all we
    checked."""
    wrong = wrong_deepspeed(installed)
    if wrong is not None:
        raise RuntimeError(f"{wrong}; {FIX}")


def check_deepspeed() -> None:
    """Raise RuntimeError if the installed DeepSpeed is a bad version (`check_version`) or lacks a private
    name."""
    check_version(version("deepspeed"))
    for private in PRIVATE_NAMES:
        if not is_present(private):
            raise RuntimeError(
                f"deepspeed {version('deepspeed')} has no {private.location.replace(':', '.')}.{private.name}, "
                f"which is needed to {private.purpose}; {FIX}"
            )
