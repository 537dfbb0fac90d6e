"""The tensors of peft's adapters by the names of HuggingFace's modules, from the tables of the families."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.convert import hf_config, is_of_family
from megatron.checkpointing.families.family import SCORE, Family, TensorMapping
from megatron.checkpointing.families.multimodal import memory_name
from megatron.checkpointing.families.registry import FAMILIES
from megatron.model.specs import AttentionSpec
from megatron.model.weight_map import adapter_params, attention_of, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ModelArgs, NeoXArgs

PREFIX = "base_model.model."
_WEIGHT = ".weight"
# The weights of a block's linear layers, and the adapter name for all rows of each.
_FULL_LINEARS = {
    "attention.query_key_value.weight": "query_key_value", "attention.dense.weight": "dense",
    "mlp.linear1.weight": "gate_up_proj", "mlp.linear2.weight": "dense_4h_to_h",
    "mlp.shared_expert.linear1.weight": "gate_up_proj", "mlp.shared_expert.linear2.weight": "dense_4h_to_h",
    "mixer.in_proj.weight": "in_proj", "mixer.x_proj.weight": "x_proj",
}  # fmt: skip
# Parts of an adapter, and their names in peft's files.
_PARTS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
_COPIES = {"word_embeddings.modules_to_save": "word_embeddings", "final_linear.modules_to_save": "final_linear"}
# GPT-NeoX's head in memory, whose name peft uses: transformers 5 calls it lm_head, earlier ones as in files.
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class PeftTensor:
    """One of our adapter parameters, and the tensors that peft stores for it.

    layer: the NeoX index of the parameter's layer.
    keys: names of the tensors in peft's file.
    split: converts our full parameter to the tensors of `keys`, in that order.
    join: converts one of these tensors back.
    vocabulary: each row belongs to a token.
    older: other names to accept, made of module names in HuggingFace's weight files, as models with code of
        their own (`trust_remote_code`) have.
    """

    layer: int
    spec: ParamSpec
    keys: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[Tensor], Tensor] = lambda value: value
    vocabulary: bool = False
    older: tuple[str, ...] = ()

    def within_wrapper(self) -> "PeftTensor":
        """Returns a copy whose `keys` are the names inside a multimodal model."""
        return replace(self, keys=tuple(PREFIX + memory_name(key.removeprefix(PREFIX)) for key in self.keys))


@dataclass(frozen=True)
class PeftModule:
    """A module that has an adapter.

    block: number of the block, from 0.
    target: the module's name in our key `lora.target`.
    names: full names of the HuggingFace modules it stands for. older: other names to accept, from weight
        files.
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
    """Returns the first family that can express the model of `args` and has all `modules`.

    modules: module names without `PREFIX`. If no family has all of them, returns the first that can express
    the model."""
    base_args = args.replace(lora=None)
    # Names first: they are looked up, while what a model computes is worked out.
    for family in sorted(
        FAMILIES.values(), key=lambda candidate: any(_row_of(candidate, module) is None for module in modules)
    ):
        if is_of_family(base_args, family):
            return family
    return family_of_adapters(args)


def target_of(args: ModelArgs, family: Family, module: str) -> str:
    """Returns the name in our key `lora.target` for a HuggingFace module.

    If our linear layer fuses several HuggingFace modules, the result is the module's own name (`q_proj`);
    else the name of our layer."""
    row = _row_of(family, module)
    if row is None or len(row.hf_names) > 1 or row.neox_name not in _FULL_LINEARS:
        return module.rpartition(".")[2]
    if _FULL_LINEARS[row.neox_name] == "gate_up_proj" and not args.is_gated:
        return "dense_h_to_4h"
    return _FULL_LINEARS[row.neox_name]


def vocabulary_modules() -> dict[str, str]:
    """Maps names of embeddings and heads in all families (last part) to "embed_tokens" or "lm_head"."""
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
        for name in (map(_last, row.hf_names) if len(row.hf_names) > 1 else [_FULL_LINEARS[row.neox_name]])
    ]


def short_name(family: Family, module: str) -> str:
    """Returns a module's name for target_modules: its last part; the last two parts if that is ambiguous."""
    last = module.rpartition(".")[2]
    sharing = {row.neox_name for row in family.rows for name in row.hf_names if name.endswith(f".{last}{_WEIGHT}")}
    return ".".join(module.split(".")[-2:]) if len(sharing) > 1 else last


def _last(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _row_of(family: Family, module: str) -> TensorMapping | None:
    """Returns the mapping of a module's weight, or None. module: its name in memory or in files."""
    general = re.sub(r"\.\d+\.", ".{}.", f"{module}{_WEIGHT}", count=1)
    return next(
        (row for row in family.rows if general in (*row.hf_names, *map(family.memory_name, row.hf_names))), None
    )


def peft_tensors(args: ModelArgs, family: Family) -> list[PeftTensor]:
    """Returns peft's tensors for each adapter parameter of the model of `args`.

    Raises CheckpointError for an adapter that the family has no module for.
    """
    rows, specs = {row.neox_name: row for row in (*family.rows, SCORE)}, named_params(args)
    return [
        _linear_tensor(layer, spec, specs, attention_of(args, layer), rows, family)
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
    attention: AttentionSpec | None,
    rows: Mapping[str, TensorMapping],
    family: Family,
) -> PeftTensor:
    """Returns peft's tensors for a matrix, or the magnitudes, of an adapter of a linear layer.

    specs: of all parameters, from `named_params`. attention: the layer's, if any. rows: by our names."""
    linear, _, adapter = spec.name.partition(".lora.")
    name, part = adapter.split(".")
    row = rows[f"{linear}{_WEIGHT}"]
    modules, older = _modules(row, layer, family)
    # One A for all rows: each module has it, and its own rows of B.
    if specs[layer, row.neox_name].shape[0] == specs[layer, f"{linear}.lora.{name}.lora_B"].shape[0]:
        keys = _keys(modules, _PARTS[part])
        older_keys = _keys(older, _PARTS[part])
        if part == "lora_A":
            return PeftTensor(layer, spec, keys, _repeated(len(modules)), older=older_keys)
        join, split = row.transform.join, row.transform.split
        return PeftTensor(
            layer, spec, keys, lambda v: split(v, attention), lambda v: join([v], attention), older=older_keys
        )
    modules, older = ([module for module in names if module.endswith(f".{name}")] for names in (modules, older))
    if not modules:
        raise CheckpointError(
            f"{name}: {family.model_type} has no such module for peft, because its rows are fused in "
            f"{_last(row.hf_names[0])}; set lora.target to modules of [{', '.join(_family_targets(family))}], or "
            "merge the adapter into the weights (tools/ckpts/adapter.py merge)"
        )
    return PeftTensor(layer, spec, _keys(modules, _PARTS[part]), _repeated(1), older=_keys(older, _PARTS[part]))


def _copy_tensor(
    layer: int, spec: ParamSpec, args: ModelArgs, rows: Mapping[str, TensorMapping], family: Family
) -> PeftTensor:
    """Returns peft's tensors for a fully trained embedding or head (`modules_to_save`, or a score head).

    The trained copy of a tied embedding is stored under the head's name too.
    """
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
    """Returns (names in memory, names in files) of a weight's modules; the latter [] if both are equal."""
    stored = [name.format(layer - 2).removesuffix(_WEIGHT) for name in row.hf_names]
    in_memory = [family.memory_name(name).format(layer - 2).removesuffix(_WEIGHT) for name in row.hf_names]
    return in_memory, [] if in_memory == stored else stored


def _keys(modules: list[str], part: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{module}.{part}" for module in modules)


def _repeated(count: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda value: (value,) * count
