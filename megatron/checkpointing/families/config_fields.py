"""Converts fields of config.json that families share: sizes, rotary positions, windows, activations.

Functions named `..._keys` convert config.json to NeoX configuration keys, `..._config` convert back.
"""

from collections.abc import Callable, Sequence
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.family import Config
from megatron.model.positions import longrope_factor
from megatron.neox_arguments import ModelArgs

# HuggingFace's hidden_act -> our activation of a gated MLP. Of several equal names the first is written.
GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
    "relu": "reglu", "linear": "bilinear", "sigmoid": "glu",
}  # fmt: skip
# HuggingFace's hidden_act -> our (activation, bias_gelu_fusion: tanh approximation) of an ungated MLP.
UNGATED = {
    "gelu": ("gelu", False), "gelu_pytorch_tanh": ("gelu", True), "gelu_new": ("gelu", True),
    "gelu_fast": ("gelu", True), "relu": ("relu", False), "relu2": ("relu2", False), "silu": ("silu", False),
    "swish": ("silu", False), "mish": ("mish", False),
}  # fmt: skip
# Fields of rope_parameters that are not part of a scaling method.
# Those of mrope are about images: a text's tokens have equal positions along all axes.
_NOT_OF_SCALING = (
    "rope_theta", "partial_rotary_factor", "type", "max_position_embeddings", "mrope_section", "mrope_interleaved",
)  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def refuse_unless(config: Config, name: str, *supported: Any) -> None:
    """Raise CheckpointError unless the field `name` of config.json is absent, null or one of `supported`."""
    if config.get(name) not in (None, *supported):
        raise CheckpointError(f"config.json: {name}: {config[name]} is not supported, only {supported[0]}")


def get(config: Config, name: str, default: Any) -> Any:
    """Returns the field `name` of config.json; `default` if the field is absent or null."""
    value = config.get(name)
    return default if value is None else value


def drop_fields(fields: Config, *names: str) -> dict[str, Any]:
    """Returns `fields` except those called `names`."""
    return {name: value for name, value in fields.items() if name not in names}


def number(value: float) -> int | float:
    """Converts a float without a fraction (8.0) to int; any other number is returned unchanged."""
    return int(value) if float(value).is_integer() else value


def size_keys(config: Config, defaults: Config) -> dict[str, Any]:
    """Returns the model's sizes in config.json as NeoX configuration keys.

    defaults: values of the family's HuggingFace configuration class, for fields that config.json leaves out.
        Raises CheckpointError if a size is in neither."""

    def size(name: str) -> Any:
        value = get(config, name, defaults.get(name))
        if value is None:
            raise CheckpointError(f"config.json: {name} is missing, and this family has no default for it")
        return value

    positions = size("max_position_embeddings")
    return {
        "num_layers": size("num_hidden_layers"),
        "hidden_size": size("hidden_size"),
        "num_attention_heads": size("num_attention_heads"),
        "intermediate_size": size("intermediate_size"),
        "compat_ffn_width": "none",
        "max_position_embeddings": positions,
        "seq_length": positions,
        "pos_emb": "rotary",
        "no_weight_tying": not get(config, "tie_word_embeddings", defaults.get("tie_word_embeddings", False)),
    }


def size_config(args: ModelArgs) -> dict[str, Any]:
    """Returns the model's sizes as fields of config.json, the inverse of `size_keys`.

    Raises CheckpointError if layers differ in a size."""
    for name, value in (("num_kv_heads", args.kv_heads), ("intermediate_size", args.ffn_size)):
        if isinstance(value, tuple):
            raise CheckpointError(f"{name}: layers differ, but this family's config.json has one value for all layers")
    length, scaling = args.max_position_embeddings, args.rope_scaling
    if scaling is not None and scaling["rope_type"] == "dynamic":
        length = scaling["original_max_position_embeddings"]  # the length before scaling
    return {
        "num_hidden_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "intermediate_size": args.ffn_size,
        "max_position_embeddings": length,
        "tie_word_embeddings": not args.no_weight_tying,
    }


def rope_of(config: Config, kind: str | None = None, *, theta: float, spelt: str = "rope_theta") -> dict[str, Any]:
    """Returns the rotary parameters of config.json, always with `rope_type` and `rope_theta`.

    transformers 5 writes the field `rope_parameters`, with an entry per layer type if they differ. Older
    versions write `rope_scaling` and a separate field for the rotary base.

    kind: the layer type to read, such as "sliding_attention", if there are several; None: "full_attention".
    theta: the rotary base if config.json gives none.
    spelt: the field in which older versions write the rotary base."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = config.get("rope_parameters") is not None and any(name in fields for name in (SLIDING, FULL))
    rope = dict(fields.get(kind or FULL) or {}) if nested else dict(fields)
    rope["rope_type"] = rope.pop("rope_type", rope.pop("type", "default"))
    rope["rope_theta"] = get(rope, "rope_theta", get(config, spelt, theta))
    return rope


def rope_keys(config: Config, rope: Config, *, partial: bool = False, query_scale: bool = False) -> dict[str, Any]:
    """Returns the NeoX configuration keys for the base, scaling and rotated fraction of rotary positions.

    rope: the result of `rope_of`.
    partial: the family may rotate only a part of each head.
    query_scale: the family may scale queries by position (llama_4_scaling_beta).
    Raises CheckpointError if the family does not support a field."""
    scaling = {name: value for name, value in rope.items() if value is not None and name not in _NOT_OF_SCALING}
    share = get(rope, "partial_rotary_factor", get(config, "partial_rotary_factor", 1.0) if partial else 1.0)
    if share != 1.0 and not partial:
        raise CheckpointError(f"config.json: partial_rotary_factor: {share} is not supported for this family, only 1")
    if "llama_4_scaling_beta" in scaling and not (query_scale and scaling["rope_type"] == "yarn"):
        raise CheckpointError("config.json: llama_4_scaling_beta is only supported in ministral3 with rope_type yarn")
    keys: dict[str, Any] = {"rotary_emb_base": number(rope["rope_theta"])}
    if share != 1.0:
        keys["rotary_pct"] = share
    if scaling["rope_type"] == "default":
        return keys
    if scaling["rope_type"] in ("longrope", "su"):  # su: the name in Phi 3's first files
        return {**keys, "rope_scaling": _longrope_keys(config, scaling)}
    if scaling.get("truncate", True):
        scaling.pop("truncate", None)  # true is the default
    elif scaling["rope_type"] != "yarn":
        raise CheckpointError("config.json: truncate: false of rotary positions is only supported with rope_type yarn")
    if scaling["rope_type"] == "dynamic":
        scaling["original_max_position_embeddings"] = _longest(config)
    elif scaling["rope_type"] in ("llama3", "yarn"):
        original = get(scaling, "original_max_position_embeddings", _longest(config))
        scaling["original_max_position_embeddings"] = original
        if scaling["rope_type"] == "yarn":
            scaling.setdefault("factor", _longest(config) / original)
    return {**keys, "rope_scaling": scaling}


def _longest(config: Config) -> int:
    """Returns max_position_embeddings. Raises CheckpointError if config.json lacks it."""
    if config.get("max_position_embeddings") is None:
        raise CheckpointError("config.json: max_position_embeddings is missing; its rotary scaling needs it")
    length: int = config["max_position_embeddings"]
    return length


def _longrope_keys(config: Config, scaling: Config) -> dict[str, Any]:
    """Returns the NeoX key `rope_scaling` for LongRoPE, with `attention_factor` set.

    If unset, its value would follow max_position_embeddings, which a run may change."""
    name = "original_max_position_embeddings"
    original = get(config, name, get(scaling, name, _longest(config)))
    factor = get(scaling, "factor", _longest(config) / original)
    grown = longrope_factor(original, factor * original)
    missing = [name for name in ("short_factor", "long_factor") if not scaling.get(name)]
    if missing:
        raise CheckpointError(f"config.json: rope_scaling.{missing[0]} is missing; rope_type longrope needs it")
    lists = {name: [number(value) for value in scaling[name]] for name in ("short_factor", "long_factor")}
    longrope = {"rope_type": "longrope", name: original, "attention_factor": get(scaling, "attention_factor", grown)}
    return {**longrope, **lists}


def rope_config(args: ModelArgs, *, partial: bool = False) -> dict[str, Any]:
    """Returns config.json's `rope_theta` and `rope_scaling`, which every version of transformers reads.

    partial: also return `partial_rotary_factor`."""
    config: dict[str, Any] = {"rope_theta": float(args.rotary_emb_base), "rope_scaling": None}
    if partial:
        config["partial_rotary_factor"] = args.rotary_pct
    if args.rope_scaling is not None:
        scaling = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in args.rope_scaling.items()
            if value is not None
        }
        if scaling["rope_type"] == "dynamic":
            del scaling["original_max_position_embeddings"]
        elif scaling["rope_type"] in ("llama3", "yarn"):
            scaling.setdefault("original_max_position_embeddings", args.max_position_embeddings)
        config["rope_scaling"] = scaling
    return config


def two_ropes_config(args: ModelArgs) -> dict[str, Any]:
    """Returns rotary fields of config.json for a model whose sliding-window layers have their own rotary
    base.

    Both bases are written in all forms that versions of transformers read."""
    config = rope_config(args)
    local = float(args.rope_local_base_freq or args.rotary_emb_base)
    full = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    sliding = {"rope_type": "default", "rope_theta": local}
    return {**config, "rope_local_base_freq": local, "rope_parameters": {FULL: full, SLIDING: sliding}}


def window_keys(window: int | None, types: Sequence[str]) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a sliding window; {} if no layer has one.

    window: HuggingFace's width, which counts the token itself. NeoX's width counts only the tokens before it.
    types: `layer_types` of config.json."""
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types: {', '.join(unknown)} is not supported, only {SLIDING} and {FULL}"
        )
    if window is None or SLIDING not in types:
        return {}
    return {"sliding_window_width": window - 1, "layer_types": list(types)}


def same_window_keys(window: int | None) -> dict[str, Any]:
    """Returns the NeoX configuration keys for a sliding window in all layers; {} if `window` is None.

    window: HuggingFace's width, which counts the token itself."""
    return {} if window is None else {"sliding_window_width": window - 1}


def needed_window(config: Config, default: int, types: Sequence[str]) -> int | None:
    """Returns `sliding_window` of config.json; None if it is null.

    default: its value if the field is absent. types: `layer_types`.
    Raises CheckpointError if it is null although layers have windows."""
    window = config.get("sliding_window", default)
    if window is None and SLIDING in types:
        raise CheckpointError(f"config.json: layer_types has {SLIDING}, so sliding_window must not be null")
    return window


def window_period(config: Config, default: int, *names: str) -> int:
    """Returns after how many layers one without a window follows.

    names: fields of config.json that give it. default: its value without them.
    Raises CheckpointError if a field has letters ("LLLG"); transformers then needs `layer_types`."""
    for name in names or ("sliding_window_pattern",):
        period = config.get(name)
        if isinstance(period, int) and period > 0:
            return period
        if period is not None and config.get("layer_types") is None:
            raise CheckpointError(f"config.json: {name}: {period} is not supported; set layer_types")
    return default


def layer_kinds(config: Config, slides: Callable[[int], bool]) -> Sequence[str]:
    """Returns `layer_types` of config.json: "sliding_attention" or "full_attention" for each layer.

    slides: whether the layer of a number, from 0, has a sliding window; used if config.json lacks
        `layer_types`."""
    if config.get("layer_types") is not None:
        return config["layer_types"]
    return [SLIDING if slides(i) else FULL for i in range(config["num_hidden_layers"])]


def layer_types(args: ModelArgs) -> list[str]:
    """Returns config.json's `layer_types`: sliding or full attention for every layer."""
    slides = SLIDING if args.sliding_window_width is not None else FULL
    return list(args.layer_types or (slides,) * args.num_layers)


def window_of(args: ModelArgs) -> int | None:
    """Returns config.json's `sliding_window`, which counts the token itself; None without a window."""
    return None if args.sliding_window_width is None else args.sliding_window_width + 1


def window_config(args: ModelArgs, unused: int = 4096) -> dict[str, Any]:
    """Returns `sliding_window` and `layer_types` of config.json.

    unused: the value of `sliding_window` if no layer has a window, because the field must not be null."""
    return {"sliding_window": window_of(args) or unused, "layer_types": layer_types(args)}


def plain_activation_keys(config: Config, name: str, default: str) -> dict[str, Any]:
    """Returns the NeoX configuration keys for the activation of an ungated MLP.

    name: the field of config.json that names the activation. default: the activation if this field is absent.
        Raises CheckpointError for an unsupported activation."""
    activation = get(config, name, default)
    if activation not in UNGATED:
        raise CheckpointError(f"config.json: {name}: {activation} is not supported; supported are {', '.join(UNGATED)}")
    neox_activation, tanh = UNGATED[activation]
    return {"activation": neox_activation, "bias_gelu_fusion": tanh}


def plain_activation(args: ModelArgs, default: str) -> str:
    """Returns HuggingFace's name of an ungated MLP's activation.

    If several names fit, `default` is preferred; if none fits, it is returned."""
    tanh = args.activation == "gelu" and (args.bias_gelu_fusion or args.te_layernorm_mlp)
    neox_activation = ("silu" if args.activation == "swish" else args.activation, tanh)
    return next((name for name in (default, *UNGATED) if UNGATED[name] == neox_activation), default)


def activation_keys(config: Config, name: str = "hidden_act", default: str = "silu") -> dict[str, str]:
    """Returns the NeoX configuration key for the activation of a gated MLP.

    name: the field of config.json that names the activation. default: the activation if this field is absent.
        Raises CheckpointError for an unsupported activation."""
    activation = get(config, name, default)
    if activation not in GATES:
        raise CheckpointError(f"config.json: {name}: {activation} is not supported; supported are {', '.join(GATES)}")
    return {"activation": GATES[activation]}


def gated_activation(args: ModelArgs, default: str = "silu") -> str:
    """Returns HuggingFace's name of a gated MLP's activation; `default` if HuggingFace has no name for it."""
    return next((name for name, neox_activation in GATES.items() if neox_activation == args.activation), default)
