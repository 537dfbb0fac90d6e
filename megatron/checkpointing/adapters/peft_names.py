"""The tensors of peft's adapters by the names of HuggingFace's modules, from the tables of the families."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, hf_config, is_of_family, memory_name
from megatron.checkpointing.families.family import SCORE, Family, TensorMapping
from megatron.model.specs import AttentionSpec
from megatron.model.weight_map import adapter_params, attention_of, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import NeoXArgs

PREFIX = "base_model.model."
_WEIGHT = ".weight"
# The linears of a block, and the adapter of all rows of each.
_WHOLE = {
    "attention.query_key_value.weight": "query_key_value", "attention.dense.weight": "dense",
    "mlp.linear1.weight": "gate_up_proj", "mlp.linear2.weight": "dense_4h_to_h",
}  # fmt: skip
# What of an adapter is called otherwise in peft's files.
_PARTS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
_COPIES = {"word_embeddings.modules_to_save": "word_embeddings", "final_linear.modules_to_save": "final_linear"}
# What transformers 5 calls GPT-NeoX's head in memory, by which peft names it; earlier ones as in the files.
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class PeftTensor:
    """A parameter of ours and the tensors that peft has for it.

    layer: its NeoX index. keys: their names in peft's file. split: what the whole parameter is in them, in
    their order; join: its inverse, of one that has a name. vocabulary: rows are tokens. older: their names
    where modules are called as in files, by the code of a published folder.
    """

    layer: int
    spec: ParamSpec
    keys: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[Tensor], Tensor] = lambda value: value
    vocabulary: bool = False
    older: tuple[str, ...] = ()

    def within_wrapper(self) -> "PeftTensor":
        """The same with the names that it has in a multimodal model."""
        return replace(self, keys=tuple(PREFIX + memory_name(key.removeprefix(PREFIX)) for key in self.keys))


def family_of_adapters(args: NeoXArgs, family: str | None = None) -> Family:
    """The family whose names adapters of a model have; None: the first that computes what `args` says. Raises
    CheckpointError with what no family has."""
    return FAMILIES[hf_config(args.replace(lora=None), family=family)["model_type"]]


def check_peft_names(args: NeoXArgs, family: str | None = None) -> None:
    """Raise CheckpointError for adapters that peft's format cannot have. family: as of
    `family_of_adapters`."""
    peft_tensors(args, family_of_adapters(args, family))


def family_of_modules(args: NeoXArgs, modules: Sequence[str]) -> Family:
    """The family among those that compute what `args` says which has modules of these names (without
    `PREFIX`); the first of them where none has all."""
    plain = args.replace(lora=None)
    # Names first: they are looked up, while what a model computes is worked out.
    for family in sorted(FAMILIES.values(), key=lambda one: any(_row_of(one, module) is None for module in modules)):
        if is_of_family(plain, family):
            return family
    return family_of_adapters(args)


def target_of(args: NeoXArgs, family: Family, module: str) -> str:
    """What `lora.target` calls a module of the family: its own name where the linear here holds several of
    its kind, else that of the whole linear."""
    row = _row_of(family, module)
    if row is None or len(row.theirs) > 1 or row.ours not in _WHOLE:
        return module.rpartition(".")[2]
    if row.ours == "mlp.linear1.weight" and not args.is_gated:
        return "dense_h_to_4h"
    return _WHOLE[row.ours]


def vocabulary_modules() -> set[str]:
    """The last parts of the names that modules of embedding and head have in any family."""
    rows = [row for family in FAMILIES.values() for row in family.rows]
    of_vocabulary = {f"{name}{_WEIGHT}" for name in _COPIES.values()}
    return {_last(name) for row in rows if row.ours in of_vocabulary for name in row.theirs} | {*_HEADS}


def _own_targets(family: Family) -> list[str]:
    """All targets of which the family has modules."""
    rows = [row for row in family.rows if row.ours in _WHOLE]
    return [name for row in rows for name in (map(_last, row.theirs) if len(row.theirs) > 1 else [_WHOLE[row.ours]])]


def short_name(family: Family, module: str) -> str:
    """How peft's target_modules name a module: by its last part, or by two where another linear has that."""
    last = module.rpartition(".")[2]
    sharing = {row.ours for row in family.rows for name in row.theirs if name.endswith(f".{last}{_WEIGHT}")}
    return ".".join(module.split(".")[-2:]) if len(sharing) > 1 else last


def _last(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2]


def _row_of(family: Family, module: str) -> TensorMapping | None:
    """The mapping of the weight of a module, by its name in memory or in files."""
    general = re.sub(r"\.\d+\.", ".{}.", f"{module}{_WEIGHT}", count=1)
    return next((row for row in family.rows if general in (*row.theirs, *map(family.memory_name, row.theirs))), None)


def peft_tensors(args: NeoXArgs, family: Family) -> list[PeftTensor]:
    """What peft has for each parameter of `adapter_params`.

    Raises CheckpointError for an adapter that the family has no module for.
    """
    rows = {row.ours: row for row in (*family.rows, SCORE)}
    specs = named_params(args)
    found = []
    for layer, params in adapter_params(args).items():
        for spec in params:
            linear, dot, rest = spec.name.partition(".lora.")
            if not dot:
                found.append(_copied(layer, spec, args, rows, family))
                continue
            name, part = rest.split(".")
            whole = specs[layer, f"{linear}{_WEIGHT}"].shape[0] == specs[layer, f"{linear}.lora.{name}.lora_B"].shape[0]
            row = rows[f"{linear}{_WEIGHT}"]
            found.append(_of_linear(layer, spec, name, part, whole, row, attention_of(args, layer), family))
    return found


def _of_linear(
    layer: int,
    spec: ParamSpec,
    name: str,
    part: str,
    whole: bool,
    row: TensorMapping,
    attention: AttentionSpec | None,
    family: Family,
) -> PeftTensor:
    modules, older = _modules(row, layer, family)
    if whole:  # one A for all rows: each module has it, and its own rows of B
        keys = _keys(modules, _PARTS[part])
        older_keys = _keys(older, _PARTS[part])
        if part == "lora_A":
            return PeftTensor(layer, spec, keys, _repeated(len(modules)), older=older_keys)
        join, split = row.transform.join, row.transform.split
        return PeftTensor(
            layer, spec, keys, lambda v: split(v, attention), lambda v: join([v], attention), older=older_keys
        )
    modules, older = ([module for module in of if module.endswith(f".{name}")] for of in (modules, older))
    if not modules:
        own = row.theirs[0].removesuffix(_WEIGHT).rpartition(".")[2]
        raise CheckpointError(
            f"{name}: {family.model_type} has no such module, of which peft could have an adapter, but {own} for all "
            f"of its rows; write lora.target: [{', '.join(_own_targets(family))}], or some of these, or merge the "
            "adapter into the weights (tools/ckpts/adapter.py merge)"
        )
    return PeftTensor(layer, spec, _keys(modules, _PARTS[part]), _repeated(1), older=_keys(older, _PARTS[part]))


def _copied(
    layer: int, spec: ParamSpec, args: NeoXArgs, rows: Mapping[str, TensorMapping], family: Family
) -> PeftTensor:
    """Of a copy that is trained in the place of a weight; that of a tied embedding is the head's too."""
    if spec.name == SCORE.ours:
        return PeftTensor(layer, spec, (f"{PREFIX}{SCORE.theirs[0]}",), _repeated(1))
    own = _COPIES[spec.name]
    names = [own] if args.no_weight_tying or args.score_head or own != "word_embeddings" else [own, "final_linear"]
    named = [_modules(rows[f"{name}{_WEIGHT}"], layer, family) for name in names]
    modules, older = ([module for of in each for module in of] for each in zip(*named, strict=True))
    modules += [_HEADS[0]] if modules[-1] == _HEADS[1] else []
    keys, older_keys = _keys(modules, "weight"), _keys(older, "weight")
    return PeftTensor(layer, spec, keys, _repeated(len(modules)), vocabulary=True, older=older_keys)


def _modules(row: TensorMapping, layer: int, family: Family) -> tuple[list[str], list[str]]:
    """The modules of a weight by their names in memory, and by those in files where these are others."""
    stored = [name.format(layer - 2).removesuffix(_WEIGHT) for name in row.theirs]
    in_memory = [family.memory_name(name).format(layer - 2).removesuffix(_WEIGHT) for name in row.theirs]
    return in_memory, [] if in_memory == stored else stored


def _keys(modules: list[str], part: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{module}.{part}" for module in modules)


def _repeated(count: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda whole: (whole,) * count
