"""Assigns every element of weights, gradients and optimizer state to exactly one rank."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.model import Stage
from megatron.model.init import parameters_with_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Parts


class ShardedState:
    """Splits the trainable parameters into parts, so that exactly one rank owns each element of the model.

    A sum over the parts of all ranks is a sum over the model, in any layout. Copies count once: of parameters
    that tensor ranks share, of the tied embedding, of data ranks without ZeRO.
    """

    def __init__(self, stage: Stage, args: NeoXArgs, optimizer: Any, groups: ParallelGroups, zero_stage: int) -> None:
        self._optimizer, self._stage = optimizer, zero_stage
        first_tensor, first_data = groups.rank("tensor") == 0, groups.rank("data") == 0
        self._params = [
            ((layer, name), param)
            for layer, name, param, spec in parameters_with_specs(stage, args)
            if param.requires_grad
            and (first_tensor or spec.axis is not None)
            and spec.is_first_copy(groups)
            and (zero_stage > 0 or first_data)
        ]

    def gradients(self, loss_scale: float = 1.0) -> Parts:
        """Returns the gradients of the full batch, not clipped, divided by `loss_scale`. Call it between
        backward and update."""
        parts: Parts = []
        for name, param in self._params:
            grad: Tensor | None
            if self._stage == 0:
                grad = param.grad
            elif self._stage == 3:
                grad = self._real(param, self._optimizer.get_local_fp32_grad_for_param(param))
            else:
                grad = self._stage_1_gradient(param)
            if grad is not None:
                parts.append((name, grad if loss_scale == 1.0 else grad / loss_scale))
        return parts

    def weights(self) -> Parts:
        """Returns fp32 master values."""
        if self._stage == 0:
            return [(name, param.detach()) for name, param in self._params]
        if self._stage == 3:
            return [(name, self._real(p, self._optimizer.get_local_fp32_param(p))) for name, p in self._params]
        return [(name, mapping.hp_fragment.detach()) for name, mapping in self._mapped()]

    def states(self) -> dict[str, Parts]:
        """Returns the tensors of the optimizer's state by key (`exp_avg`); {} before the first step."""
        parts_of_key: dict[str, Parts] = {}
        if self._stage == 0:
            for name, param in self._params:
                for key, value in self._optimizer.state[param].items():
                    if isinstance(value, Tensor) and value.numel() == param.numel():
                        parts_of_key.setdefault(key, []).append((name, value))
            return parts_of_key
        base = self._optimizer.optimizer
        if self._stage == 3:
            items = [item for state in base.state.values() for item in state.items()]
            keys = [key for key, value in items if isinstance(value, Tensor) and value.dim() > 0]
            for key in dict.fromkeys(keys):
                values = [(name, self._optimizer.get_local_fp32_param(p, key), p) for name, p in self._params]
                parts_of_key[key] = [(name, self._real(param, value)) for name, value, param in values]
            return parts_of_key
        for name, mapping in self._mapped():
            flat = base.param_groups[mapping.param_group_index]["params"][0]
            for key, value in base.state[flat].items():
                if isinstance(value, Tensor) and value.numel() == flat.numel():
                    part = mapping.hp_fragment_address
                    parts_of_key.setdefault(key, []).append((name, value.narrow(0, part.start, part.numel)))
        return parts_of_key

    def _mapped(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """Yields name and mapping of each parameter that has a part in this rank's partition, for ZeRO 1 and
        2."""
        for name, param in self._params:
            mapping = param._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                yield name, mapping

    @staticmethod
    def _stage_1_gradient(param: Any) -> Tensor | None:
        mapping = param._hp_mapping
        if mapping is None:
            return None
        grad = mapping.get_lp_grad_fragment(param._index_in_param_group).flatten()
        part = mapping.lp_fragment_address
        # The bf16 optimizer keeps the whole gradient on every data rank, the others their own part.
        return grad.narrow(0, part.start, part.numel) if grad.numel() == param.numel() else grad

    @staticmethod
    def _real(param: Any, part: Tensor) -> Tensor:
        """Returns a stage-3 partition without the padding that gives all ranks equal sizes."""
        rank = dist.get_rank(group=param.ds_process_group)
        return part.narrow(0, 0, max(0, min(part.numel(), param.ds_numel - rank * part.numel())))
