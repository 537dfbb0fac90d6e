"""Exports Mamba and Mamba 2 models to the format of the package mamba_ssm.

The package's `MambaLMHeadModel.from_pretrained` reads config.json and pytorch_model.bin. The fields of
config.json are those of the package's `MambaConfig`; its `ssm_cfg` holds arguments of the modules `Mamba` and
`Mamba2` (https://github.com/state-spaces/mamba, mamba_ssm/models and mamba_ssm/modules).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.companion_files import companion_files_of, write_companion_files
from megatron.checkpointing.huggingface.exporting import (
    LayerProgress,
    dtypes_to_write,
    new_folder,
    no_progress,
    read_layers,
)
from megatron.checkpointing.huggingface.logit_check import plain_args
from megatron.checkpointing.huggingface.model_files import CONFIG
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.opening import open_checkpoint
from megatron.checkpointing.tensor_files import save_tensors
from megatron.model import block_specs
from megatron.model.build_specs import norm_kind, norm_spec
from megatron.model.specs import Mamba2Spec, MambaSpec
from megatron.model.weight_map import named_params
from megatron.neox_arguments import ModelArgs, NeoXArgs

WEIGHTS = "pytorch_model.bin"
_EPSILON = 1e-5  # of all norms in mamba_ssm; its config.json has no field for it
_TOP = {
    "word_embeddings.weight": "backbone.embedding.weight", "norm.scale": "backbone.norm_f.weight",
    "norm.weight": "backbone.norm_f.weight", "norm.bias": "backbone.norm_f.bias",
    "final_linear.weight": "lm_head.weight",
}  # fmt: skip


def mamba_ssm_config(args: ModelArgs, vocab_size: int) -> dict[str, Any]:
    """Returns the config.json that the package mamba_ssm reads, for a NeoX model.

    vocab_size: number of embedding rows to keep. Raises CheckpointError that names all settings the package
        cannot express."""
    mixers = [block.mixer for block in block_specs(args)]
    kinds = sorted(set(args.attention_config))
    mixer = mixers[0]
    norm = norm_spec(args)
    wrong = [
        text
        for text, applies in (
            (f"blocks {', '.join(kinds)} (attention_config)", kinds not in (["mamba"], ["mamba2"])),
            (f"norm {norm.kind}", norm_kind(args) not in ("rmsnorm", "layernorm")),
            ("norms without biases (use_bias_in_norms)", norm.kind == "layernorm" and not norm.bias),
            ("zero-centered norm weights (zero_centered_gamma)", norm.zero_centered),
            (f"epsilon {norm.eps} of norms, which must be {_EPSILON}", not math.isclose(norm.eps, _EPSILON)),
            (f"positions {args.pos_emb} (pos_emb)", args.pos_emb in ("learned", "sinusoidal")),
            ("a score instead of logits (score_head)", bool(args.score_head)),
            (f"embedding_multiplier {args.embedding_multiplier}", args.embedding_multiplier != 1.0),
            (f"residual_multiplier {args.residual_multiplier}", args.residual_multiplier != 1.0),
            (f"logit_scale {args.logit_scale}", args.logit_scale != 1.0),
            (f"final_logit_softcapping {args.final_logit_softcapping}", args.final_logit_softcapping is not None),
            *_wrong_in(mixer),
        )
        if applies
    ]
    if wrong:
        raise CheckpointError(f"the package mamba_ssm cannot express parts of this model: {', '.join(wrong)}")
    multiple = args.make_vocab_size_divisible_by
    return {
        "d_model": args.hidden_size,
        "n_layer": args.num_layers,
        "vocab_size": vocab_size,
        "ssm_cfg": _ssm_config(mixer),
        "rms_norm": norm.kind == "rmsnorm",
        "residual_in_fp32": False,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": multiple if vocab_size % multiple == 0 else 1,  # 1: the package adds no rows
        "tie_embeddings": not args.no_weight_tying,
    }


def _wrong_in(mixer: Any) -> Iterator[tuple[str, bool]]:
    if isinstance(mixer, MambaSpec):
        yield "biases of x_proj (mamba_use_bias_in_linears)", mixer.bias
        yield "norms of B, C and time steps (mamba_bcdt_norm_epsilon)", mixer.norm_eps is not None
    if isinstance(mixer, Mamba2Spec):
        inner = (
            f"{mixer.heads} heads of {mixer.head_dim} channels, together no multiple of hidden_size {mixer.hidden} "
            "(mamba_num_heads)"
        )
        yield inner, mixer.inner % mixer.hidden != 0


def _ssm_config(mixer: Any) -> dict[str, Any]:
    """Returns the field `ssm_cfg` of mamba_ssm's config.json. mixer: spec of the Mamba or Mamba 2 mixer."""
    common = {"d_state": mixer.state, "d_conv": mixer.conv_kernel, "expand": mixer.inner // mixer.hidden}
    common |= {"conv_bias": mixer.conv_bias, "bias": mixer.bias}
    if isinstance(mixer, MambaSpec):  # without `layer`, which the package's first versions lack
        return {**common, "dt_rank": mixer.dt_rank}
    limit = {} if mixer.time_step_limit == (0.0, math.inf) else {"dt_limit": list(mixer.time_step_limit)}
    heads = {"headdim": mixer.head_dim, "ngroups": mixer.groups, "chunk_size": mixer.chunk}
    return {"layer": "Mamba2", **common, **heads, **limit}


def mamba_ssm_name(layer: int, name: str, layers: int) -> str:
    """Returns the name of a NeoX parameter in the package mamba_ssm.

    layer: NeoX index. name: the parameter's name within the layer. layers: number of blocks."""
    if not 2 <= layer < layers + 2:
        return _TOP[name]
    return f"backbone.layers.{layer - 2}.{'norm.weight' if name == 'norm.scale' else name}"


def export_mamba_ssm(
    source: str | Path,
    args: NeoXArgs,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: bool = True,
    progress: LayerProgress = no_progress,
) -> Path:
    """Write checkpoint `source` as a folder for the package mamba_ssm; returns the folder `output`.

    args: the checkpoint's configuration, from `load_checkpoint_args`. dtype: of all weights; None: those of
        the checkpoint. tokenizer: also write the tokenizer's files. progress: wraps the iteration over
        layers, for a progress bar. All weights are in memory at once. A folder of an earlier conversion is
        replaced. Raises CheckpointError."""
    source, output = Path(source), Path(output).resolve()
    if args.lora is not None:
        raise CheckpointError(
            f"{source}: holds LoRA adapters and base weights; merge them first (tools/ckpts/adapter.py merge)"
        )
    opened, args = open_checkpoint(source), plain_args(args)
    dtype, wide = dtypes_to_write(source, dtype)
    extras = companion_files_of(
        source, args, tokenizer=tokenizer, vocab_is_hf=False, pad_token_id=None, scores=bool(args.score_head)
    )
    rows = args.padded_vocab_size
    assert rows is not None
    vocab = max(extras.vocab_size or rows, extras.tokens or 0)
    if vocab > rows:
        raise CheckpointError(f"{source}: its tokenizer has {extras.tokens} tokens, but its embedding only {rows} rows")
    config, specs = mamba_ssm_config(args, vocab), named_params(args)
    with new_folder(output, weight_bytes((spec.shape for spec in specs.values()), dtype)) as temporary:
        state: dict[str, Tensor] = {}
        order = sorted({layer for layer, _ in specs})
        for layer, tensors in read_layers(opened, args, progress(order, len(order)), dtype, wide):
            for name, value in tensors.items():
                trimmed = value[:vocab] if name in ("word_embeddings.weight", "final_linear.weight") else value
                state[mamba_ssm_name(layer, name, args.num_layers)] = trimmed.clone(
                    memory_format=torch.contiguous_format
                )
        if not args.no_weight_tying:
            state["lm_head.weight"] = state[
                "backbone.embedding.weight"
            ]  # the package needs both names; the file stores the tensor once
        save_tensors(state, temporary / WEIGHTS)
        files = {**extras.files, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
        write_companion_files(files, temporary)
    return output
