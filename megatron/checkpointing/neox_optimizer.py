"""Reads Adam's state by parameter from a checkpoint of GPT-NeoX, for any layout, as `OptimizerFiles` does.

GPT-NeoX saves this state for one layout, by rank and without parameter names. The mp_rank file has tensors in
the order of the optimizer's groups (weights that decay, then norms and biases). Under ZeRO 1 and 2 and in
bf16 each group is one flat vector, sharded over data ranks. The sizes of the groups show which layers a
pipeline stage had.

In a group, parameters are in the order in which modules register them, which is that of our weight map.
Transformer-Engine's `LayerNormMLP` registers its norm, fc1 and fc2 in our order. GPT-NeoX recognises norms by
the class of a module, and biases by the name `bias`, so all parameters of `LayerNormMLP` decay.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.opening import OpenCheckpoint
from megatron.checkpointing.optimizer_files import MASTER, State, resharded
from megatron.checkpointing.parameter_names import WEIGHT_NAMINGS, has_old_rows, neox_name_of, to_our_names
from megatron.checkpointing.tensor_files import load_tensors
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.model.weight_map import attention_of, layer_params, shared_params, unused_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import NeoXArgs

_FIX = "set no_load_optim: true (--no-optimizer of tools/ckpts) to continue from the weights alone"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_TE_MLP = ("post_attention_layernorm.", "mlp.")  # our names of the parameters in Transformer-Engine's LayerNormMLP
_ZERO = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class _Groups(Protocol):
    """The optimizer's parameter groups of one model-parallel rank.

    sizes: size of each group, in parameters or in elements (the unit of `size`). step: number of updates
        done.
    """

    sizes: list[int]
    step: float

    def size(self, shape: Sequence[int]) -> int: ...
    def read(self, group: int, start: int, shape: Sequence[int]) -> State: ...


class NeoXOptimizer:
    """The optimizer state in a checkpoint of GPT-NeoX, by parameter and for any tensor-parallel size.

    It has the methods of `OptimizerFiles`. Tensors stay in their files until they are used. Raises
    CheckpointError unless the state is that of Adam, without ZeRO 3, and of the model of `args`.
    """

    def __init__(self, path: str | Path, args: NeoXArgs) -> None:
        self.path, self.args = Path(path), args
        self._specs, self._facts = layer_params(args), describe_checkpoint(self.path)
        self._check_kind()
        self.tensor_size = self._facts.tensor_size
        self._ranks = _groups_of(self.path)
        if len(self._ranks) % self.tensor_size:
            raise CheckpointError(
                f"{self.path}: its {len(self._ranks)} mp_rank files are no multiple of {self.tensor_size} tensor "
                f"ranks; {_FIX}"
            )
        expected = {spec.name for layer in range(2, args.num_layers + 2) for spec in self._specs[layer]}
        self._file_names = {neox_name_of(name, expected): name for name in self._facts.blocks}
        self._te_mlp = any(name.startswith("mlp.fc1_") for name in self._facts.blocks)
        self._places = self._walk()

    def _check_kind(self) -> None:
        unknown = "blocks that share a table (pos_emb: rpe)" if shared_params(self.args) else None
        unknown = self._facts.names if self._facts.names == WEIGHT_NAMINGS["llama"] else unknown
        if unknown is not None:
            raise CheckpointError(f"{self.path}: cannot read optimizer state of {unknown}: unknown order; {_FIX}")

    def _walk(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """Returns (pipeline stage, group, offset in the group) of every parameter, by (layer, name).

        Layers are assigned to stages in order. A stage is full when its groups have their saved size."""
        places: dict[tuple[int, str], tuple[int, int, int]] = {}
        layers = sorted(layer for layer, specs in self._specs.items() if specs)
        stages = len(self._ranks) // self.tensor_size
        for stage in range(stages):
            groups = self._ranks[stage * self.tensor_size]
            filled = [0] * len(groups.sizes)
            # The last stage's copy of the embedding, for a tied head, comes first.
            has_tied_copy = stage == stages - 1 > 0 and not self.args.no_weight_tying
            if has_tied_copy:
                self._fill_layer(0, groups, filled)
            while layers and filled != groups.sizes:
                for name, place in self._fill_layer(layers.pop(0), groups, filled):
                    places[name] = (stage, *place)
            if filled != groups.sizes:
                raise self._mismatch_error()
        if layers:
            raise self._mismatch_error()
        return places

    def _fill_layer(
        self, layer: int, groups: _Groups, filled: list[int]
    ) -> list[tuple[tuple[int, str], tuple[int, int]]]:
        places = []
        for spec in self._registered(layer):
            decays = spec.weight_decay or self._te_mlp and spec.name.startswith(_TE_MLP)
            group = 0 if decays or len(filled) == 1 else 1
            if spec in self._specs[layer]:
                places.append(((layer, spec.name), (group, filled[group])))
            filled[group] += groups.size(spec.local_shape(self.tensor_size))
            if filled[group] > groups.sizes[group]:
                raise self._mismatch_error()
        return places

    def _registered(self, layer: int) -> list[ParamSpec]:
        """Returns a layer's parameters, with unused norms, in the order in which GPT-NeoX registers them."""
        specs = list(self._specs[layer])
        for unused in reversed(unused_params(self.args, layer)):
            index = 0 if unused.name.startswith("input_") else [spec.name[:4] for spec in specs].index("mlp.")
            specs.insert(index, unused)
        return specs

    def _mismatch_error(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: its optimizer state does not fit the parameters of this model; {_FIX}")

    def names(self, layers: Iterable[int]) -> set[tuple[int, str]]:
        """Returns (layer, name) of each parameter of `layers` that has optimizer state in the checkpoint."""
        requested = set(layers)
        return {(layer, name) for layer, name in self._places if layer in requested}

    def scaler(self) -> dict[str, float]:
        """Returns the fields of fp16's dynamic loss scaler, by name; {} in other precisions."""
        scaler = getattr(self._ranks[0], "scaler", None)
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def read(self, layer: int, spec: ParamSpec, tensor_rank: int, tensor_size: int) -> State:
        """Returns a parameter's state by key (`exp_avg`), sharded for `tensor_rank` of `tensor_size` ranks.

        Returns {} if no update was done yet."""
        stage, group, start = self._places[layer, spec.name]
        shape, file_name = spec.local_shape(self.tensor_size), f"{self.path}, optimizer state of layer {layer}"
        first_rank = stage * self.tensor_size
        parts = [rank.read(group, start, shape) for rank in self._ranks[first_rank : first_rank + self.tensor_size]]
        if not parts[0]:
            return {}
        state: State = {"step": torch.tensor(max(rank.step for rank in self._ranks))}
        attention = attention_of(self.args, layer)
        old = has_old_rows(self._facts.blocks, attention, self.args.compat_gqa_rows)
        rows = "pre1315" if old else "post1315"
        for key in parts[0]:
            if key == MASTER and self._facts.dtypes == {torch.float32}:
                continue
            # The name in the file determines the order of its rows.
            name = self._file_names.get(spec.name, spec.name) if attention is not None else spec.name
            pieces = [to_our_names(layer, {name: part[key]}, {spec.name}, self.args, file_name, rows) for part in parts]
            values = [piece[spec.name] for piece in pieces]
            if spec.sum_over_tensor and key == MASTER:  # each rank stores a summand of the weight, but equal moments
                state[key] = torch.stack(values).sum(0)
            else:
                state[key] = resharded(values, spec, tensor_rank, tensor_size)
        return state


def _groups_of(path: Path) -> list[_Groups]:
    """Returns the parameter groups of each model-parallel rank of a checkpoint, ordered by rank."""
    zero: dict[int, dict[int, Path]] = {}
    for file in path.iterdir():
        if match := _ZERO.fullmatch(file.name):
            zero.setdefault(int(match[3]), {})[int(match[2])] = file
    models = layout.model_files(path)
    if not zero:
        states = OpenCheckpoint(path).model_states()
        return [_PlainState(state.get("optimizer"), str(models[rank])) for rank, state in states.items()]
    for rank in sorted(models):
        ranks = zero.get(rank, {})
        if sorted(ranks) != list(range(len(ranks))) or len(ranks) != len(zero[min(zero)]):
            raise CheckpointError(f"{path}: incomplete: missing optim_states files of mp_rank_{rank:02d}; {_FIX}")
    return [_FlatZeroState([zero[rank][data] for data in sorted(zero[rank])]) for rank in sorted(models)]


def _steps(states: Iterable[Mapping[str, Any]]) -> float:
    """Returns the number of optimizer updates done: the largest `step` of all states.

    DeepSpeed's FusedAdam counts only in the last parameter of a group."""
    return max((float(state["step"]) for state in states if state.get("step") is not None), default=0.0)


def _moments(state: Mapping[str, Any], file_name: str) -> dict[str, Tensor]:
    missing = [key for key in _MOMENTS if not isinstance(state.get(key), Tensor)]
    if missing:
        raise CheckpointError(f"{file_name}: has no {missing[0]}, so it is not Adam's state; {_FIX}")
    return {key: state[key] for key in _MOMENTS}


class _PlainState:
    """Optimizer state without ZeRO: a state for each parameter, numbered through all groups.

    The size of a group is its number of parameters.
    """

    def __init__(self, saved: Any, file_name: str) -> None:
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointError(
                f"{file_name}: holds no optimizer state as torch.optim saves it (state, param_groups); {_FIX}"
            )
        self.file_name, self._state = file_name, saved["state"]
        self.sizes = [len(group["params"]) for group in saved["param_groups"]]
        self.step = _steps([*self._state.values(), *saved["param_groups"]])

    def size(self, shape: Sequence[int]) -> int:
        return 1

    def read(self, group: int, start: int, shape: Sequence[int]) -> State:
        if not self._state:
            return {}
        number = sum(self.sizes[:group]) + start
        if number not in self._state:
            raise CheckpointError(f"{self.file_name}: the optimizer has no state for parameter number {number}; {_FIX}")
        moments = _moments(self._state[number], f"{self.file_name}: optimizer state {number}")
        for key, value in moments.items():
            if tuple(value.shape) != tuple(shape):
                raise CheckpointError(
                    f"{self.file_name}: optimizer state {number}: {key} has shape {tuple(value.shape)}, but the "
                    f"model needs {tuple(shape)}; {_FIX}"
                )
        return moments


class _FlatZeroState:
    """Optimizer state of ZeRO 1 and 2, and of bf16: a flat vector per group, sharded over data ranks.

    The last shard has padding at its end. The size of a group is its number of elements without padding.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        contents = [load_tensors(file) for file in files]
        saved = [content.get("optimizer_state_dict", {}) for content in contents]
        file_name = str(files[0])
        masters = [entry.get("single_partition_of_fp32_groups") for entry in saved]
        paddings = [entry.get("group_paddings") for entry in saved]
        if None in masters or None in paddings or any(entry.get("zero_stage", 1) == 3 for entry in saved):
            raise CheckpointError(f"{file_name}: its optimizer state is not of ZeRO 1 or 2; {_FIX}")
        config = contents[0].get("ds_config") or {}
        if (config.get("zero_optimization") or {}).get("round_robin_gradients"):
            raise CheckpointError(
                f"{file_name}: optimizer state saved with round_robin_gradients cannot be read; {_FIX}"
            )
        base = [entry.get("base_optimizer_state") for entry in saved]
        lean = isinstance(base[0], Sequence)  # saved with elastic_checkpoint, without padding
        states = [entry if lean else [entry["state"][i] for i in sorted(entry["state"])] for entry in base]
        groups = [] if lean else [group for entry in base for group in entry["param_groups"]]
        step_counts = [{"step": entry.get("base_optimizer_state_step")} for entry in saved]
        self.step = _steps([*groups, *step_counts, *(state for entry in states for state in entry)])
        self.scaler = saved[0].get("loss_scaler")
        self._vectors: list[dict[str, list[Tensor]]] = []  # for each group: the data ranks' parts by key
        self.sizes = []
        for group in range(len(masters[0])):
            parts = {MASTER: [entry[group] for entry in masters]}
            if states[0]:
                moments = [_moments(entry[group], file_name) for entry in states]
                parts |= {key: [entry[key] for entry in moments] for key in _MOMENTS}
            num_padding = 0 if lean else sum(int(padding[group]) for padding in paddings)
            self.sizes.append(sum(part.numel() for part in parts[MASTER]) - num_padding)
            self._vectors.append(parts)

    def size(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def read(self, group: int, start: int, shape: Sequence[int]) -> State:
        parts = self._vectors[group]
        if len(parts) == 1:
            return {}
        return {key: _slice_vectors(vectors, start, math.prod(shape)).view(*shape) for key, vectors in parts.items()}


def _slice_vectors(vectors: Sequence[Tensor], start: int, count: int) -> Tensor:
    """Returns elements `start` to `start + count` of the concatenation of `vectors`."""
    slices, begin = [], 0
    for vector in vectors:
        low, high = max(start - begin, 0), min(start + count - begin, vector.numel())
        if low < high:
            slices.append(vector[low:high])
        begin += vector.numel()
    return torch.cat(slices)
