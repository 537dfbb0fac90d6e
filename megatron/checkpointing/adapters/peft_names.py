"""Maps our adapter parameters to tensor names in peft's files, by the tables of HuggingFace's families."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.convert import hf_config, is_of_family
from megatron.checkpointing.families.family import SCORE, Family, TensorMapping
from megatron.checkpointing.families.multimodal import memory_name
from megatron.checkpointing.families.registry import FAMILIES
from megatron.model.specs import MixerSpec
from megatron.model.weight_map import adapter_params, mixer_of, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.values.lora_settings import PARTS_OF_TARGETS

PREFIX = "base_model.model."
_WEIGHT = ".weight"
# Weights of a block's linear layers -> the name of an adapter that covers all rows of the weight.
_FULL_LINEARS = {
    "attention.query_key_value.weight": "query_key_value", "attention.dense.weight": "dense",
    "mlp.linear1.weight": "gate_up_proj", "mlp.linear2.weight": "dense_4h_to_h",
    "mlp.shared_expert.linear1.weight": "gate_up_proj", "mlp.shared_expert.linear2.weight": "dense_4h_to_h",
    "mixer.in_proj.weight": "in_proj", "mixer.x_proj.weight": "x_proj",
}  # fmt: skip
# Our names of an adapter's tensors -> peft's names.
_PARTS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
_COPIES = {"word_embeddings.modules_to_save": "word_embeddings", "final_linear.modules_to_save": "final_linear"}
# peft names tensors after modules in memory. transformers 5 calls GPT-NeoX's head lm_head, earlier versions
# embed_out, as in weight files.
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class PeftTensor:
    """One of our adapter parameters, and the tensors that peft stores for it.

    layer: the NeoX index of the parameter's layer.
    keys: names of the tensors in peft's file.
    split: converts our full parameter to the tensors of `keys`, in that order.
    join: converts one of these tensors back.
    vocabulary: whether each row belongs to a token (embedding or head).
    older: other tensor names that are accepted when reading. They contain module names as in HuggingFace's
        weight files; models with remote code (`trust_remote_code`) have such names in memory.
    """

    layer: int
    spec: ParamSpec
    keys: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[Tensor], Tensor] = lambda value: value
    vocabulary: bool = False
    older: tuple[str, ...] = ()

    def within_wrapper(self) -> "PeftTensor":
        """Returns a copy whose `keys` are the tensor names inside a multimodal model."""
        return replace(self, keys=tuple(PREFIX + memory_name(key.removeprefix(PREFIX)) for key in self.keys))


@dataclass(frozen=True)
class PeftModule:
    """A linear layer of ours that has an adapter, with the names of its HuggingFace modules.

    block: number of the block, from 0.
    target: the layer's name in our key `lora.target`.
    names: full names of the HuggingFace modules that make up the layer.
    older: other names that are accepted when reading, as in HuggingFace's weight files.
    """

    block: int
    target: str
    names: tuple[str, ...]
    older: tuple[str, ...] = ()


def family_of_adapters(args: NeoXArgs, family: str | None = None) -> Family:
    """Returns the HuggingFace family whose module names a model's adapters are stored under.

    family: the family's model type; None: the first family that can express the model of `args`. Raises
        CheckpointError that names the settings no family supports."""
    return FAMILIES[hf_config(args.replace(lora=None), family=family)["model_type"]]


def check_peft_names(args: NeoXArgs, family: str | None = None) -> None:
    """Raise CheckpointError if peft's format cannot hold a run's adapters.

    family: the model type to export as; None: the first family that can express the model of `args`."""
    peft_tensors(args, family_of_adapters(args, family))


def family_of_modules(args: NeoXArgs, modules: Sequence[str]) -> Family:
    """Returns the first HuggingFace family that can express the model of `args` and has all `modules`.

    modules: module names without `PREFIX`. If no family has all of them, returns the first family that can
        express the model."""
    base_args = args.replace(lora=None)
    # Families with all names come first: comparing names is fast, `is_of_family` is slow.
    for family in sorted(
        FAMILIES.values(), key=lambda candidate: any(_row_of(candidate, module) is None for module in modules)
    ):
        if is_of_family(base_args, family):
            return family
    return family_of_adapters(args)


def target_of(args: ModelArgs, family: Family, module: str) -> str:
    """Returns the name in our key `lora.target` for a HuggingFace module.

    If our linear layer fuses several HuggingFace modules, the name is LLaMA's ("q_proj"). Otherwise it is the
    name of our layer ("dense")."""
    row, last = _row_of(family, module), module.rpartition(".")[2]
    if row is None or row.neox_name not in _FULL_LINEARS:
        return last
    if len(row.hf_names) > 1:
        return _targets_of(row).get(last, last)
    if _FULL_LINEARS[row.neox_name] == "gate_up_proj" and not args.is_gated:
        return "dense_h_to_4h"
    return _FULL_LINEARS[row.neox_name]


def vocabulary_modules() -> dict[str, str]:
    """Returns "embed_tokens" or "lm_head" for the module name of every family's embedding and head.

    Keys are the last parts of module names, such as "wte" or "embed_out"."""
    kinds = {"word_embeddings.weight": "embed_tokens", "final_linear.weight": "lm_head"}
    rows = [row for family in FAMILIES.values() for row in family.rows if row.neox_name in kinds]
    family_modules = {_last(name): kinds[row.neox_name] for row in rows for name in row.hf_names}
    return family_modules | dict.fromkeys(_HEADS, "lm_head")


def _family_targets(family: Family) -> list[str]:
    """Returns all values of `lora.target` whose adapters the family can store in peft's format."""
    rows = [row for row in family.rows if row.neox_name in _FULL_LINEARS]
    return [
        name
        for row in rows
        for name in (_targets_of(row).values() if len(row.hf_names) > 1 else [_FULL_LINEARS[row.neox_name]])
    ]


def _targets_of(row: TensorMapping) -> dict[str, str]:
    """Returns {last part of a HuggingFace module's name: its name in `lora.target`} of a fused linear layer.

    Families have other names (w3, w1) for LLaMA's up_proj and gate_proj."""
    last_parts = list(map(_last, row.hf_names))
    is_mlp = _FULL_LINEARS.get(row.neox_name) == "gate_up_proj"
    return dict(zip(last_parts, ("up_proj", "gate_proj") if is_mlp else last_parts, strict=True))


def short_name(family: Family, module: str) -> str:
    """Returns a module's name for peft's target_modules: the last part of `module`, such as "q_proj".

    If several weights of the family end with this part, returns the last two parts ("self_attn.dense")."""
    last = module.rpartition(".")[2]
    sharing = {row.neox_name for row in family.rows for name in row.hf_names if name.endswith(f".{last}{_WEIGHT}")}
    return ".".join(module.split(".")[-2:]) if len(sharing) > 1 else last


def _last(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _row_of(family: Family, module: str) -> TensorMapping | None:
    """Returns the family's mapping for the weight of a HuggingFace module; None if the family has no such
    module.

    module: its full name, in memory or in weight files."""
    general = re.sub(r"\.\d+\.", ".{}.", f"{module}{_WEIGHT}", count=1)
    return next(
        (row for row in family.rows if general in (*row.hf_names, *map(family.memory_name, row.hf_names))), None
    )


def peft_tensors(args: ModelArgs, family: Family) -> list[PeftTensor]:
    """Returns peft's tensors for each adapter parameter of the model of `args`.

    Raises CheckpointError if the family has no module for an adapter."""
    rows, specs = {row.neox_name: row for row in (*family.rows, SCORE)}, named_params(args)
    return [
        _linear_tensor(layer, spec, specs, mixer_of(args, layer), rows, family)
        if ".lora." in spec.name
        else _copy_tensor(layer, spec, args, rows, family)
        for layer, params in adapter_params(args).items()
        for spec in params
    ]


def peft_modules(args: ModelArgs, family: Family) -> list[PeftModule]:
    """Returns the modules that have adapters. Raises CheckpointError if the family lacks one of them."""
    ends = len(_PARTS["lora_A"]) + 1
    return [
        PeftModule(
            tensor.layer - 2, tensor.spec.name.split(".")[-2],
            *(tuple(key.removeprefix(PREFIX)[:-ends] for key in keys) for keys in (tensor.keys, tensor.older)),
        )
        for tensor in peft_tensors(args, family)
        if tensor.spec.name.endswith(".lora_A")
    ]  # fmt: skip


def _linear_tensor(
    layer: int,
    spec: ParamSpec,
    specs: Mapping[tuple[int, str], ParamSpec],
    mixer: MixerSpec | None,
    rows: Mapping[str, TensorMapping],
    family: Family,
) -> PeftTensor:
    """Returns peft's tensors for one parameter (A, B or DoRA's magnitudes) of a linear layer's adapter.

    specs: of all parameters, from `named_params`. mixer: the layer's mixer, if any. rows: the
        family's mappings by our parameter names."""
    linear, _, adapter = spec.name.partition(".lora.")
    name, part = adapter.split(".")
    row = rows[f"{linear}{_WEIGHT}"].for_mixer(mixer)
    modules, older = _modules(row, layer, family)
    # The adapter covers all rows: each HuggingFace module stores the same A, and its own rows of B.
    if specs[layer, row.neox_name].shape[0] == specs[layer, f"{linear}.lora.{name}.lora_B"].shape[0]:
        keys = _keys(modules, _PARTS[part])
        older_keys = _keys(older, _PARTS[part])
        if part == "lora_A":
            return PeftTensor(layer, spec, keys, _repeated(len(modules)), older=older_keys)
        join, split = row.transform.join, row.transform.split
        return PeftTensor(layer, spec, keys, lambda v: split(v, mixer), lambda v: join([v], mixer), older=older_keys)
    targets = [_targets_of(row)[_last(module)] for module in row.hf_names]
    places = [i for i, target in enumerate(targets) if target == name]
    places = places or [i for i, target in enumerate(targets) if target in PARTS_OF_TARGETS.get(name, ())]
    modules, older = ([names[i] for i in places if names] for names in (modules, older))
    if not modules:
        raise CheckpointError(
            f"lora.target: {name}: peft cannot adapt this module of {family.model_type}, because it is fused into "
            f"{_last(row.hf_names[0])}; choose targets from [{', '.join(_family_targets(family))}], or merge the "
            "adapter into the weights (tools/ckpts/adapter.py merge)"
        )
    keys, older_keys = _keys(modules, _PARTS[part]), _keys(older, _PARTS[part])
    if part == "lora_A":
        return PeftTensor(layer, spec, keys, _repeated(len(modules)), older=older_keys)
    # Rows of the fused weight that each module has, in the module's order; the adapter's are in ours.
    fused_rows = row.transform.split(torch.arange(specs[layer, row.neox_name].shape[0])[:, None], mixer)
    module_rows = [fused_rows[i][:, 0] for i in places]
    ordered = torch.cat(module_rows).sort().values
    orders = [torch.searchsorted(ordered, rows_of_module) for rows_of_module in module_rows]
    return PeftTensor(
        layer, spec, keys, lambda v: tuple(v[order] for order in orders), lambda v: v[orders[0].argsort()],
        older=older_keys,
    )  # fmt: skip


def _copy_tensor(
    layer: int, spec: ParamSpec, args: ModelArgs, rows: Mapping[str, TensorMapping], family: Family
) -> PeftTensor:
    """Returns peft's tensors for a fully trained embedding or head (`modules_to_save`, or a score head).

    A tied embedding is stored under the names of both embedding and head."""
    if spec.name == SCORE.neox_name:
        return PeftTensor(layer, spec, (f"{PREFIX}{SCORE.hf_names[0]}",), _repeated(1))
    weight = _COPIES[spec.name]
    has_head_copy = weight == "word_embeddings" and not args.no_weight_tying and not args.score_head
    names = [weight, "final_linear"] if has_head_copy else [weight]
    module_lists = [_modules(rows[f"{name}{_WEIGHT}"], layer, family) for name in names]
    modules, older = (list(chain(*lists)) for lists in zip(*module_lists, strict=True))
    modules += [_HEADS[0]] if modules[-1] == _HEADS[1] else []
    keys, older_keys = _keys(modules, "weight"), _keys(older, "weight")
    return PeftTensor(layer, spec, keys, _repeated(len(modules)), vocabulary=True, older=older_keys)


def _modules(row: TensorMapping, layer: int, family: Family) -> tuple[list[str], list[str]]:
    """Returns (module names in memory, module names in weight files) for one of our weights.

    The second list is empty if both are equal."""
    stored = [name.format(layer - 2).removesuffix(_WEIGHT) for name in row.hf_names]
    in_memory = [family.memory_name(name).format(layer - 2).removesuffix(_WEIGHT) for name in row.hf_names]
    return in_memory, [] if in_memory == stored else stored


def _keys(modules: list[str], part: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{module}.{part}" for module in modules)


def _repeated(count: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda value: (value,) * count
