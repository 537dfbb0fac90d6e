"""Reads and writes manifest.json, which describes a checkpoint and has the size and SHA-256 of each file.

Checkpoints of GPT-NeoX have no manifest; they are read without these checks.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from megatron.checkpointing.config_changes import ConfigChange, describe_changes, responsible_key
from megatron.checkpointing.errors import CheckpointError, DamagedError
from megatron.checkpointing.layout import model_file
from megatron.checkpointing.tensor_files import FileRecord, load_tensors
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.model_args import DELTA_BLOCKS, FULL_BLOCKS
from megatron.neox_arguments.values.lora_settings import adapter_keys

T = TypeVar("T")
FORMAT_VERSION = 2  # version 1 has no checksum of the manifest itself
MANIFEST = "manifest.json"
# If two models differ in one of these keys, their outputs for equal weights or their shapes differ.
_MODEL_KEYS = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_heads", "ffn_size", "padded_vocab_size", "norm",
    "activation", "pos_emb", "rotary_pct", "rotary_emb_base", "gpt_j_residual", "no_weight_tying",
    "layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon", "bias_gelu_fusion", "te_layernorm_mlp",
    "norm_placement", "use_qk_layernorm", "use_separate_qk_norms", "gpt_j_tied",
    "opt_pos_emb_offset", "rpe_max_distance", "head_dim", "qk_norm_per_head", "zero_centered_gamma",
    "qk_norm_after_rotary",
    "rope_local_base_freq", "no_rope_layers", "layer_types", "query_pre_attn_scalar", "embedding_multiplier",
    "score_head", "lora", "add_qkv_bias", "rotary_interleaved", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "clip_qkv", "residual_multiplier", "logit_scale", "attention_sinks",
    "attention_output_gate", "global_head_dim", "attention_k_eq_v", "use_v_norm", "layer_scalar",
    "moe_num_experts",
)  # fmt: skip
# More such keys, for models with experts.
_EXPERT_KEYS = (
    "moe_expert_interval", "moe_layer_freq", "expert_ffn_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_top_k", "router_scores",
    "norm_topk_prob", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score", "moe_router_bias", "moe_expert_bias",
    "moe_expert_tensor_parallel",
)  # fmt: skip
# More such keys, for models with latent attention.
_LATENT_KEYS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon",
)  # fmt: skip
# More such keys, for models with other blocks than attention plus MLP.
_BLOCK_KEYS = (
    "attention_config", "mamba_state_dim", "mamba_expand", "mamba_conv_kernel", "mamba_num_heads", "mamba_head_dim",
    "mamba_num_groups", "mamba_bcdt_norm_epsilon", "mamba_time_step_limit",
)  # fmt: skip
# More such keys, for models with delta rules.
_DELTA_KEYS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
# More such keys, for models with short convolutions.
_SHORT_CONV_KEYS = ("short_conv_kernel", "use_bias_in_short_conv")
# For models with multi-token prediction.
_MTP_KEYS = ("mtp_num_layers",)
_ATTENTION_KEYS = ("num_attention_heads", "kv_heads", "head_dim", "rotary_pct", "rotary_emb_base")
_MADE_OF = {
    "kv_heads": ("num_kv_heads", "num_attention_heads"),
    "ffn_size": ("intermediate_size", "expansion_factor", "mlp_multiple_of", "compat_ffn_width", "hidden_size"),
    "expert_ffn_size": ("moe_intermediate_size", "intermediate_size", "hidden_size"),
    "router_scores": ("moe_router_score_function", "moe_router_type"),
}

_EXPERT_SHARDING = "moe_expert_tensor_parallel"
_HEAD_KEYS = ("score_head", "no_weight_tying")

# Fields that the first manifests lack.
_OPTIONAL_FIELDS = ("config", "settled", "optimizer", "validation_loss", "engine", "base")


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel layout of the run that wrote a checkpoint.

    pipe, data, context, tensor: numbers of ranks of each kind of parallelism. precision: "fp32",
        "bf16" or "fp16".
    """

    pipe: int
    data: int
    tensor: int
    zero_stage: int
    precision: str
    world_size: int
    context: int = 1

    @classmethod
    def from_args(cls, args: ModelArgs, precision: str) -> Self:
        """Returns a layout with the pipeline and tensor sizes of `args`, without data parallelism."""
        return cls(args.pp, 1, args.tp, 0, precision, args.pp * args.tp)

    def __post_init__(self) -> None:
        if min(self.pipe, self.data, self.context, self.tensor, self.world_size) < 1:
            raise ValueError(f"{self}: every number of ranks must be at least 1")


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    layout: parallel layout of the run that wrote the checkpoint.
    model: configuration keys that decide shapes and logits, with values (`model_keys`).
    tokenizer: fingerprint of the tokenizer. data: a fingerprint of each data set.
    versions: of libraries, by name. created: time as ISO 8601.
    config: the configuration keys that the user set, or that the run settled, with values.
    settled: of these, the keys that the run settled, with the user's values: "auto", or None for unset.
    files: size and checksum of each file, by name.
    optimizer: whether the optimizer's state was saved.
    validation_loss: at this iteration; None if it was not computed.
    engine: `native` or `deepspeed`.
    base: path and digest of the base weights, if the checkpoint holds only adapters; else None.
    """

    run_id: str
    iteration: int
    consumed_samples: int
    layout: ParallelLayout
    model: Mapping[str, Any]
    seed: int
    tokenizer: str | None
    data: Mapping[str, Any]
    versions: Mapping[str, str]
    created: str
    config: Mapping[str, Any] = field(default_factory=dict)
    settled: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    optimizer: bool = True
    validation_loss: float | None = None
    engine: str = "deepspeed"
    base: Mapping[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    @property
    def user_config(self) -> dict[str, Any]:
        """The configuration keys that the user set, with values, also if the run settled another value."""
        return {key: value for key, value in {**self.config, **self.settled}.items() if value is not None}

    def to_json(self) -> str:
        """Returns the text of manifest.json, with a checksum of its content."""
        raw = asdict(self)
        raw["files"] = {
            name: {"size": r.size, "sha256": r.sha256, **({"tensors": dict(r.tensors)} if r.tensors else {})}
            for name, r in sorted(self.files.items())
        }
        raw = {"format_version": raw.pop("format_version"), **raw}
        return json.dumps({"checksum": _checksum(raw), **raw}, indent=1, default=list) + "\n"

    @classmethod
    def from_json(cls, text: str, file_name: str = MANIFEST) -> Self:
        """Parses the text of a manifest.json. file_name: for errors.

        Raises DamagedError for a damaged text, CheckpointError for a format newer than this program."""
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            if not isinstance(version, int):
                raise TypeError(f"format_version {version!r} is not a number")
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{file_name}: format_version {version} is newer than this program can read "
                    f"({FORMAT_VERSION}); update the program"
                )
            if (version > 1 or "checksum" in raw) and raw.pop("checksum") != _checksum(raw):
                raise DamagedError(f"{file_name}: damaged: does not match its own checksum; load another `iteration`")
            raw["layout"] = _checked_object(ParallelLayout, raw["layout"])
            raw["files"] = {name: _checked_object(FileRecord, {**r, "name": name}) for name, r in raw["files"].items()}
            if raw.get("base") is not None and not raw["base"].keys() >= {"path", "digest"}:
                raise TypeError("base has no path or no digest")
            return _checked_object(
                cls, {f.name: raw[f.name] for f in fields(cls) if f.name in raw or f.name not in _OPTIONAL_FIELDS}
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            if isinstance(e, CheckpointError):
                raise
            raise DamagedError(
                f"{file_name}: damaged: cannot be parsed ({type(e).__name__}: {e}); load another `iteration`"
            ) from e


def _checked_object(kind: type[T], values: Mapping[str, Any]) -> T:
    """Returns an object of the dataclass `kind`; further values are left out. Raises TypeError for a value of
    another type than declared."""
    for name, hint in get_type_hints(kind).items():
        members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(member) or member for member in members)
        kinds += (int,) if float in kinds else ()  # JSON of other programs writes 3.0 as 3
        value = values.get(name)
        if name in values and (not isinstance(value, kinds) or isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name} is {type(value).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}")
    return kind(**{name: value for name, value in values.items() if name in get_type_hints(kind)})


def _checksum(raw: Mapping[str, Any]) -> str:
    """Returns a checksum of a manifest's content, independent of white space and the order of keys."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=list).encode()).hexdigest()


def untrained_manifest(
    run_id: str,
    layout: ParallelLayout,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    records: Iterable[FileRecord],
    **further_fields: Any,
) -> Manifest:
    """Returns the manifest of a checkpoint that no training run saved, such as an import or initial weights.

    records: of its files. further_fields: fields of `Manifest` that differ from the usual: iteration 0, no
        samples, seed 0, no tokenizer, no data, no optimizer state."""
    start_fields: dict[str, Any] = {
        "iteration": 0,
        "consumed_samples": 0,
        "seed": 0,
        "tokenizer": None,
        "data": {},
        "optimizer": False,
    }
    return Manifest(
        run_id=run_id, layout=layout, model=model, config=config, files={record.name: record for record in records},
        versions={"torch": version("torch")}, created=datetime.now(UTC).isoformat(timespec="seconds"),
        **start_fields | further_fields,
    )  # fmt: skip


def read_manifest(path: str | Path) -> Manifest | None:
    """Returns the manifest of a checkpoint directory; None if it has none, as checkpoints of GPT-NeoX."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        return None
    return Manifest.from_json(file.read_text(encoding="utf-8", errors="replace"), str(file))


def file_sizes(path: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns the size in bytes of each of the files `names` that exists in the folder `path`."""
    return {name: (path / name).stat().st_size for name in names if (path / name).is_file()}


def size_problems(sizes: Mapping[str, int], records: Iterable[FileRecord]) -> list[str]:
    """Returns a line for each file that is missing or differs in size from its record.

    sizes: actual sizes in bytes, by file name."""
    bad = []
    for record in records:
        size = sizes.get(record.name)
        if size != record.size:
            text = "missing" if size is None else f"{size:,} bytes instead of {record.size:,}"
            bad.append(f"{record.name} ({text})")
    return bad


def model_keys(args: ModelArgs) -> dict[str, Any]:
    """Returns the configuration keys that decide the shapes of weights or the logits, with their values."""
    keys = _MODEL_KEYS + (_EXPERT_KEYS if args.moe_num_experts > 1 else ())
    keys += _LATENT_KEYS if args.kv_lora_rank is not None else ()
    nets = not {*DELTA_BLOCKS}.isdisjoint(args.attention_config)
    convolves = "short_conv" in args.attention_config
    keys += _BLOCK_KEYS if set(args.attention_config) - set(FULL_BLOCKS) or args.state_blocks else ()
    keys += _DELTA_KEYS if nets else ()
    keys += _SHORT_CONV_KEYS if convolves else ()
    keys += _MTP_KEYS if args.mtp_num_layers is not None else ()
    keys = keys if args.attends else tuple(key for key in keys if key not in _ATTENTION_KEYS)
    values = {key: getattr(args, key) for key in keys} | {"lora": adapter_keys(args)}
    if _EXPERT_SHARDING in values and args.tp == 1:
        values[_EXPERT_SHARDING] = None  # with one tensor rank it makes no difference
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
    }  # as JSON stores tuples


def saved_model(path: str | Path) -> Mapping[str, Any]:
    """Returns the model's configuration keys, with values, that a checkpoint stores.

    This program's checkpoints store all of `model_keys`; GPT-NeoX's store a few, or none."""
    manifest = read_manifest(path)
    if manifest is not None:
        return manifest.model
    file = Path(path) / model_file(0)
    state = load_tensors(file) if file.exists() else {}
    saved = state.get("args") if isinstance(state, Mapping) else None
    return saved if isinstance(saved, Mapping) else {}


def config_key(name: str, args: ModelArgs) -> str:
    """Returns the configuration key that decides entry `name` of `model_keys`, for errors.

    Example: "num_kv_heads" for "kv_heads"."""
    return responsible_key(_MADE_OF.get(name, (name,)), args, {})


def check_model(saved: Mapping[str, Any], args: ModelArgs, source: str, new_head: bool = False) -> None:
    """Raise CheckpointError with the differing keys if checkpoint `source` does not fit the model of `args`.

    saved: keys of the checkpoint's model (`saved_model`); keys that it lacks are not compared. new_head:
        ignore the output layer of `source`."""
    now = model_keys(args)
    if _EXPERT_SHARDING in now:
        now[_EXPERT_SHARDING] = args.moe_expert_tensor_parallel
    saved = {key: value for key, value in saved.items() if key != _EXPERT_SHARDING or value is not None}
    if new_head:
        saved = {key: value for key, value in saved.items() if key not in _HEAD_KEYS}
    elif saved.get("score_head") and not args.score_head:
        raise CheckpointError(
            f"{source}: is a reward model, which gives scores, not text; load the language model it was trained from "
            "(tools/score.py uses reward models)"
        )
    elif "no_weight_tying" in saved and not saved.get("score_head") and args.score_head:
        raise CheckpointError(
            f"{source}: is a language model, which gives no scores; load a reward model, or train one from it "
            "(train_impl: rm with finetune: true)"
        )
    if "num_layers" in saved and saved.get("lora") is None:  # a run may start with adapters on these weights
        now = {**now, "lora": None}
    elif saved.get("lora") is not None and args.lora is None:
        raise CheckpointError(
            f"{source}: holds LoRA adapters; set lora as in the run that saved them, or merge them into the "
            "weights: tools/ckpts/adapter.py merge"
        )
    further_keys = (*_BLOCK_KEYS, *_DELTA_KEYS, *_SHORT_CONV_KEYS, *_MTP_KEYS)
    wrong = [
        ConfigChange(config_key(key, args), now[key], saved[key])
        for key in (*_MODEL_KEYS, *_EXPERT_KEYS, *_LATENT_KEYS, *further_keys)
        if key in saved and key in now and saved[key] != now[key]
    ]
    if wrong:
        hint = ""
        if saved.get(_EXPERT_SHARDING) not in (None, now.get(_EXPERT_SHARDING)):
            hint = ", or reshard the checkpoint to one tensor rank, which fits both: tools/ckpts/reshard.py --tp 1"
        changes = describe_changes(wrong, args, f"the model of {source}")
        raise CheckpointError(f"{changes}; change the config or `load`{hint}")
