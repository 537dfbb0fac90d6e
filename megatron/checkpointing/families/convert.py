"""Translating HuggingFace models to ours and back: configuration and tensors, one tensor at a time.

Everything here is pure and knows no files: tensors are whole (not cut over tensor ranks) and keep their
dtype, and what goes one way comes back the other bit for bit.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.canonical_config import canonical_config, describe_differences
from megatron.checkpointing.families.family import (
    SCORE,
    SCORES,
    Config,
    Family,
    TensorMapping,
    gives_score,
    merged,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.model.weight_map import attention_of, layer_params, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ConfigError, NeoXArgs

_VOCABULARY = ("word_embeddings.weight", "final_linear.weight")  # rows are tokens
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Of a config.json: code that stays behind, the type of the weights, where it once was, how they were packed.
_NOT_KEPT = {"auto_map", "dtype", "_name_or_path", "quantization_config"}
_CHANGING = {"architectures", "vocab_size", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
_ONE_LABEL = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_SHOWN = 8

Layer = tuple[int, Mapping[str, Tensor]]


def from_hf(
    config: Config,
    get_tensor: Callable[[str], Tensor],
    *,
    padded_vocab_size: int | None = None,
    layers: Collection[int] | None = None,
) -> tuple[dict[str, Any], Iterator[tuple[int, str, Tensor]]]:
    """A HuggingFace model as ours: keys for NeoXArgs at once, tensors when asked for, in the order of the
    layers.

    get_tensor: one whole tensor by its HuggingFace name (`hf_shapes` says which are asked for; KeyError
    passes).
    padded_vocab_size: rows of our embedding, at least vocab_size; None: as many. Added rows are the mean of
    the others, so that their logits are mean logits, and nothing looks likely that was never trained.
    layers: NeoX layer indices of the tensors; None: all.
    Keys: the model's, with seq_length (max_position_embeddings, to be lowered at will), compat_ffn_width and
    padded_vocab_size; neither tokenizer nor precision. Tensors come as (NeoX layer index, our name, whole
    tensor), ready for `shard`. Raises CheckpointError, or ConfigError that names `config.json`.
    """
    family = FAMILIES[family_of(config)]
    keys = {name: value for name, value in family.to_keys(config).items() if value is not None}
    if gives_score(config):
        labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
        if labels != 1:
            raise CheckpointError(f"config.json: num_labels: {labels}: a classifier, no reward model, which has 1")
        keys["score_head"] = True
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int):
        raise CheckpointError("config.json: vocab_size is missing")
    if padded_vocab_size is not None and padded_vocab_size < vocab:
        raise CheckpointError(f"padded_vocab_size {padded_vocab_size} is less than the model's {vocab} tokens")
    keys["padded_vocab_size"] = padded_vocab_size or vocab
    return keys, _read(family, NeoXArgs.from_dict(keys, "config.json"), vocab, get_tensor, layers)


def _read(
    family: Family,
    args: NeoXArgs,
    vocab: int,
    get_tensor: Callable[[str], Tensor],
    layers: Collection[int] | None,
) -> Iterator[tuple[int, str, Tensor]]:
    kept: dict[str, tuple[Tensor, int]] = {}  # what further parameters are made of, and of how many

    def get(name: str, uses: int) -> Tensor:
        tensor, left = kept.pop(name) if name in kept else (get_tensor(name), uses)
        if left > 1:
            kept[name] = tensor, left - 1
        return tensor

    for layer, specs in layer_params(args).items():
        attention = attention_of(args, layer)
        for spec, row in _rows(family, args, layer, specs if layers is None or layer in layers else ()):
            rows, uses = _rows_of(spec, vocab), row.part[1]
            wanted = row.split(torch.empty(rows, device="meta"), attention, spec.experts)
            if uses > 1:
                wanted = (merged(wanted * uses),)
            shapes = {n: tuple(t.shape) for n, t in zip(row.names(layer - 2, spec.experts), wanted, strict=True)}
            whole = row.join(_checked(partial(get, uses=uses), shapes), attention, spec.experts)
            yield layer, spec.name, whole if rows == spec.shape else _padded(whole, spec.shape[0])
        if attention is not None and (layers is None or layer in layers):
            for name, value in _constants(family, layer):
                stored = get_tensor(name)
                if not stored.is_meta and not torch.allclose(stored.float(), torch.tensor(value), rtol=1e-2, atol=0):
                    raise CheckpointError(f"{name}: is {stored.flatten()[0]}, only {value} is supported")


def _checked(get_tensor: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Foreign tensors one after another, of the shapes that they should have by name."""
    for name, shape in shapes.items():
        part = get_tensor(name)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"{name}: shape {tuple(part.shape)} in the file, {shape} by config.json")
        yield part


def hf_config(args: NeoXArgs, *, family: str | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """The config.json of a model of ours, which plain transformers loads.

    family: a `model_type`; None: the first one that computes what `args` says. vocab_size: rows of vocabulary
    that `to_hf` keeps; None: padded_vocab_size. Token ids are null and `torch_dtype` is that of `args`; the
    caller replaces them.
    Raises CheckpointError with what no family, or the one asked for, has.
    """
    chosen_family, vocab = _family_for(args, family), _vocabulary(args, vocab_size)
    return {
        "architectures": [_architecture(chosen_family, bool(args.score_head))],
        "model_type": chosen_family.model_type,
        **(_ONE_LABEL if args.score_head else {}),
        **chosen_family.to_config(args),
        "vocab_size": vocab,
        "torch_dtype": _DTYPES[args.params_dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def family_kept(args: NeoXArgs, before: Config) -> str | None:
    """The family of `before`, the config.json of the model that was imported, where it has what `args` says;
    None where it has not, or is none."""
    family = FAMILIES.get(str(before.get("model_type")))
    return None if family is None or _differences(args, family) else family.model_type


def is_of_family(args: NeoXArgs, family: Family) -> bool:
    """Whether the family has what `args` says."""
    return not _differences(args, family)


def is_same_model(args: NeoXArgs, before: Config) -> bool:
    """Whether `before`, the config.json of a model of some family, says what `args` does."""
    return not _differences(args, FAMILIES[str(before["model_type"])], before)


def _architecture(family: Family, scores: bool) -> str:
    if not scores:
        return family.architecture
    return family.scorer or family.architecture.replace("ForCausalLM", SCORES)


def with_fields(config: Config, before: Config, args: NeoXArgs) -> dict[str, Any]:
    """`config`, the result of `hf_config`, with the fields of `before`, the config.json of the model that was
    imported: all as they were where that is still the model of `args`, else further ones that do not change
    it from that. The vocabulary, token ids and dtype are those of `config`. Fields are in the order of
    `before`."""
    if before.get("model_type") != config["model_type"]:
        return dict(config)
    family, made = FAMILIES[config["model_type"]], dict(config)
    if is_same_model(args, before):
        made |= {name: value for name, value in before.items() if name not in _CHANGING | _NOT_KEPT}
    for name, value in before.items():
        if name not in made and name not in _NOT_KEPT and not _differences(args, family, {**made, name: value}):
            made[name] = value
    if "dtype" in before:  # transformers 5's name
        made["dtype"] = made["torch_dtype"]
    return {name: made[name] for name in dict.fromkeys((*before, *made)) if name in made}


def to_hf(
    args: NeoXArgs,
    layers: Iterable[Layer],
    *,
    family: str | None = None,
    vocab_size: int | None = None,
    copy: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """HuggingFace's (name, tensor) pairs of a model of ours, each tensor contiguous.

    layers: (NeoX layer index, whole tensors by our names), in any order, each asked for when the one before
    is done; all of `layer_params(args)` or some. copy: each has its own storage. family, vocab_size: as
    `hf_config`; rows from vocab_size on
    are left out.
    Raises CheckpointError for a layer whose tensors are not those of the weight map.
    """
    table, vocab, specs = _family_for(args, family), _vocabulary(args, vocab_size), layer_params(args)
    for layer, tensors in layers:
        expected = {spec.name: spec.shape for spec in specs.get(layer, ())}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if got != expected:
            wrong = sorted(name for name in {*got, *expected} if got.get(name) != expected.get(name))
            shape_problems = [
                f"{name} is {got.get(name, 'missing')}, not {expected.get(name, 'there')}" for name in wrong
            ]
            raise CheckpointError(f"layer {layer}: {_some(shape_problems)}")
        shared: dict[str, dict[int, Tensor]] = {}  # parts of foreign tensors that hold several parameters
        for spec, row in _rows(table, args, layer, specs.get(layer, ())):
            whole = tensors[spec.name]
            if spec.name in _VOCABULARY:
                whole = whole[:vocab]
            parts = row.split(whole, attention_of(args, layer), spec.experts)
            if row.part[1] > 1:
                held = shared.setdefault(row.theirs[0], {})
                held[row.part[0]] = parts[0]
                if len(held) < row.part[1]:
                    continue
                parts = (merged([held[i] for i in range(row.part[1])]),)
            for name, part in zip(row.names(layer - 2, spec.experts), parts, strict=True):
                is_view = row.part[1] == 1  # what is merged is no other's
                yield name, part.clone(memory_format=torch.contiguous_format) if copy and is_view else part.contiguous()
        if attention_of(args, layer) is not None:
            like = next(iter(tensors.values()))
            for name, value in _constants(table, layer):
                yield name, torch.full((), value, dtype=like.dtype, device=like.device)


def hf_shapes(
    args: NeoXArgs, *, family: str | None = None, vocab_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that `to_hf` gives, without any values."""
    layers = (
        (layer, {spec.name: torch.empty(spec.shape, device="meta") for spec in specs})
        for layer, specs in layer_params(args).items()
    )
    return {name: tuple(t.shape) for name, t in to_hf(args, layers, family=family, vocab_size=vocab_size)}


def hf_names(
    args: NeoXArgs, places: Collection[tuple[int, str]], *, family: str | None = None
) -> dict[tuple[int, str], list[str]]:
    """The tensors of `to_hf` that parameters of ours become, by their NeoX layer index and name."""
    table, specs = _family_for(args, family), named_params(args)
    return {
        place: row.names(place[0] - 2, spec.experts)
        for place in places
        for spec, row in _rows(table, args, place[0], [specs[place]])
    }


def check_hf_tensors(
    config: Config, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare a folder's tensors with what `from_hf` will ask for, from their names and shapes alone.

    keys: `from_hf`'s. shapes: of all tensors of all files.
    Buffers are skipped, and a head beside tied embeddings.
    Raises CheckpointError with every missing or extra tensor and wrong shape, grouped over layers, and a
    likely cause.
    """
    family, args = FAMILIES[family_of(config)], NeoXArgs.from_dict(keys, "config.json")
    wanted = hf_shapes(args, family=family.model_type, vocab_size=config["vocab_size"])
    head = family.head
    unknown = {name for name in shapes.keys() - wanted.keys() if name != head and not family.carries(name)}
    extra = {name for name in unknown if not re.fullmatch(family.ignored, name)}
    missing = wanted.keys() - shapes.keys()
    lines = [f"missing {line}" for line in _grouped(missing)] + [f"extra {line}" for line in _grouped(extra)]
    both = [name for name in wanted if name in shapes and tuple(shapes[name]) != wanted[name]]
    wrong = [f"{name}: shape {tuple(shapes[name])} in the file, {wanted[name]} by config.json" for name in both]
    lines += wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more of another shape"] if len(wrong) > _SHOWN else [])
    if head in missing:
        lines.append(
            f"without {head} the embeddings are tied: tie_word_embeddings should be true in config.json, unless "
            "the folder holds the model without its head"
        )
    if lines:
        raise CheckpointError(f"{where}: does not fit its config.json:\n  " + "\n  ".join(lines))


def lacks_prefix(config: Config, names: Collection[str]) -> bool:
    """Whether a folder is of the family's class without a head, as GPT-2's: its names lack
    `Family.base_prefix`, and the embedding is the head."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return False
    embedding = next(row.theirs[0] for row in family.rows if row.ours == "word_embeddings.weight")
    return embedding not in names and embedding.removeprefix(family.base_prefix) in names


def _grouped(names: Iterable[str]) -> list[str]:
    """One line for all tensors whose names differ only in the numbers of their layer and of an expert."""
    groups: dict[str, dict[str, set[int]]] = {}
    for name in names:
        numbers = [int(number) for number in re.findall(r"\.(?=(\d+)\.)", name)]
        general = re.sub(r"\.\d+\.", ".E.", re.sub(r"\.\d+\.", ".N.", name, count=1), count=1)
        by_kind = groups.setdefault(general, {"layers": set(), "experts": set()})
        for kind, number in zip(by_kind, numbers, strict=False):
            by_kind[kind].add(number)
    lines = []
    for name, by_kind in groups.items():
        layers, experts = ([str(n) for n in sorted(numbers)] for numbers in by_kind.values())
        places = [f"layers {', '.join(layers)}"] if layers else []
        places += [f"experts {_some(experts)}"] if experts else []
        lines.append(f"{name} ({'; '.join(places)})" if places else name)
    return sorted(lines)


def _some(told: list[str], between: str = ", ") -> str:
    return between.join(told[:_SHOWN]) + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _family_for(args: NeoXArgs, family: str | None) -> Family:
    if family is not None and family not in FAMILIES:
        raise CheckpointError(f"no family {family}; one of {', '.join(FAMILIES)}")
    candidates = []
    for candidate in FAMILIES.values() if family is None else [FAMILIES[family]]:
        differences = _differences(args, candidate)
        if not differences:
            return candidate
        has_states = bool(args.mamba_blocks)
        alike = has_states or candidate.has_experts == (args.moe_num_experts > 1)
        of_its_kind = alike and candidate.has_states == has_states
        other_blocks = any("(attention_config)" in line for line in differences)
        line = f"{candidate.model_type}: {_some(differences, '; ')}"
        candidates.append(((not of_its_kind, other_blocks, len(differences)), line))
    closest = [line for _, line in sorted(candidates, key=lambda pair: pair[0])[:2]]
    if args.pos_emb not in ("rotary", "learned", "none"):
        there = "in all families they rotate, are learned, or there are none"
        closest.insert(0, f"positions are {args.pos_emb} here (pos_emb); {there}")
    raise CheckpointError("HuggingFace has no such model:\n  " + "\n  ".join(closest))


def _differences(args: NeoXArgs, family: Family, config: Config | None = None) -> list[str]:
    """How the model of `config` (None: what the family makes of `args`) differs from that of `args`, in
    words."""
    if args.score_head and not family.has_scorer:
        return [f"transformers has no reward models of {family.model_type}"]
    try:
        keys = family.to_keys(family.to_config(args) if config is None else config)
        keys["score_head"] = args.score_head if config is None else gives_score(config)
        again = NeoXArgs.from_dict({**keys, "padded_vocab_size": args.padded_vocab_size}, family.model_type)
    except (CheckpointError, ConfigError) as problem:
        return str(problem).splitlines()
    ours, converted = canonical_config(args), canonical_config(again)
    scaled = args.rope_scaling is not None and args.rope_scaling["rope_type"] == "dynamic"
    if scaled:  # HuggingFace's max_position_embeddings is the length before
        converted["max_position_embeddings"] = ours.get("max_position_embeddings")
    return describe_differences(ours, converted)


def _vocabulary(args: NeoXArgs, vocab_size: int | None) -> int:
    rows = args.padded_vocab_size
    if vocab_size is not None and not 0 < vocab_size <= rows:
        raise CheckpointError(f"vocab_size {vocab_size}: the model has {rows} rows (padded_vocab_size)")
    return vocab_size or rows


def _rows(
    family: Family, args: NeoXArgs, layer: int, specs: Iterable[ParamSpec]
) -> Iterator[tuple[ParamSpec, TensorMapping]]:
    is_block = 2 <= layer < args.num_layers + 2
    table = {row.ours: row for row in (*family.rows, SCORE) if row.of_block == is_block}
    for spec in specs:
        if spec.name not in table:
            raise CheckpointError(f"layer {layer}: {family.model_type} has no {spec.name}")
        yield spec, table[spec.name]


def _constants(family: Family, layer: int) -> list[tuple[str, float]]:
    return [(name.format(layer - 2), value) for name, value in family.constants.items()]


def _rows_of(spec: ParamSpec, vocab: int) -> tuple[int, ...]:
    """The shape of a parameter before its vocabulary is padded."""
    return (vocab, *spec.shape[1:]) if spec.name in _VOCABULARY else spec.shape


def _padded(whole: Tensor, rows: int) -> Tensor:
    mean = whole.mean(0, keepdim=True, dtype=torch.float32).to(whole.dtype)
    return torch.cat([whole, mean.expand(rows - len(whole), -1)])
