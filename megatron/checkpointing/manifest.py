"""manifest.json: what a checkpoint is, and a size and SHA-256 for each of its files.

Checkpoints of GPT-NeoX have none; they are read without these checks.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.checkpointing.config_changes import ConfigChange, describe_changes, responsible_key
from megatron.checkpointing.errors import CheckpointError, DamagedError
from megatron.checkpointing.layout import model_file
from megatron.checkpointing.tensor_files import FileRecord, load_tensors
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.resolved import FULL_BLOCKS
from megatron.neox_arguments.values.adapters import adapter_keys

FORMAT_VERSION = 2  # 1: without a checksum of the manifest itself
MANIFEST = "manifest.json"
# Two models that differ in one of these give different numbers from the same weights, or have other shapes.
_MODEL_KEYS = (
    "num_layers", "hidden_size", "num_attention_heads", "kv_heads", "ffn_size", "padded_vocab_size", "norm",
    "activation", "pos_emb", "rotary_pct", "rotary_emb_base", "gpt_j_residual", "no_weight_tying",
    "layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon", "bias_gelu_fusion", "te_layernorm_mlp",
    "norm_placement", "use_qk_layernorm", "use_separate_qk_norms", "gpt_j_tied",
    "opt_pos_emb_offset", "rpe_max_distance", "head_dim", "qk_norm_per_head", "zero_centered_gamma",
    "rope_local_base_freq", "no_rope_layers", "layer_types", "query_pre_attn_scalar", "embedding_multiplier",
    "score_head", "lora", "add_qkv_bias", "rotary_interleaved", "attention_multiplier", "attn_logit_softcapping",
    "final_logit_softcapping", "clip_qkv", "residual_multiplier", "logit_scale", "attention_sinks",
    "moe_num_experts",
)  # fmt: skip
# Likewise, of models with experts.
_EXPERT_KEYS = (
    "moe_expert_interval", "moe_layer_freq", "expert_ffn_size", "moe_latent_size",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_top_k", "router_scores",
    "norm_topk_prob", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_bias", "moe_expert_bias",
    "moe_expert_tensor_parallel",
)  # fmt: skip
# Likewise, of models of other blocks than attention and MLP together.
_BLOCK_KEYS = (
    "attention_config", "mamba_state_dim", "mamba_expand", "mamba_conv_kernel", "mamba_num_heads", "mamba_head_dim",
    "mamba_num_groups", "mamba_bcdt_norm_epsilon", "mamba_time_step_limit",
)  # fmt: skip
_OF_ATTENTION = ("num_attention_heads", "kv_heads", "head_dim", "rotary_pct", "rotary_emb_base")
_MADE_OF = {
    "kv_heads": ("num_kv_heads", "num_attention_heads"),
    "ffn_size": (
        "intermediate_size",
        "expansion_factor",
        "mlp_multiple_of",
        "compat_ffn_width",
        "hidden_size",
    ),
    "expert_ffn_size": ("moe_intermediate_size", "intermediate_size", "hidden_size"),
    "router_scores": ("moe_router_score_function", "moe_router_type"),
}

_OF_CUT = "moe_expert_tensor_parallel"
_OF_HEAD = ("score_head", "no_weight_tying")

_LATER = ("config", "optimizer", "validation_loss", "engine", "base")  # fields that the first manifests lack


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel layout of the run that wrote a checkpoint: numbers of pipeline, data-parallel and
    tensor-parallel ranks. precision: "fp32", "bf16" or "fp16"."""

    pipe: int
    data: int
    tensor: int
    zero_stage: int
    precision: str
    world_size: int


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says of a checkpoint.

    layout: of the run that wrote it. model: the result of `model_keys`. tokenizer: its fingerprint. data: a
    fingerprint of each data set. versions: of the libraries. created: ISO time. config: the keys that the
    user gave. files: a record of each file by name, collected from the ranks and completed by `publish`.
    optimizer: whether the optimizer's state was saved. validation_loss: None where none was computed at this
    iteration. engine: `native` or `deepspeed`. base: where a checkpoint of adapters alone
    has the weights below them, and their digest (`describe_base`); None where it holds all weights.
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
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    optimizer: bool = True
    validation_loss: float | None = None
    engine: str = "deepspeed"
    base: Mapping[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of manifest.json, with a checksum of all that it says."""
        raw = asdict(self)
        raw["files"] = {
            name: {"size": r.size, "sha256": r.sha256, **({"tensors": dict(r.tensors)} if r.tensors else {})}
            for name, r in sorted(self.files.items())
        }
        raw = {"format_version": raw.pop("format_version"), **raw}
        return json.dumps({"checksum": _checksum(raw), **raw}, indent=1, default=list) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST) -> "Manifest":
        """The manifest of a text that `to_json` wrote; where: what errors call it.

        Raises DamagedError for a damaged text, CheckpointError for one of a later format.
        """
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise CheckpointError(
                    f"{where}: format_version {version} is newer than this program reads ({FORMAT_VERSION}); update it"
                )
            if (version > 1 or "checksum" in raw) and raw.pop("checksum") != _checksum(raw):
                raise DamagedError(f"{where}: damaged (its own checksum); load another `iteration`")
            raw["layout"] = ParallelLayout(**raw["layout"])
            raw["files"] = {
                name: FileRecord(name, int(r["size"]), str(r["sha256"]), dict(r.get("tensors", {})))
                for name, r in raw["files"].items()
            }
            return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw or f.name not in _LATER})
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise DamagedError(f"{where}: damaged ({type(e).__name__}: {e}); load another `iteration`") from e


def _checksum(raw: Mapping[str, Any]) -> str:
    """A checksum of what a manifest says, whatever its white space and the order of its entries."""
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=list).encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest | None:
    """The manifest of a checkpoint directory; None for a checkpoint of GPT-NeoX."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        return None
    return Manifest.from_json(file.read_text(encoding="utf-8", errors="replace"), str(file))


def file_sizes(path: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each of the files `names` that exists in the folder `path`."""
    return {name: (path / name).stat().st_size for name in names if (path / name).is_file()}


def size_problems(sizes: Mapping[str, int], records: Iterable[FileRecord]) -> list[str]:
    """The files that are missing or have another size than their record, in words. sizes: in bytes, by
    name."""
    bad = []
    for record in records:
        size = sizes.get(record.name)
        if size != record.size:
            text = "missing" if size is None else f"{size:,} bytes instead of {record.size:,}"
            bad.append(f"{record.name} ({text})")
    return bad


def model_keys(args: NeoXArgs) -> dict[str, Any]:
    """The keys that say what the weights mean: shapes, and what changes the function without changing a
    shape."""
    keys = _MODEL_KEYS + (_EXPERT_KEYS if args.moe_num_experts > 1 else ())
    keys += _BLOCK_KEYS if set(args.attention_config) - set(FULL_BLOCKS) else ()
    keys = keys if args.attends else tuple(key for key in keys if key not in _OF_ATTENTION)
    values = {key: getattr(args, key) for key in keys} | {"lora": adapter_keys(args)}
    if _OF_CUT in values and args.tp == 1:
        values[_OF_CUT] = None  # it says how files of several tensor ranks are cut
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}  # as JSON has it


def saved_model(path: str | Path) -> Mapping[str, Any]:
    """The keys of its model that a checkpoint keeps: all of `model_keys` in ours, a few in GPT-NeoX's, or
    {}."""
    manifest = read_manifest(path)
    if manifest is not None:
        return manifest.model
    file = Path(path) / model_file(0)
    state = load_tensors(file) if file.exists() else {}
    saved = state.get("args") if isinstance(state, Mapping) else None
    return saved if isinstance(saved, Mapping) else {}


def config_key(name: str, args: NeoXArgs) -> str:
    """The configuration key that the entry `name` of `model_keys` is made of."""
    return responsible_key(_MADE_OF.get(name, (name,)), args, {})


def check_model(saved: Mapping[str, Any], args: NeoXArgs, where: str, new_head: bool = False) -> None:
    """Raise CheckpointError when the weights of `where` are of another model than `args`, naming the keys
    that differ.

    saved: `Manifest.model`, or the `args` that GPT-NeoX keeps in its mp_rank files; keys that only one has
    are skipped. new_head: the output layer of `where` is left out, so that it may be any.
    """
    now = model_keys(args)
    if _OF_CUT in now:
        now[_OF_CUT] = args.moe_expert_tensor_parallel
    saved = {key: value for key, value in saved.items() if key != _OF_CUT or value is not None}
    if new_head:
        saved = {key: value for key, value in saved.items() if key not in _OF_HEAD}
    elif saved.get("score_head") and not args.score_head:
        raise CheckpointError(
            f"{where}: a reward model, which gives scores and no text; load the language model that it began with "
            "(tools/score.py asks reward models)"
        )
    elif "no_weight_tying" in saved and not saved.get("score_head") and args.score_head:
        raise CheckpointError(
            f"{where}: a language model, which has no scores; load a reward model, or train one from it "
            "(train_impl: rm with finetune: true)"
        )
    if "num_layers" in saved and saved.get("lora") is None:  # a run may begin with adapters on it
        now = {**now, "lora": None}
    elif saved.get("lora") is not None and args.lora is None:
        raise CheckpointError(
            f"{where}: holds adapters; set lora as it was, or merge them into its weights: tools/ckpts/adapter.py merge"
        )
    wrong = [
        ConfigChange(config_key(key, args), now[key], saved[key])
        for key in (*_MODEL_KEYS, *_EXPERT_KEYS, *_BLOCK_KEYS)
        if key in saved and key in now and saved[key] != now[key]
    ]
    if wrong:
        also = ""
        if saved.get(_OF_CUT) not in (None, now.get(_OF_CUT)):
            also = ", or make it a checkpoint of one tensor rank, which is for both: tools/ckpts/reshard.py --tp 1"
        changes = describe_changes(wrong, args, f"the model of {where}")
        raise CheckpointError(f"{changes}; change the config or `load`{also}")
