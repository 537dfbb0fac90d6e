"""Converts LLaMA and Mistral between HuggingFace's format and Meta's (params.json and consolidated.NN.pth).

Names and sharded dimensions are those of Meta's model.py. Meta orders the rows of q and k in pairs (2i, 2i +
1). HuggingFace orders them in halves (i, i + head_dim / 2), as transformers' convert_llama_weights_to_hf.py
shows.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.config_fields import rope_of
from megatron.checkpointing.families.family import gives_score
from megatron.checkpointing.huggingface.exporting import check_space
from megatron.checkpointing.huggingface.folder import HFFolder, load_named
from megatron.checkpointing.huggingface.model_files import CONFIG, read_json
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.tensor_files import save_tensors, write_bytes
from megatron.data.files import sync

PARAMS, TOKENIZER = "params.json", "tokenizer.model"
# Meta's name -> HuggingFace's name, and the dimension sharded over the files (None: full in every file).
_TOP: dict[str, tuple[str, int | None]] = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 1),  # since LLaMA 3: dimension 0
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
_BLOCK: dict[str, tuple[str, int | None]] = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
_UNUSED = re.compile(r"(layers\.\d+\.attention\.inner_attention\.)?rope\.freqs")  # computed from rope_theta
_SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # LLaMA 3.1, 3.2
_LLAMA3_ROWS, _LLAMA3_IDS = 128256, {"bos_token_id": 128000, "eos_token_id": 128001}


@dataclass(frozen=True)
class _Tensor:
    """A tensor in Meta's files.

    meta: its name in these files. shard_dim: the dimension sharded over the files; None: full in every file.
        heads: number of heads, for q and k, whose rows Meta orders differently; 0 for other tensors.
    """

    meta: str
    shard_dim: int | None
    heads: int = 0


def _table(layers: int, heads: int, kv_heads: int) -> dict[str, _Tensor]:
    """Returns all tensors of a LLaMA in Meta's files, by HuggingFace's names. layers: number of blocks."""
    table = {hf_name: _Tensor(meta, shard_dim) for meta, (hf_name, shard_dim) in _TOP.items()}
    turned = {"attention.wq": heads, "attention.wk": kv_heads}
    for layer in range(layers):
        for meta, (hf_name, shard_dim) in _BLOCK.items():
            name = f"layers.{layer}.{meta}.weight"
            table[f"model.layers.{layer}.{hf_name}.weight"] = _Tensor(name, shard_dim, turned.get(meta, 0))
    return table


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows of q or k, `[heads * head_dim, hidden]`, from Meta's order to HuggingFace's."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def to_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorders rows of q or k, `[heads * head_dim, hidden]`, from HuggingFace's order to Meta's."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


class RawLlama(HFFolder):
    """A folder in Meta's format, read like a HuggingFace folder: with the same names, row order and config.

    Shards are joined and rows reordered when a tensor is read.

    raw: Meta's folder. side_folder: an empty folder; config.json and the tokenizer are written there, for
        code that reads these files. model_type: llama or mistral. positions: the value of
        `max_position_embeddings`, which Meta's files lack. Raises CheckpointError for missing or damaged
        files.
    """

    is_transformers_format = False
    mtp_layers = 0

    def __init__(self, raw: Path, side_folder: Path, model_type: str, positions: int) -> None:
        self.path, self.raw, self.origin = side_folder, raw, str(raw)
        params = read_json(raw / PARAMS)
        files = sorted(raw.glob("consolidated.*.pth"))
        expected = [f"consolidated.{i:02d}.pth" for i in range(max(len(files), 1))]
        if [file.name for file in files] != expected:
            raise CheckpointError(f"{raw}: holds {', '.join(f.name for f in files) or 'no consolidated.NN.pth'}; "
                                  f"expected {', '.join(expected)}")  # fmt: skip
        self._parts: list[Mapping[str, Tensor]] = [load_named(file) for file in files]
        try:
            layers, heads, dim = (int(params[key]) for key in ("n_layers", "n_heads", "dim"))
            kv_heads = int(params.get("n_kv_heads") or heads)
            self._table = _table(layers, heads, kv_heads)
            self._check_names(params)
            self.config = _config(params, model_type, positions, self._shape("model.layers.0.mlp.gate_proj.weight")[0],
                                  self._shape("lm_head.weight")[0])  # fmt: skip
        except (KeyError, TypeError, ValueError) as problem:
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(
                f"{raw / PARAMS}: cannot be used ({type(problem).__name__}: {problem}); is it Meta's file?"
            ) from problem
        if self._parts[0]["tok_embeddings.weight"].shape[1] == dim:  # sharded along dimension 0, or a single file
            name = "model.embed_tokens.weight"
            self._table[name] = _Tensor("tok_embeddings.weight", 0)
        self.shapes = {name: self._shape(name) for name in self._table}
        self._check_sizes(dim, heads, kv_heads)
        (side_folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        for place in (raw, raw.parent):
            if (place / TOKENIZER).is_file():
                shutil.copyfile(place / TOKENIZER, side_folder / TOKENIZER)
                break

    def _check_names(self, params: Mapping[str, Any]) -> None:
        names = {tensor.meta for tensor in self._table.values()}
        for i, part in enumerate(self._parts):
            stored_names = {name for name in part if not _UNUSED.fullmatch(name)}
            if stored_names != names:
                lacks, extra = sorted(names - stored_names), sorted(stored_names - names)
                problems = [f"lacks tensor {lacks[0]}"] if lacks else []
                problems += [f"holds unknown tensor {extra[0]}"] if extra else []
                raise CheckpointError(f"{self.raw / f'consolidated.{i:02d}.pth'}: {' and '.join(problems)}")

    def _check_sizes(self, dim: int, heads: int, kv_heads: int) -> None:
        """Raise CheckpointError if joined shapes do not fit params.json, as when a file is missing."""
        head = self.config.get("head_dim") or dim // heads
        rows, inner = self.config["vocab_size"], self.config["intermediate_size"]
        expected = {
            "embed_tokens": (rows, dim), "lm_head": (rows, dim), "q_proj": (heads * head, dim),
            "k_proj": (kv_heads * head, dim), "v_proj": (kv_heads * head, dim), "o_proj": (dim, heads * head),
            "gate_proj": (inner, dim), "up_proj": (inner, dim), "down_proj": (dim, inner),
        }  # fmt: skip
        for name, shape in self.shapes.items():
            right = expected.get(name.split(".")[-2], (dim,))
            if shape != right:
                raise CheckpointError(
                    f"{self.raw}: {self._table[name].meta} has shape {shape} over {len(self._parts)} files, but "
                    f"{PARAMS} implies {right}; is a consolidated.NN.pth missing?"
                )

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._table[name]
        shape = list(self._parts[0][tensor.meta].shape)
        if tensor.shard_dim is not None:
            shape[tensor.shard_dim] = sum(part[tensor.meta].shape[tensor.shard_dim] for part in self._parts)
        return tuple(shape)

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        return {name: self._parts[0][tensor.meta].dtype for name, tensor in self._table.items()}

    def get(self, name: str) -> Tensor:
        tensor = self._table[name]
        parts = [part[tensor.meta] for part in self._parts]
        weight = parts[0] if tensor.shard_dim is None or len(parts) == 1 else torch.cat(parts, dim=tensor.shard_dim)
        return to_halves(weight, tensor.heads) if tensor.heads else weight


def _config(params: Mapping[str, Any], model_type: str, positions: int, inner: int, rows: int) -> dict[str, Any]:
    """Converts the content of params.json to the content of config.json.

    inner, rows: width of the MLP and size of the vocabulary, which params.json does not always give."""
    if params.get("moe") or params.get("vision_chunk_size", -1) > 0:
        raise CheckpointError(
            f"{PARAMS}: mixtures of experts and image models are not supported; convert the HuggingFace version instead"
        )
    scaled = {"rope_type": "llama3", "factor": float(params.get("rope_scaling_factor") or 8.0), **_SCALED}
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}[model_type]],
        "model_type": model_type, "hidden_size": params["dim"], "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"], "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "intermediate_size": inner, "vocab_size": rows, "rms_norm_eps": params.get("norm_eps", 1e-5),
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": positions,
        "rope_theta": float(params.get("rope_theta") or 10000.0),
        "rope_scaling": scaled if params.get("use_scaled_rope") else None,
        **(_LLAMA3_IDS if rows == _LLAMA3_ROWS else {}),
    }  # fmt: skip
    if params.get("head_dim"):
        config["head_dim"] = params["head_dim"]
    if model_type == "mistral":
        config["sliding_window"] = params.get("sliding_window")
    return config


def _params(folder: HFFolder) -> dict[str, Any]:
    """Converts a HuggingFace model's config.json to the content of Meta's params.json.

    Raises CheckpointError that names the settings that Meta's format cannot express."""
    config = folder.config
    rope = rope_of(config, theta=10000.0)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "factor") and value is not None}
    scaled = scaling == {"rope_type": "llama3", **_SCALED}
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    head = config.get("head_dim") or dim // heads
    mistral = config.get("model_type") == "mistral"
    wrong = [
        text
        for text, applies in (
            (f"model_type {config.get('model_type')}", config.get("model_type") not in ("llama", "mistral")),
            (f"rotary scaling {rope['rope_type']}", not scaled and scaling != {"rope_type": "default"}),
            ("a score instead of logits", gives_score(config)),
            ("tied embeddings", config.get("tie_word_embeddings", False)),
            (f"activation {config.get('hidden_act')}", config.get("hidden_act", "silu") != "silu"),
            (f"head_dim {head}", head * heads != dim and not mistral),
        )
        if applies
    ]
    if wrong:
        raise CheckpointError(f"{folder.origin}: Meta's format cannot express parts of this model: {', '.join(wrong)}")
    params = {
        "dim": dim, "n_layers": config["num_hidden_layers"], "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads, "vocab_size": folder.vocab_size,
        "hidden_dim": config["intermediate_size"], "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope["rope_theta"],
    }  # fmt: skip
    if mistral:
        params |= {"head_dim": head, "sliding_window": config.get("sliding_window")}
    if scaled:
        params |= {"use_scaled_rope": True, "rope_scaling_factor": rope["factor"]}
    return params


def write_raw(folder: HFFolder, output: str | Path, shards: int = 1) -> Path:
    """Write a HuggingFace LLaMA or Mistral in Meta's format: `output`/params.json and consolidated.NN.pth.

    shards: number of consolidated.NN.pth files, one per tensor-parallel rank that will read them. One file's
        tensors are in memory at a time. The folder appears when it is complete. Raises CheckpointError."""
    output, params = Path(output).resolve(), _params(folder)
    table = _table(params["n_layers"], params["n_heads"], params["n_kv_heads"])
    strange = sorted(table.keys() ^ folder.shapes.keys())
    if strange:
        verb = "holds" if strange[0] in folder.shapes else "lacks"
        raise CheckpointError(
            f"{folder.origin}: {verb} tensor {strange[0]}; Meta's format has exactly the tensors of a LLaMA"
        )
    dtypes = set(folder.dtypes.values())
    dtype = dtypes.pop()
    if dtypes or dtype is None:
        raise CheckpointError(f"{folder.origin}: its weights have several or unknown dtypes; convert all to one first")
    sizes = {
        name: folder.shapes[name][tensor.shard_dim] for name, tensor in table.items() if tensor.shard_dim is not None
    }
    sizes |= {"num_attention_heads": params["n_heads"], "num_key_value_heads": params["n_kv_heads"]}
    uneven = [f"{name} ({size})" for name, size in sizes.items() if shards < 1 or size % shards]
    if uneven:
        raise CheckpointError(
            f"{folder.origin}: {uneven[0]} cannot be split evenly over {shards} files; choose another number of files"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: already exists; remove it, or choose another folder")
    temporary = output.with_name(f".tmp_{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output.parent, weight_bytes(folder.shapes.values(), dtype))
        shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted call
        temporary.mkdir()
        for rank in range(shards):
            state = {tensor.meta: _shard(folder.get(name), tensor, rank, shards) for name, tensor in table.items()}
            save_tensors(state, temporary / f"consolidated.{rank:02d}.pth")
        write_bytes((json.dumps(params, indent=2) + "\n").encode(), temporary / PARAMS)
        if (folder.path / TOKENIZER).is_file():
            write_bytes((folder.path / TOKENIZER).read_bytes(), temporary / TOKENIZER)
        sync(temporary)
        os.rename(temporary, output)  # this also replaces an empty folder
        sync(output.parent)
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _shard(weight: Tensor, tensor: _Tensor, rank: int, shards: int) -> Tensor:
    turned = to_pairs(weight, tensor.heads) if tensor.heads else weight
    part = turned if tensor.shard_dim is None else turned.chunk(shards, dim=tensor.shard_dim)[rank]
    return part.clone(memory_format=torch.contiguous_format)  # torch.save would write the full storage of a view
