"""The tensors of peft's adapters by the names of HuggingFace's modules, from the tables of the families."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import FAMILIES, hf_config
from megatron.checkpointing.families.family import SCORE, Family, TensorMapping
from megatron.model.specs import AttentionSpec
from megatron.model.weight_map import adapter_params, attention_of, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import NeoXArgs

PREFIX = "base_model.model."
_WEIGHT = ".weight"
# What of an adapter is called otherwise in peft's files.
_PARTS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "lora_magnitude_vector"}
_COPIES = {"word_embeddings.modules_to_save": "word_embeddings", "final_linear.modules_to_save": "final_linear"}
# What transformers 5 calls GPT-NeoX's head in memory, by which peft names it; earlier ones as in the files.
_HEADS = ("lm_head", "embed_out")


@dataclass(frozen=True)
class PeftTensor:
    """A parameter of ours and the tensors that peft has for it.

    layer: its NeoX index. keys: their names in peft's file. split: what the whole parameter is in them, in
    their order. vocabulary: rows are tokens.
    """

    layer: int
    spec: ParamSpec
    keys: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    vocabulary: bool = False


def family_of_adapters(args: NeoXArgs, family: str | None = None) -> Family:
    """The family whose names adapters of a model have; None: the first that computes what `args` says. Raises
    CheckpointError with what no family has."""
    return FAMILIES[hf_config(args.replace(lora=None), family=family)["model_type"]]


def check_peft_names(args: NeoXArgs) -> None:
    """Raise CheckpointError for adapters that peft's format cannot have."""
    peft_tensors(args, family_of_adapters(args))


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
                found.append(_copied(layer, spec, args, rows))
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
    modules = _modules(row, layer)
    if whole and len(modules) > 1:  # one A for all their rows: each has it, and its own rows of B
        cut = _repeated(len(modules)) if part == "lora_A" else lambda rows: row.transform.split(rows, attention)
        return PeftTensor(layer, spec, _keys(modules, _PARTS[part]), cut)
    if not whole:
        modules = [module for module in modules if module.endswith(f".{name}")]
    if not modules:
        own = row.theirs[0].removesuffix(_WEIGHT).rpartition(".")[2]
        raise CheckpointError(
            f"{name}: {family.model_type} has no such module, of which peft could have an adapter, but {own} for all "
            "of its rows; merge it into the weights (tools/ckpts/adapter.py merge)"
        )
    return PeftTensor(layer, spec, _keys(modules, _PARTS[part]), _repeated(1))


def _copied(layer: int, spec: ParamSpec, args: NeoXArgs, rows: Mapping[str, TensorMapping]) -> PeftTensor:
    """Of a copy that is trained in the place of a weight; that of a tied embedding is the head's too."""
    if spec.name == SCORE.ours:
        return PeftTensor(layer, spec, (f"{PREFIX}{SCORE.theirs[0]}",), _repeated(1))
    own = _COPIES[spec.name]
    names = [own] if args.no_weight_tying or args.score_head or own != "word_embeddings" else [own, "final_linear"]
    modules = [module for name in names for module in _modules(rows[f"{name}{_WEIGHT}"], layer)]
    modules += [_HEADS[0]] if modules[-1] == _HEADS[1] else []
    return PeftTensor(layer, spec, _keys(modules, "weight"), _repeated(len(modules)), vocabulary=True)


def _modules(row: TensorMapping, layer: int) -> list[str]:
    return [name.format(layer - 2).removesuffix(_WEIGHT) for name in row.theirs]


def _keys(modules: list[str], part: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{module}.{part}" for module in modules)


def _repeated(count: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    return lambda whole: (whole,) * count
