"""Gathers the optimizer's state by parameter from any ZeRO stage for a checkpoint, and restores it in any
layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpointing import MASTER
from megatron.mpu import ParallelGroups
from megatron.training.deepspeed.optimizers import fitting_step
from megatron.training.engine import HostCopy, State

NamedParameter = tuple[int, str, nn.Parameter]


class OptimizerParts:
    """Reads and writes this rank's part of each parameter's state.

    params: of this rank's stage, by layer and name in the weight map; in order of the optimizer's groups.
    """

    def __init__(
        self,
        params: Sequence[NamedParameter],
        optimizer: Any,
        groups: ParallelGroups,
        dtype: torch.dtype,
        zero_stage: int,
    ) -> None:
        self.params, self._optimizer, self.groups, self._stage = list(params), optimizer, groups, zero_stage
        self._base = optimizer if zero_stage == 0 else optimizer.optimizer
        self._has_master = dtype != torch.float32

    # -- out -------------------------------------------------------------------------------------------------

    def gather(self, writer_of: Mapping[int, int], copy: HostCopy) -> Iterator[tuple[int, dict[str, State]]]:
        """Yields (layer, state by name) of the layers that this data rank writes, one after another.

        `copy` makes each tensor. writer_of: layer -> data rank; other layers are left out. All ranks of a
        data group iterate to the end together. A rank holds no more than one layer that it writes, and one
        parameter on its device.
        """
        layer_params: dict[int, list[NamedParameter]] = {}
        for item in self.params:
            layer_params.setdefault(item[0], []).append(item)
        for layer, writer in writer_of.items():
            is_writer = writer == self.groups.rank("data")
            states = {name: self._collect(param, writer, copy) for _, name, param in layer_params.get(layer, [])}
            if is_writer:
                yield layer, states

    def _collect(self, param: nn.Parameter, writer: int, copy: HostCopy) -> State:
        """Returns the full state of this tensor rank's part, gathered over data ranks; {} on ranks other than
        the writer."""
        shape = tuple(getattr(param, "ds_shape", param.shape))
        is_writer, state = writer == self.groups.rank("data"), {}
        for key in self._keys(param):
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
            # Bit for bit: everywhere else it is 0, and integers add up without rounding.
            to = self.groups.members["data"][writer]
            dist.reduce(full.view(torch.int32), to, group=self.groups.group("data"))
            if is_writer:
                state[key] = copy(full.view(shape))
        step = self._step(param)
        if is_writer and step is not None:
            # A fused optimizer counts on the device: a number would wait for it, once for each parameter.
            state["step"] = copy(step.float().reshape(())) if isinstance(step, Tensor) else torch.tensor(float(step))
        return state

    def _holder(self, param: Any) -> Tensor | None:
        """Returns the tensor under which the base optimizer keeps this rank's state of (a part of)
        `param`."""
        if self._stage == 0:
            return param
        if self._stage == 3:
            group = self._optimizer.grad_position[self._optimizer.get_param_id(param)][0]
            return self._optimizer.fp32_partitioned_groups_flat[group]
        mapping = param._hp_mapping
        return None if mapping is None else self._base.param_groups[mapping.param_group_index]["params"][0]

    def _any_state(self) -> dict[str, Any]:
        """Returns the state of any one holder; all have the same keys, also parameters held on other
        ranks."""
        return next((state for state in self._base.state.values() if state), {})

    def _keys(self, param: nn.Parameter) -> list[str]:
        state = self._any_state()
        keys = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0]
        return [*([MASTER] if self._has_master else []), *keys]

    def _step(self, param: nn.Parameter) -> Any:
        holder = self._holder(param)
        state = self._base.state.get(holder) if holder is not None else None
        return (state or self._any_state()).get("step")

    def _part(self, param: Any, key: str) -> tuple[int, Tensor] | None:
        """Returns (first element, elements) of the flattened parameter that this rank holds; a view to read
        or write."""
        holder = self._holder(param)
        if holder is None:
            return None
        values = holder if key == MASTER else self._base.state[holder][key]
        if self._stage == 0:
            return 0, values.reshape(-1)
        if self._stage == 3:
            _, start, count = self._optimizer.grad_position[self._optimizer.get_param_id(param)]
            offset = self.groups.rank("data") * count
            real = max(0, min(count, param.ds_numel - offset))
            return min(offset, param.ds_numel), values.narrow(0, start, real)
        mapping = param._hp_mapping
        lp_address, hp_address = mapping.lp_fragment_address, mapping.hp_fragment_address
        if key == MASTER:
            return lp_address.start, mapping.hp_fragment.detach()
        return lp_address.start, values.narrow(0, hp_address.start, hp_address.numel)

    @torch.no_grad()
    def set_master(self, param: nn.Parameter, offset: int, values: Tensor) -> None:
        """Set this rank's part of a flattened parameter's fp32 master weights. values: the elements from
        `offset` on."""
        part = self._part(param, MASTER)
        if part is None:
            return
        start, target = part
        low, high = max(start, offset), min(start + target.numel(), offset + values.numel())
        if low < high:
            target[low - start : high - start].copy_(values.flatten()[low - offset : high - offset])

    # -- in --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, read: Callable[[int, str], State]) -> None:
        """Set moments and step counts.

        read: returns the state of a parameter's local part for a layer and name, without `master`. If
        parameters have no state, the optimizer stays fresh.
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
