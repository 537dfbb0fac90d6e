"""Adam state in GPT-NeoX's files, made fit for torch.optim.AdamW where the layout is the same.

NeoX trains with DeepSpeed's FusedAdam, which counts steps only in the last parameter of each group; torch keeps a
float32 `step` tensor in each parameter. Parameters are numbered in group order: weight decay first, then without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError

_FIX = "set no_load_optim: true to go on with the weights alone"


def _steps(states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> float:
    """Updates done: the largest count found, since FusedAdam leaves the others at 0."""
    found = [holder["step"] for holder in (*states, *groups) if holder.get("step") is not None]
    return max((float(step) for step in found), default=0.0)


def _adam(state: Mapping[str, Any], size: Sequence[int], steps: float, what: str) -> dict[str, Tensor]:
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            raise CheckpointError(f"{what}: no {key}; not the state of Adam: {_FIX}")
        if tuple(state[key].shape) != tuple(size):
            raise CheckpointError(
                f"{what}: {key} has shape {tuple(state[key].shape)}, the model needs {tuple(size)}; "
                f"another layout or parameter order: {_FIX}"
            )
    return {"step": torch.tensor(steps), "exp_avg": state["exp_avg"].clone(), "exp_avg_sq": state["exp_avg_sq"].clone()}


def torch_adam_state(
    saved: Mapping[str, Any] | None, shapes: Sequence[Sequence[int]], where: str
) -> dict[int, dict[str, Tensor]]:
    """`state` of torch AdamW's state_dict from the `optimizer` entry of an mp_rank file (ZeRO 0).

    shapes: of this rank's parameters in group order. A checkpoint of step 0 gives {}, as AdamW itself does.
    where: the file, for messages. Raises CheckpointError when counts, shapes or kind do not match.
    """
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise CheckpointError(f"{where}: no optimizer state of ZeRO 0 in plain torch form; {_FIX}")
    state, groups = saved["state"], saved["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if count != len(shapes) or (state and sorted(state) != list(range(count))):
        raise CheckpointError(
            f"{where}: optimizer state of {count} parameters, this rank has {len(shapes)}; "
            f"another pipe_parallel_size or model: {_FIX}"
        )
    steps = _steps(list(state.values()), groups)
    return {i: _adam(state[i], shapes[i], steps, f"{where}: optimizer state {i}") for i in sorted(state)}


def zero_adam_state(
    saved: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], sizes: Sequence[int], where: str
) -> dict[str, Any]:
    """`optimizer_state_dict` of a ZeRO 1 or 2 file with its `base_optimizer_state` in torch AdamW's form.

    saved: what the file holds under `optimizer_state_dict`; everything else in it is handed on.
    param_groups: those of our own base optimizer's state_dict (they hold what torch needs beside the state; learning
    rate and step count follow from the schedule and the state). sizes: elements of this rank's flat partition of each
    group. Raises CheckpointError when groups or sizes do not match.
    """
    base = saved.get("base_optimizer_state")
    if isinstance(base, Mapping):
        states, groups = base.get("state", {}), base.get("param_groups", [])
        states = [states[i] for i in sorted(states)]
    elif isinstance(base, Sequence):  # "elastic": a list with the padding cut off
        groups, paddings = [{"step": saved.get("base_optimizer_state_step", 0)}], saved.get("group_paddings")
        if paddings is None or len(paddings) != len(base):
            raise CheckpointError(f"{where}: no group_paddings for its optimizer state; {_FIX}")
        states = [
            {k: F.pad(v, (0, pad)) if isinstance(v, Tensor) and v.dim() else v for k, v in group.items()}
            for group, pad in zip(base, paddings, strict=True)
        ]
    else:
        raise CheckpointError(f"{where}: no base_optimizer_state; not a file of ZeRO 1 or 2: {_FIX}")
    if len(param_groups) != len(sizes) or (states and len(states) != len(sizes)):
        raise CheckpointError(f"{where}: {len(states)} parameter groups, this rank has {len(sizes)}; {_FIX}")
    steps = _steps(states, groups)
    state = {i: _adam(s, (sizes[i],), steps, f"{where}: optimizer state of group {i}") for i, s in enumerate(states)}
    return {**saved, "base_optimizer_state": {"state": state, "param_groups": [dict(g) for g in param_groups]}}


def sum_bias_masters(ranks: Sequence[Mapping[str, Any]], tensor_rank: int, where: str) -> dict[str, Any]:
    """fp32 master weights of a ZeRO file of GPT-NeoX with row-parallel biases made whole, as our model holds them.

    Needed under gpt_j_residual at tensor size > 1, where each rank's file holds its own part of those biases. ranks:
    `optimizer_state_dict` of all tensor ranks in order, same pipe and data rank (flat layouts are then equal).
    """
    key, own = "single_partition_of_fp32_groups", ranks[tensor_rank]
    if "param_slice_mappings" not in own:
        raise CheckpointError(f"{where}: does not say where each parameter lies (param_slice_mappings); {_FIX}")
    masters = [group.clone() for group in own[key]]
    for i, slices in enumerate(own["param_slice_mappings"]):
        for name, address in slices.items():
            if name.endswith(("attention.dense.bias", "mlp.linear2.bias")):
                part = slice(address.start, address.start + address.numel)
                masters[i][part] = torch.stack([rank[key][i][part] for rank in ranks]).sum(0)
    return {**own, key: masters}
