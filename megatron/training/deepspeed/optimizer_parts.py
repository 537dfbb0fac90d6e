"""Finds the part of gradients, master weights and optimizer state that a rank holds, in any ZeRO stage.

It gathers the optimizer state of each parameter for a checkpoint, and restores it in any layout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpointing import MASTER
from megatron.model import Stage
from megatron.model.init import parameters_with_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ModelArgs
from megatron.training.deepspeed.optimizers import fitting_step
from megatron.training.engine import HostCopy, Parts, State

NamedParameter = tuple[int, str, nn.Parameter]


def owned_parameters(stage: Stage, args: ModelArgs, groups: ParallelGroups, zero_stage: int) -> list[NamedParameter]:
    """Returns (layer, name, parameter) of the trained parameters that count on this rank.

    Each element of the model counts on exactly one rank. So copies are left out: those of parameters that
    tensor ranks replicate, those of the tied embedding, and without ZeRO those on other data ranks.
    """
    first_tensor, first_data = groups.rank("tensor") == 0, groups.rank("data") == 0
    return [
        (layer, name, param)
        for layer, name, param, spec in parameters_with_specs(stage, args)
        if param.requires_grad
        and (first_tensor or spec.axis is not None)
        and spec.is_first_copy(groups)
        and (zero_stage > 0 or first_data)
    ]


class OptimizerParts:
    """Reads and writes this rank's part of each parameter's optimizer state and master weights.

    params: trained parameters of this rank's stage, in the order of the optimizer's groups.
    owned: from `owned_parameters`. A sum over their parts on all ranks is a sum over the model, in any
        layout.
    """

    def __init__(
        self,
        params: Sequence[NamedParameter],
        owned: Sequence[NamedParameter],
        optimizer: Any,
        groups: ParallelGroups,
        dtype: torch.dtype,
        zero_stage: int,
    ) -> None:
        self.params, self._owned = list(params), owned
        self._optimizer, self.groups, self._stage = optimizer, groups, zero_stage
        self._base = optimizer if zero_stage == 0 else optimizer.optimizer
        self._has_master = dtype != torch.float32

    # -- out -------------------------------------------------------------------------------------------------

    def gather(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, optimizer state by parameter name) for each layer that this data rank writes.

        writer_of: maps each layer to the data rank that writes it. copy: makes each yielded tensor. All ranks
        of a data group iterate to the end together. At any time a rank holds one such layer at most, and one
        full parameter on its device.
        """
        for layer, writer in writer_of.items():
            params = [(name, param) for param_layer, name, param in self.params if param_layer == layer]
            states = {name: self._collect(param, writer, copy) for name, param in params}
            if writer == self.groups.rank("data"):
                yield layer, states

    def _collect(self, param: nn.Parameter, writer: int, copy: HostCopy) -> State:
        """Returns the state of this tensor rank's part of a parameter, gathered over data ranks, on the data
        rank `writer`; {} on others."""
        shape = tuple(getattr(param, "ds_shape", param.shape))
        is_writer, state = writer == self.groups.rank("data"), {}
        for key in [*([MASTER] if self._has_master else []), *self._keys()]:
            part = self._part(param, key)
            if self._stage == 0 or self.groups.group("data") is None:
                if is_writer:
                    assert part is not None
                    state[key] = copy(part[1].reshape(shape))
                continue
            full = torch.zeros(torch.Size(shape).numel(), dtype=torch.float32, device=self.groups.device)
            if part is not None:
                start, value = part
                full.narrow(0, start, value.numel()).copy_(value.flatten())
            # The sum is exact to the bit: every other rank adds 0, and integers add up without rounding.
            to = self.groups.members["data"][writer]
            dist.reduce(full.view(torch.int32), to, group=self.groups.group("data"))
            if is_writer:
                state[key] = copy(full.view(shape))
        step = self._step(param)
        if is_writer and step is not None:
            # A fused optimizer counts on the device. float() would wait for the device, once per parameter.
            state["step"] = copy(step.float().reshape(())) if isinstance(step, Tensor) else torch.tensor(float(step))
        return state

    def _holder(self, param: Any) -> Tensor | None:
        """Returns the tensor that is the key of this rank's state of `param` in the base optimizer's `state`.

        None if this rank holds no part of `param`.
        """
        if self._stage == 0:
            return param
        if self._stage == 3:
            group = self._optimizer.grad_position[self._optimizer.get_param_id(param)][0]
            return self._optimizer.fp32_partitioned_groups_flat[group]
        mapping = param._hp_mapping
        return None if mapping is None else self._base.param_groups[mapping.param_group_index]["params"][0]

    def _any_state(self) -> dict[str, Any]:
        """Returns the optimizer state of any parameter that has one; {} if none has. All have the same
        keys."""
        return next((state for state in self._base.state.values() if state), {})

    def _keys(self) -> list[str]:
        return [key for key, value in self._any_state().items() if isinstance(value, Tensor) and value.dim() > 0]

    def _step(self, param: nn.Parameter) -> Any:
        holder = self._holder(param)
        state = self._base.state.get(holder) if holder is not None else None
        return (state or self._any_state()).get("step")

    def _part(self, param: Any, key: str) -> tuple[int, Tensor] | None:
        """Returns (start, view): the elements of the flattened parameter, from `start` on, that this rank
        holds.

        key: `MASTER`, or a state such as `exp_avg`. The view can be written. None if this rank holds no
        element.
        """
        holder = self._holder(param)
        if holder is None:
            return None
        values = holder.detach() if key == MASTER else self._base.state[holder][key]
        if self._stage == 0:
            return 0, values.reshape(-1)
        if self._stage == 3:
            _, start, count = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
            first_element = min(self.groups.rank("data") * count, param.ds_numel)
            return first_element, self._real(param, values.narrow(0, start, count))
        mapping = param._hp_mapping
        lp_address, hp_address = mapping.lp_fragment_address, mapping.hp_fragment_address
        if key == MASTER:
            return lp_address.start, mapping.hp_fragment.detach()
        return lp_address.start, values.narrow(0, hp_address.start, hp_address.numel)

    def _real(self, param: Any, part: Tensor) -> Tensor:
        """Returns a partition of ZeRO 3 without its padding, by which the partitions of all ranks have one
        size."""
        return part.narrow(0, 0, max(0, min(part.numel(), param.ds_numel - self.groups.rank("data") * part.numel())))

    # -- parts in which each element is on one rank ----------------------------------------------------------

    def gradients(self, loss_scale: float) -> Parts:
        """Returns the owned parts of the full batch's gradients, before clipping, divided by `loss_scale`.

        Call it between backward and update.
        """
        parts: Parts = []
        for layer, name, param in self._owned:
            grad: Tensor | None
            if self._stage == 0:
                grad = param.grad
            elif self._stage == 3:
                grad = self._real(param, self._optimizer.get_local_fp32_grad_for_param(param))
            else:
                grad = self._stage_1_gradient(param)
            if grad is not None:
                parts.append(((layer, name), grad if loss_scale == 1.0 else grad / loss_scale))
        return parts

    @staticmethod
    def _stage_1_gradient(param: Any) -> Tensor | None:
        mapping = param._hp_mapping
        if mapping is None:
            return None
        grad = mapping.get_lp_grad_fragment(param._index_in_param_group).flatten()
        part = mapping.lp_fragment_address
        # The bf16 optimizer keeps the whole gradient on every data rank, the others their own part.
        return grad.narrow(0, part.start, part.numel) if grad.numel() == param.numel() else grad

    def weights(self) -> Parts:
        """Returns the owned parts of the fp32 master weights."""
        return self._owned_parts(MASTER)

    def states(self) -> dict[str, Parts]:
        """Returns the owned parts of the optimizer's state by key (`exp_avg`); {} before the first step."""
        for holder, state in self._base.state.items():
            if state:
                keys = [key for key in self._keys() if state[key].numel() == holder.numel()]
                return {key: self._owned_parts(key) for key in keys}
        return {}

    def _owned_parts(self, key: str) -> Parts:
        parts = [
            ((layer, name), self._part(param, key))
            for layer, name, param in self._owned
            if key == MASTER or key in self._base.state.get(self._holder(param), {})  # else it had no gradient yet
        ]
        values = [(name, part[1]) for name, part in parts if part is not None]
        # With stage 3 parts may be offloaded; callers expect them on the device.
        return values if self._stage < 3 else [(name, value.to(self.groups.device)) for name, value in values]

    # -- in --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_master(self, param: nn.Parameter, offset: int, values: Tensor) -> None:
        """Set this rank's part of a parameter's fp32 master weights.

        values: elements of the flattened parameter, from index `offset` on. Elements of other ranks are
        ignored.
        """
        part = self._part(param, MASTER)
        if part is None:
            return
        start, target = part
        low, high = max(start, offset), min(start + target.numel(), offset + values.numel())
        if low < high:
            target[low - start : high - start].copy_(values.flatten()[low - offset : high - offset])

    @torch.no_grad()
    def restore(self, read: Callable[[int, str], State]) -> None:
        """Set the optimizer's moments and step counts.

        read: takes layer and name; returns the saved state of this tensor rank's part of that parameter,
            without master weights. {}: no state is saved, and the optimizer stays fresh.
        """
        if self._stage == 0:
            self._restore_by_parameter(read)
            return
        for layer, name, param in self.params:
            holder, state = self._holder(param), read(layer, name)
            if holder is None or not state:
                continue
            holder_state = self._base.state[holder]
            for key, value in state.items():
                if key == "step":
                    holder_state[key] = self._fitting_step(value, holder_state.get(key), holder)
                    continue
                if key not in holder_state:
                    holder_state[key] = torch.zeros_like(holder)
                part = self._part(param, key)
                assert part is not None
                start, target = part
                target.copy_(value.flatten().narrow(0, start, target.numel()))

    def _fitting_step(self, step: Tensor, now: Any, holder: Tensor) -> Any:
        fitting = fitting_step(step.clone(), self._base)
        if not isinstance(fitting, Tensor):
            return fitting
        device = now.device if isinstance(now, Tensor) else holder.device
        return fitting.to(device)

    def _restore_by_parameter(self, read: Callable[[int, str], State]) -> None:
        states = {i: read(layer, name) for i, (layer, name, _) in enumerate(self.params)}
        if not all(states.values()):
            return
        for i, (_, _, param) in enumerate(self.params):
            self._base.state[param] = {
                key: self._fitting_step(value, None, param) if key == "step" else value.to(param.device, copy=True)
                for key, value in states[i].items()
            }
