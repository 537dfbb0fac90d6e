"""Converts HuggingFace models to NeoX models and back: configuration, and tensors one at a time.

These functions are pure and read no files. Tensors are full (not sharded over tensor ranks) and keep their
dtype. Converting a tensor there and back restores every bit.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError, shortened
from megatron.checkpointing.families.canonical_config import canonical_config, describe_differences
from megatron.checkpointing.families.family import (
    PREDICTION_COPIES,
    PREDICTION_ROWS,
    SCORE,
    SCORES,
    Config,
    Family,
    TensorMapping,
    gives_score,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.model.specs import AttentionSpec
from megatron.model.weight_map import block_number, layer_params, mixer_of, named_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs

_VOCABULARY = ("word_embeddings.weight", "final_linear.weight")  # each row belongs to a token
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Fields of an imported config.json that an export drops: code, dtype of weights, earlier path, quantisation.
_DROPPED = {"auto_map", "dtype", "_name_or_path", "quantization_config"}
_CHANGING = {
    "architectures", "vocab_size", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    "num_nextn_predict_layers",
}  # fmt: skip
_ONE_LABEL = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_MAX_NAMED = 8

Layer = tuple[int, Mapping[str, Tensor]]


def from_hf(
    config: Config,
    get_tensor: Callable[[str], Tensor],
    *,
    padded_vocab_size: int | None = None,
    layers: Collection[int] | None = None,
    mtp_layers: int = 0,
) -> tuple[dict[str, Any], Iterator[tuple[int, str, Tensor]]]:
    """Converts a HuggingFace model to (keys for NeoXArgs, lazy iterator of tensors in layer order).

    config: the content of config.json.
    get_tensor: takes a HuggingFace name and returns the full tensor; its KeyError is passed on.
    padded_vocab_size: rows of the embedding, at least vocab_size; None: vocab_size. Each added row is the
        mean of the existing rows, so that unused tokens get average logits.
    layers: NeoX layer indices of the tensors; None: all.
    mtp_layers: number of blocks for multi-token prediction to read.
    The keys describe the model, without tokenizer and precision; seq_length is max_position_embeddings. The
    iterator yields (NeoX layer index, NeoX name, full tensor). Raises CheckpointError, or ConfigError that
    names `config.json`."""
    family = FAMILIES[family_of(config)]
    keys = {name: value for name, value in family.to_keys(config).items() if value is not None}
    if gives_score(config):
        labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
        if labels != 1:
            raise CheckpointError(
                f"config.json: num_labels: {labels}: classifiers are not supported, only reward models with 1 label"
            )
        keys["score_head"] = True
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int):
        raise CheckpointError("config.json: vocab_size is missing or not a whole number")
    if padded_vocab_size is not None and padded_vocab_size < vocab:
        raise CheckpointError(f"padded_vocab_size {padded_vocab_size}: must be at least the model's vocab_size {vocab}")
    keys["padded_vocab_size"] = padded_vocab_size or vocab
    if mtp_layers:
        keys["mtp_num_layers"] = mtp_layers
    return keys, _read(family, NeoXArgs.from_dict(keys, "config.json"), vocab, get_tensor, layers)


def _read(
    family: Family, args: ModelArgs, vocab: int, get_tensor: Callable[[str], Tensor], layers: Collection[int] | None
) -> Iterator[tuple[int, str, Tensor]]:
    shared: dict[str, tuple[Tensor, int]] = {}  # by name: a tensor, and the number of parameters that still need it

    def get(name: str, num_uses: int) -> Tensor:
        tensor, left = shared.pop(name) if name in shared else (get_tensor(name), num_uses)
        if left > 1:
            shared[name] = tensor, left - 1
        return tensor

    for layer, specs in layer_params(args).items():
        mixer, block = mixer_of(args, layer), _block(args, layer)
        for spec, row in _rows(family, args, layer, specs if layers is None or layer in layers else ()):
            rows, num_uses = _rows_of(spec, vocab), row.part[1]
            expected_parts = row.split(torch.empty(rows, device="meta"), mixer, spec.experts)
            if num_uses > 1:
                expected_parts = (row.merge(expected_parts * num_uses),)
            names = _file_names(family, row, args, layer, spec.experts)
            shapes = {name: tuple(part.shape) for name, part in zip(names, expected_parts, strict=True)}
            joined = row.join(_checked(partial(get, num_uses=num_uses), shapes), mixer, spec.experts)
            yield layer, spec.name, joined if rows == spec.shape else padded(joined, spec.shape[0])
        if isinstance(mixer, AttentionSpec) and (layers is None or layer in layers):
            for general, value in family.constants.items():
                stored = get_tensor(name := general.format(block))
                if not stored.is_meta and not torch.allclose(stored.float(), torch.tensor(value), rtol=1e-2, atol=0):
                    raise CheckpointError(f"{name}: has value {stored.flatten()[0]}; only {value} is supported")


def _checked(get_tensor: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Yields HuggingFace tensors one at a time; raises CheckpointError if a tensor has a wrong shape.

    shapes: the names of the tensors to read, and the expected shape of each."""
    for name, shape in shapes.items():
        part = get_tensor(name)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"{name}: has shape {tuple(part.shape)} in the file, but config.json implies {shape}")
        yield part


def hf_config(args: NeoXArgs, *, family: str | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the config.json of a NeoX model; transformers loads it without remote code.

    family: a `model_type`; None: the first family that can express the model.
    vocab_size: number of vocabulary rows; None: padded_vocab_size.
    Token ids are null and `torch_dtype` is that of `args`; the caller replaces them. Raises CheckpointError
    that names the settings that the family (None: any family) does not support."""
    chosen_family, vocab = _family_for(args, family), _vocabulary(args, vocab_size)
    architecture = chosen_family.architecture
    if args.score_head:
        architecture = chosen_family.scorer or architecture.replace("ForCausalLM", SCORES)
    return {
        "architectures": [architecture],
        "model_type": chosen_family.model_type,
        **(_ONE_LABEL if args.score_head else {}),
        **chosen_family.to_config(args),
        "vocab_size": vocab,
        "torch_dtype": _DTYPES[args.params_dtype],
        **({} if chosen_family.needs_bos else {"bos_token_id": None}),
        "eos_token_id": None,
        "pad_token_id": None,
    }


def unchanged_family(args: NeoXArgs, imported: Config) -> str | None:
    """Returns the imported model's `model_type` if this family can still express `args`, else None.

    imported: the config.json of the imported model."""
    family = FAMILIES.get(str(imported.get("model_type")))
    return None if family is None or _differences(args, family) else family.model_type


def is_of_family(args: NeoXArgs, family: Family) -> bool:
    """Whether the HuggingFace family can express the model of `args` without a change of its logits."""
    return not _differences(args, family)


def is_same_model(args: NeoXArgs, imported: Config) -> bool:
    """Whether the config.json of an imported model (`imported`) still describes the model of `args`."""
    return not _differences(args, FAMILIES[str(imported["model_type"])], imported)


def with_fields(config: Config, imported: Config, args: NeoXArgs) -> dict[str, Any]:
    """Returns `config` (from `hf_config`) with fields of the imported model's config.json added.

    If `imported` still describes the model of `args`, its fields replace those of `config`. Otherwise only
    fields that do not change the logits are added. Vocabulary, token ids and dtype always come from `config`.
    Fields are in the order of `imported`."""
    if imported.get("model_type") != config["model_type"]:
        return dict(config)
    family, fields = FAMILIES[config["model_type"]], dict(config)
    if is_same_model(args, imported):
        fields |= {name: value for name, value in imported.items() if name not in _CHANGING | _DROPPED}
    for name, value in imported.items():
        if name not in fields and name not in _DROPPED and not _differences(args, family, {**fields, name: value}):
            fields[name] = value
    if "dtype" in imported:  # transformers 5's name
        fields["dtype"] = fields["torch_dtype"]
    return {name: fields[name] for name in dict.fromkeys((*imported, *fields)) if name in fields}


def to_hf(
    args: NeoXArgs,
    layers: Iterable[Layer],
    *,
    family: str | None = None,
    vocab_size: int | None = None,
    copy: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HuggingFace name, contiguous tensor) pairs of a NeoX model.

    layers: yields (NeoX layer index, the layer's full tensors by NeoX names), in any order; all layers or
        some. One layer is read at a time.
    family: a `model_type`; None: the first that can express the model.
    vocab_size: number of vocabulary rows to keep; None: all.
    copy: whether each tensor gets its own storage.
    Raises CheckpointError for a layer with missing or unknown tensors, or wrong shapes."""
    table, vocab, specs = _family_for(args, family), _vocabulary(args, vocab_size), layer_params(args)
    further_blocks = table.prediction_blocks(args)
    for layer, tensors in layers:
        block = _block(args, layer)
        if block >= args.num_layers and block not in further_blocks:
            continue
        expected = {spec.name: spec.shape for spec in specs.get(layer, ())}
        given_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if given_shapes != expected:
            wrong = sorted(name for name in {*given_shapes, *expected} if given_shapes.get(name) != expected.get(name))
            shape_problems = [
                f"{name} is {given_shapes.get(name, 'missing')}, not {expected.get(name, 'there')}" for name in wrong
            ]
            raise CheckpointError(
                f"layer {layer}: tensors do not fit the configuration: {shortened(shape_problems, _MAX_NAMED)}"
            )
        shared: dict[str, dict[int, Tensor]] = {}  # parts of HuggingFace tensors that interleave several parameters
        for spec, row in _rows(table, args, layer, specs.get(layer, ())):
            parameter = tensors[spec.name]
            if spec.name in _VOCABULARY:
                parameter = parameter[:vocab]
            parts = row.split(parameter, mixer_of(args, layer), spec.experts)
            if row.part[1] > 1:
                held = shared.setdefault(row.hf_names[0], {})
                held[row.part[0]] = parts[0]
                if len(held) < row.part[1]:
                    continue
                parts = (row.merge([held[i] for i in range(row.part[1])]),)
            for name, part in zip(_file_names(table, row, args, layer, spec.experts), parts, strict=True):
                is_view = row.part[1] == 1  # a merged tensor shares no storage
                yield name, part.clone(memory_format=torch.contiguous_format) if copy and is_view else part.contiguous()
            for number in further_blocks if table.predicts_more else ():
                for name in _copies(args, spec.name):
                    yield name.format(number), parts[0].clone() if copy else parts[0].contiguous()
        if isinstance(mixer_of(args, layer), AttentionSpec):
            sample = next(iter(tensors.values()))
            for name, value in table.constants.items():
                yield name.format(block), torch.full((), value, dtype=sample.dtype, device=sample.device)


def hf_shapes(
    args: NeoXArgs, *, family: str | None = None, vocab_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor that `to_hf` yields for the model of `args`, by HuggingFace name."""
    layers = (
        (layer, {spec.name: torch.empty(spec.shape, device="meta") for spec in specs})
        for layer, specs in layer_params(args).items()
    )
    return {name: tuple(t.shape) for name, t in to_hf(args, layers, family=family, vocab_size=vocab_size)}


def hf_names(
    args: NeoXArgs, places: Collection[tuple[int, str]], *, family: str | None = None
) -> dict[tuple[int, str], list[str]]:
    """Returns the HuggingFace tensor names of NeoX parameters.

    places: (NeoX layer index, NeoX name) of each parameter; the keys of the result."""
    table, specs = _family_for(args, family), named_params(args)
    return {
        place: _file_names(table, row, args, place[0], spec.experts)
        for place in places
        for spec, row in _rows(table, args, place[0], [specs[place]])
    }


def check_hf_tensors(
    config: Config, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder_name: str
) -> None:
    """Raise CheckpointError if the tensors of a HuggingFace folder do not match its config.json.

    The error lists missing and extra tensors and wrong shapes, grouped over layers, and a likely cause.
    Buffers are ignored, and so is a head stored in addition to tied embeddings.
    keys: the NeoX configuration keys from `from_hf`. shapes: of all tensors of the folder, by name."""
    family, args = FAMILIES[family_of(config)], NeoXArgs.from_dict(keys, "config.json")
    expected = hf_shapes(args, family=family.model_type, vocab_size=config["vocab_size"])
    head = family.head
    expected = {name: shape for name, shape in expected.items() if family.copy_of(name) is None}
    unknown = {name for name in shapes.keys() - expected.keys() if name != head and not family.carries(name)}
    extra = {name for name in unknown if not re.fullmatch(family.ignored, name)}
    missing = expected.keys() - shapes.keys()
    lines = [f"missing {line}" for line in _grouped(missing)] + [f"extra {line}" for line in _grouped(extra)]
    misshapen = [name for name in expected if name in shapes and tuple(shapes[name]) != expected[name]]
    wrong = [
        f"{name}: has shape {tuple(shapes[name])} in the file, but config.json implies {expected[name]}"
        for name in misshapen
    ]
    lines += wrong[:_MAX_NAMED]
    if len(wrong) > _MAX_NAMED:
        lines.append(f"and {len(wrong) - _MAX_NAMED} more tensors of wrong shape")
    if head in missing:
        lines.append(
            f"{head} is the head: if it is tied to the embeddings, set tie_word_embeddings: true in config.json; "
            "if not, the folder holds the model without its head"
        )
    if lines:
        raise CheckpointError(f"{folder_name}: the tensors do not fit config.json:\n  " + "\n  ".join(lines))


def lacks_prefix(config: Config, names: Collection[str]) -> bool:
    """Whether a folder was saved from the model class without a head (GPT2Model, not GPT2LMHeadModel).

    names: of the folder's tensors. Without a head they lack the prefix `Family.base_prefix`."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return False
    embedding = next(row.hf_names[0] for row in family.rows if row.neox_name == "word_embeddings.weight")
    return embedding not in names and embedding.removeprefix(family.base_prefix) in names


def _grouped(names: Iterable[str]) -> list[str]:
    """Returns one line for all tensors whose names differ only in the numbers of layer and expert.

    Example: "model.layers.N.mlp.up_proj.weight (layers 0, 1)"."""
    groups: dict[str, dict[str, set[int]]] = {}
    for name in names:
        numbers = [int(number) for number in re.findall(r"\.(?=(\d+)\.)", name)]
        general = re.sub(r"\.\d+\.", ".E.", re.sub(r"\.\d+\.", ".N.", name, count=1), count=1)
        numbers_by_kind = groups.setdefault(general, {"layers": set(), "experts": set()})
        for kind, number in zip(numbers_by_kind, numbers, strict=False):
            numbers_by_kind[kind].add(number)
    lines = []
    for name, numbers_by_kind in groups.items():
        layers, experts = ([str(n) for n in sorted(numbers)] for numbers in numbers_by_kind.values())
        places = [f"layers {', '.join(layers)}"] if layers else []
        places += [f"experts {shortened(experts, _MAX_NAMED)}"] if experts else []
        lines.append(f"{name} ({'; '.join(places)})" if places else name)
    return sorted(lines)


def _family_for(args: NeoXArgs, family: str | None) -> Family:
    if family is not None and family not in FAMILIES:
        raise CheckpointError(f"{family}: no such HuggingFace family; choose one of {', '.join(FAMILIES)}")
    candidates = []
    for candidate in FAMILIES.values() if family is None else [FAMILIES[family]]:
        differences = _differences(args, candidate)
        if not differences:
            return candidate
        has_states = bool(args.state_blocks)
        has_same_parts = has_states or candidate.has_experts == (args.moe_num_experts > 1)
        is_same_kind = has_same_parts and candidate.has_states == has_states
        other_blocks = any("(attention_config)" in line for line in differences)
        line = f"{candidate.model_type}: {shortened(differences, _MAX_NAMED, '; ')}"
        candidates.append(((not is_same_kind, other_blocks, len(differences)), line))
    closest = [line for _, line in sorted(candidates, key=lambda pair: pair[0])[:2]]
    if args.pos_emb not in ("rotary", "learned", "none"):
        position_kinds = "families have only rotary, learned or none"
        closest.insert(0, f"pos_emb: {args.pos_emb}: {position_kinds}")
    raise CheckpointError(
        "this model cannot be converted to a HuggingFace family; differences from the nearest:\n  "
        + "\n  ".join(closest)
    )


def _differences(args: NeoXArgs, family: Family, config: Config | None = None) -> list[str]:
    """Returns a line for each difference that remains when the model of `args` is written as this family.

    config: compare with the model of this config.json instead; None: convert `args` and convert back."""
    if args.score_head and not family.has_scorer:
        return [f"transformers has no class for reward models of {family.model_type}"]
    try:
        keys = family.to_keys(family.to_config(args) if config is None else config)
        keys["score_head"] = args.score_head if config is None else gives_score(config)
        round_trip = NeoXArgs.from_dict({**keys, "padded_vocab_size": args.padded_vocab_size}, family.model_type)
    except (CheckpointError, ConfigError) as problem:
        return str(problem).splitlines()
    run, converted = canonical_config(args), canonical_config(round_trip)
    scaled = args.rope_scaling is not None and args.rope_scaling["rope_type"] == "dynamic"
    if scaled:  # HuggingFace's max_position_embeddings is the length before scaling
        converted["max_position_embeddings"] = run.get("max_position_embeddings")
    return describe_differences(run, converted)


def _vocabulary(args: ModelArgs, vocab_size: int | None) -> int:
    rows = args.padded_vocab_size
    if vocab_size is not None and not 0 < vocab_size <= rows:
        raise CheckpointError(f"vocab_size {vocab_size}: must be 1 to {rows} (padded_vocab_size)")
    return vocab_size or rows


def _rows(
    family: Family, args: ModelArgs, layer: int, specs: Iterable[ParamSpec]
) -> Iterator[tuple[ParamSpec, TensorMapping]]:
    is_block = _block(args, layer) >= 0
    further = PREDICTION_ROWS if family.predicts_more or family.has_mtp_block else ()
    table = {row.neox_name: row for row in (*family.rows, *further, SCORE) if row.is_block_parameter == is_block}
    mixer = mixer_of(args, layer)
    for spec in specs:
        if spec.name not in table:
            raise CheckpointError(f"layer {layer}: family {family.model_type} has no tensor for {spec.name}")
        yield spec, table[spec.name].for_mixer(mixer)


def _file_names(family: Family, row: TensorMapping, args: ModelArgs, layer: int, experts: int | None) -> list[str]:
    """Returns HuggingFace's names of a parameter in files, in the order of `TensorMapping.split`."""
    return [family.file_name(name, args.num_layers) for name in row.names(_block(args, layer), experts)]


def _copies(args: ModelArgs, name: str) -> list[str]:
    """Returns HuggingFace's names of the copies of our weight `name` in a block for multi-token prediction.

    A tied head is a copy of the embedding."""
    head = "word_embeddings.weight" if not args.no_weight_tying else "final_linear.weight"
    sources = {"word_embeddings.weight": "word_embeddings.weight", "final_linear.weight": head}
    return [PREDICTION_COPIES[copied] for copied, source in sources.items() if source == name]


def _block(args: ModelArgs, layer: int) -> int:
    """Returns a block's number in HuggingFace's names, by its NeoX layer index; -1 for other layers."""
    number = block_number(args, layer)
    return -1 if number is None else number


def _rows_of(spec: ParamSpec, vocab: int) -> tuple[int, ...]:
    """Returns the full shape of a parameter; for embedding and head, with `vocab` rows instead of padded
    ones."""
    return (vocab, *spec.shape[1:]) if spec.name in _VOCABULARY else spec.shape


def padded(weight: Tensor, rows: int) -> Tensor:
    """Returns `weight` extended to `rows` rows; each added row is the mean of the existing rows."""
    mean = weight.mean(0, keepdim=True, dtype=torch.float32).to(weight.dtype)
    return torch.cat([weight, mean.expand(rows - len(weight), -1)])
