"""Adam's state in a checkpoint of GPT-NeoX, read by parameter as `OptimizerFiles` reads ours, for any layout.

GPT-NeoX keeps it by rank of one layout, without names: in the mp_rank file tensors in the order of the
optimizer's groups (weights that decay, then norms and biases); under ZeRO 1 and 2 and in bf16 each group as
one flat vector, cut over data ranks. Which layers a pipeline stage had follows from how much its groups hold.

A group takes parameters in the order in which modules register them, which is that of our weight map:
Transformer-Engine's `LayerNormMLP` has its norm, fc1 and fc2 in it as ours are. GPT-NeoX knows norms by the
class of a module and biases by the name `bias`, so of that MLP all parameters decay.
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
from megatron.checkpointing.optimizer_files import MASTER, State
from megatron.checkpointing.parameter_names import WEIGHT_NAMINGS, has_old_rows, our_name, to_our_names
from megatron.checkpointing.tensor_files import load_tensors
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.model.weight_map import attention_of, layer_params, shared_params, unused_params
from megatron.mpu import ParamSpec, shard, unshard
from megatron.neox_arguments import NeoXArgs

_FIX = "set no_load_optim: true (--no-optimizer of tools/ckpts) to go on with the weights alone"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_TE_MLP = ("post_attention_layernorm.", "mlp.")  # our names of what is in Transformer-Engine's LayerNormMLP
_ZERO = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class _Groups(Protocol):
    """The parameter groups of the optimizer of one model-parallel rank.

    sizes: of each group, in the unit that `size` counts a parameter in. step: number of updates done.
    """

    sizes: list[int]
    step: float

    def size(self, shape: Sequence[int]) -> int: ...
    def read(self, group: int, start: int, shape: Sequence[int]) -> State: ...


class NeoXOptimizer:
    """The state of one checkpoint of GPT-NeoX, with the methods of `OptimizerFiles`. Tensors stay in their
    files until they are used. Raises CheckpointError for state of another optimizer than Adam, of ZeRO 3, or
    of another model."""

    def __init__(self, path: str | Path, args: NeoXArgs) -> None:
        self.path, self.args = Path(path), args
        self._specs, self._facts = layer_params(args), describe_checkpoint(self.path)
        self._check_kind()
        self.tensor_size = self._facts.tensor_size
        self._ranks = _groups_of(self.path)
        if len(self._ranks) % self.tensor_size:
            raise CheckpointError(f"{self.path}: {len(self._ranks)} mp_rank files of {self.tensor_size} tensor ranks")
        expected = {spec.name for layer in range(2, args.num_layers + 2) for spec in self._specs[layer]}
        self._file_names = {our_name(name, expected): name for name in self._facts.blocks}
        self._te_mlp = any(name.startswith("mlp.fc1_") for name in self._facts.blocks)
        self._places = self._walk()

    def _check_kind(self) -> None:
        kinds = {
            WEIGHT_NAMINGS["llama"]: self._facts.names == WEIGHT_NAMINGS["llama"],
            "blocks that share a table (pos_emb: rpe)": bool(shared_params(self.args)),
        }
        for unknown in (words for words, applies in kinds.items() if applies):
            raise CheckpointError(f"{self.path}: the order of optimizer state of {unknown} is not known here; {_FIX}")

    def _walk(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """(stage, group, start in the group) of every parameter by (layer, name).

        The stages take layers in their order until their groups are full.
        """
        places: dict[tuple[int, str], tuple[int, int, int]] = {}
        layers = sorted(layer for layer, specs in self._specs.items() if specs)
        stages = len(self._ranks) // self.tensor_size
        for stage in range(stages):
            groups = self._ranks[stage * self.tensor_size]
            filled = [0] * len(groups.sizes)
            again = stage == stages - 1 > 0 and not self.args.no_weight_tying  # its copy of the embedding stands first
            if again:
                self._taken(0, groups, filled)
            while layers and filled != groups.sizes:
                for name, place in self._taken(layers.pop(0), groups, filled):
                    places[name] = (stage, *place)
            if filled != groups.sizes:
                raise self._of_another_model()
        if layers:
            raise self._of_another_model()
        return places

    def _taken(self, layer: int, groups: _Groups, filled: list[int]) -> list[tuple[tuple[int, str], tuple[int, int]]]:
        places = []
        for spec in self._registered(layer):
            decays = spec.weight_decay or self._te_mlp and spec.name.startswith(_TE_MLP)
            group = 0 if decays or len(filled) == 1 else 1
            if spec in self._specs[layer]:
                places.append(((layer, spec.name), (group, filled[group])))
            filled[group] += groups.size(spec.local_shape(self.tensor_size))
            if filled[group] > groups.sizes[group]:
                raise self._of_another_model()
        return places

    def _registered(self, layer: int) -> list[ParamSpec]:
        """The parameters of a layer as GPT-NeoX registers them, with its norms that nothing reads."""
        specs = list(self._specs[layer])
        for unused in reversed(unused_params(self.args, layer)):
            first = 0 if unused.name.startswith("input_") else [spec.name[:4] for spec in specs].index("mlp.")
            specs.insert(first, unused)
        return specs

    def _of_another_model(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: its optimizer state is of other parameters than this model's; {_FIX}")

    def names(self, layers: Iterable[int]) -> set[tuple[int, str]]:
        """(layer, name) of the parameters of `layers` that have optimizer state here."""
        wanted = set(layers)
        return {(layer, name) for layer, name in self._places if layer in wanted}

    def scaler(self) -> dict[str, float]:
        """The state of fp16's dynamic loss scale; {} in other precisions."""
        scaler = getattr(self._ranks[0], "scaler", None)
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def read(self, layer: int, spec: ParamSpec, tensor_rank: int, tensor_size: int) -> State:
        """The state of one parameter as tensor rank `tensor_rank` of `tensor_size` holds it; {} before the
        first update."""
        stage, group, start = self._places[layer, spec.name]
        shape, where = spec.local_shape(self.tensor_size), f"{self.path}, optimizer state of layer {layer}"
        first = stage * self.tensor_size
        parts = [rank.read(group, start, shape) for rank in self._ranks[first : first + self.tensor_size]]
        if not parts[0]:
            return {}
        state: State = {"step": torch.tensor(max(rank.step for rank in self._ranks))}
        attention = attention_of(self.args, layer)
        old = has_old_rows(self._facts.blocks, attention, self.args.compat_gqa_rows)
        rows = "pre1315" if old else "post1315"
        for key in parts[0]:
            if key == MASTER and self._facts.dtypes == {torch.float32}:
                continue
            # The name in the file tells how rows lie.
            name = self._file_names.get(spec.name, spec.name) if attention is not None else spec.name
            pieces = [to_our_names(layer, {name: part[key]}, {spec.name}, self.args, where, rows) for part in parts]
            state[key] = self._cut(key, [piece[spec.name] for piece in pieces], spec, tensor_rank, tensor_size)
        return state

    def _cut(self, key: str, pieces: list[Tensor], spec: ParamSpec, tensor_rank: int, tensor_size: int) -> Tensor:
        if spec.sum_over_tensor and key == MASTER:  # of which each rank has a part; their gradients are alike
            return torch.stack(pieces).sum(0)
        if tensor_size == self.tensor_size:
            return pieces[tensor_rank]
        return shard(unshard(pieces, spec), spec, tensor_rank, tensor_size)


def _groups_of(path: Path) -> list[_Groups]:
    """The parameter groups of all model-parallel ranks, in the order of the ranks."""
    zero: dict[int, dict[int, Path]] = {}
    for file in path.iterdir():
        if match := _ZERO.fullmatch(file.name):
            zero.setdefault(int(match[3]), {})[int(match[2])] = file
    models = layout.model_files(path)
    if not zero:
        return [_PlainState(load_tensors(models[rank]).get("optimizer"), str(models[rank])) for rank in sorted(models)]
    for rank in sorted(models):
        ranks = zero.get(rank, {})
        if sorted(ranks) != list(range(len(ranks))) or len(ranks) != len(zero[min(zero)]):
            raise CheckpointError(f"{path}: incomplete, without optim_states files of mp_rank_{rank:02d}; {_FIX}")
    return [_FlatZeroState([zero[rank][data] for data in sorted(zero[rank])]) for rank in sorted(models)]


def _steps(states: Iterable[Mapping[str, Any]]) -> float:
    """The number of updates done: the largest count, since DeepSpeed's FusedAdam counts only in the last
    parameter of a group."""
    return max((float(state["step"]) for state in states if state.get("step") is not None), default=0.0)


def _moments(state: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    missing = [key for key in _MOMENTS if not isinstance(state.get(key), Tensor)]
    if missing:
        raise CheckpointError(f"{where}: no {missing[0]}; not the state of Adam: {_FIX}")
    return {key: state[key] for key in _MOMENTS}


class _PlainState:
    """The state without ZeRO, whose parameters are numbered through all groups; a group's size is their
    number."""

    def __init__(self, saved: Any, where: str) -> None:
        if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointError(f"{where}: no optimizer state in plain torch form; {_FIX}")
        self.where, self._state = where, saved["state"]
        self.sizes = [len(group["params"]) for group in saved["param_groups"]]
        self.step = _steps([*self._state.values(), *saved["param_groups"]])

    def size(self, shape: Sequence[int]) -> int:
        return 1

    def read(self, group: int, start: int, shape: Sequence[int]) -> State:
        if not self._state:
            return {}
        number = sum(self.sizes[:group]) + start
        if number not in self._state:
            raise CheckpointError(f"{self.where}: optimizer state {number}: there is none of this parameter; {_FIX}")
        moments = _moments(self._state[number], f"{self.where}: optimizer state {number}")
        for key, value in moments.items():
            if tuple(value.shape) != tuple(shape):
                raise CheckpointError(
                    f"{self.where}: optimizer state {number}: {key} has shape {tuple(value.shape)}, the model needs "
                    f"{tuple(shape)}; {_FIX}"
                )
        return moments


class _FlatZeroState:
    """The state of ZeRO 1 and 2, and of bf16: one flat vector for each group, split over data-parallel ranks,
    the last part with padding at its end; a group's size is its number of elements."""

    def __init__(self, files: Sequence[Path]) -> None:
        contents = [load_tensors(file) for file in files]
        saved = [content.get("optimizer_state_dict", {}) for content in contents]
        where = str(files[0])
        masters = [one.get("single_partition_of_fp32_groups") for one in saved]
        paddings = [one.get("group_paddings") for one in saved]
        if None in masters or None in paddings or any(one.get("zero_stage", 1) == 3 for one in saved):
            raise CheckpointError(f"{where}: not optimizer state of ZeRO 1 or 2; {_FIX}")
        config = contents[0].get("ds_config") or {}
        if (config.get("zero_optimization") or {}).get("round_robin_gradients"):
            raise CheckpointError(f"{where}: round_robin_gradients mixes the order of its parameters; {_FIX}")
        base = [one.get("base_optimizer_state") for one in saved]
        lean = isinstance(base[0], Sequence)  # elastic_checkpoint: without padding
        states = [one if lean else [one["state"][i] for i in sorted(one["state"])] for one in base]
        groups = [] if lean else [group for one in base for group in one["param_groups"]]
        step_counts = [{"step": one.get("base_optimizer_state_step")} for one in saved]
        self.step = _steps([*groups, *step_counts, *(state for one in states for state in one)])
        self.scaler = saved[0].get("loss_scaler")
        self._vectors: list[dict[str, list[Tensor]]] = []  # of each group, by key: the data ranks' parts
        self.sizes = []
        for group in range(len(masters[0])):
            parts = {MASTER: [one[group] for one in masters]}
            if states[0]:
                moments = [_moments(one[group], where) for one in states]
                parts |= {key: [one[key] for one in moments] for key in _MOMENTS}
            cut = 0 if lean else sum(int(padding[group]) for padding in paddings)
            self.sizes.append(sum(part.numel() for part in parts[MASTER]) - cut)
            self._vectors.append(parts)

    def size(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def read(self, group: int, start: int, shape: Sequence[int]) -> State:
        parts = self._vectors[group]
        if len(parts) == 1:
            return {}
        return {key: _between(vectors, start, math.prod(shape)).view(*shape) for key, vectors in parts.items()}


def _between(vectors: Sequence[Tensor], start: int, count: int) -> Tensor:
    """`count` elements from `start` of the concatenation of `vectors`."""
    slices, begin = [], 0
    for vector in vectors:
        first, last = max(start - begin, 0), min(start + count - begin, vector.numel())
        if first < last:
            slices.append(vector[first:last])
        begin += vector.numel()
    return torch.cat(slices)
