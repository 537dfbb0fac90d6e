"""Converts a dense checkpoint to one with experts: each expert is a copy of the dense feed-forward layer.

This is sparse upcycling (arXiv 2212.05055). One layer is in memory at a time.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing import layout
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface.exporting import LayerProgress, check_space, no_progress
from megatron.checkpointing.huggingface.weight_writer import weight_bytes
from megatron.checkpointing.manifest import ParallelLayout, model_keys, untrained_manifest
from megatron.checkpointing.opening import open_checkpoint
from megatron.checkpointing.publish import new_checkpoint, publish
from megatron.checkpointing.resharding import PRECISIONS, check_sizes, copy_folders, only_dtype, write_bare_files
from megatron.checkpointing.tensor_files import FileRecord
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.checkpointing.weights import load_weights, save_layer
from megatron.model.init import initial_weight
from megatron.model.weight_map import layer_params
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.keys.architectures import MoEKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.model_args import FULL_BLOCKS
from megatron.neox_arguments.reading.files import parse_overrides, read_files

EXPERTS_FILE = "experts.yml"
"""The file in `configs/` of the new checkpoint that holds the keys added to the dense model's keys."""


def read_expert_keys(files: Sequence[str | Path], settings: Sequence[str] = ()) -> dict[str, tuple[Any, str]]:
    """Reads keys of experts from YAML files and `KEY=VALUE` settings; returns {key: (value, origin)}.

    An origin is a file and line, or `--set`. Raises ConfigError, also if a key is not about experts."""
    config = read_files(files)
    for path, value, origin in parse_overrides(settings, "--set"):
        config.assign(path, value, origin)
    problems = ErrorCollector(config.origins)
    problems.lines += config.problems
    for key in config.values:
        if key not in keys_of(MoEKeys):
            problems.add(
                key, "is not a key of experts; leave it out: the dense model keeps its keys, and a run sets all others"
            )
    problems.raise_if_any()
    if config.values.get("moe_num_experts") in (None, 1):
        problems.add("moe_num_experts", "is unset or 1; set the number of experts, such as moe_num_experts: 8")
    problems.raise_if_any()
    return {key: (value, problems.origin(key) or "") for key, value in config.values.items()}


def upcycled_args(
    dense: NeoXArgs, keys: Mapping[str, tuple[Any, str]], tensor: int = 1, seed: int | None = None
) -> NeoXArgs:
    """Returns the configuration `dense` with experts added.

    keys: from `read_expert_keys`. tensor: the tensor-parallel size. seed: for the routers' initial values;
        None: that of `dense`. Raises ConfigError if the result is invalid, or if the new model's first loss
        would differ from the dense model's."""
    if dense.moe_num_experts > 1:
        raise dense.error("moe_num_experts", "the model has experts already, but upcycling needs a dense model")
    if dense.lora is not None:
        raise dense.error("lora", "the checkpoint has LoRA adapters; merge them first (tools/ckpts/adapter.py merge)")
    if set(dense.attention_config) - set(FULL_BLOCKS):
        text = "upcycling needs blocks global or flash (attention and a feed-forward), but this model has others"
        raise dense.error("attention_config", text)
    state = json.loads(dense.to_json())
    added = {**keys, "model_parallel_size": (tensor, "--tp"), "pipe_parallel_size": (1, "program")}
    added |= {} if seed is None else {"seed": (seed, "--seed")}
    state["given"] |= {key: value for key, (value, _) in added.items()}
    state["origins"] |= {key: origin for key, (_, origin) in added.items()}
    args = NeoXArgs.from_json(json.dumps({**state, "world_size": None}))
    problems = ErrorCollector(args.origins)
    _check_first_loss(args, problems)
    problems.raise_if_any()
    return args


def _check_first_loss(args: ModelArgs, problems: ErrorCollector) -> None:
    """Add a line to `problems` for each setting with which the output would differ from the dense model's.

    Equal experts give the dense output if a token's scores add up to 1 and no token is dropped."""
    experts = args.moe_num_experts
    if args.moe_top_k == 1:
        text = (
            "with 1, either the output is scaled by a score below 1, or normalised scores are always 1 and the "
            "router cannot learn"
        )
        problems.add("moe_top_k", f"{text}; set 2 or more")
    elif not args.norm_topk_prob and (args.router_scores != "softmax" or args.moe_top_k < experts):
        text = "a token's expert scores would not add up to 1, so the output would differ from the dense model's"
        problems.add("norm_topk_prob", f"{text}; set norm_topk_prob: true")
    if args.moe_router_topk_scaling_factor != 1.0:
        text = f"{args.moe_router_topk_scaling_factor} would scale the dense model's output; leave it out"
        problems.add("moe_router_topk_scaling_factor", text)
    sizes = as_tuple(args.ffn_size)
    widths = {sizes[block % len(sizes)] for block in range(args.num_layers) if args.has_experts(block)}
    if len(widths) > 1:
        text = (
            f"the chosen blocks have MLPs of several widths ({', '.join(map(str, sorted(widths)))}), experts have one"
        )
        problems.add("moe_layer_freq", f"{text}; choose blocks of one width")
    elif widths != {args.expert_ffn_size}:
        (width,) = widths
        text = f"experts would have width {args.expert_ffn_size}, but the dense feed-forward has {width}"
        problems.add("moe_intermediate_size", f"{text}; set moe_intermediate_size: {width}")
    if args.moe_shared_expert_intermediate_size is not None:
        text = "a shared expert would add to the dense model's output; leave it out"
        problems.add("moe_shared_expert_intermediate_size", text)
    if args.moe_latent_size is not None:
        text = "experts would read a projection of a token's hidden state, the dense MLP reads all of it; leave it out"
        problems.add("moe_latent_size", text)
    factor = args.moe_expert_capacity_factor
    if factor is not None and factor < experts / args.moe_top_k:  # with less an expert may have no room for all tokens
        text = f"experts could be full and drop tokens; leave the key out, or set {experts / args.moe_top_k:g}"
        problems.add("moe_expert_capacity_factor", f"{text} or more for the first steps")
    if args.use_bias_in_mlp and not args.moe_expert_bias:
        problems.add("moe_expert_bias", "the dense feed-forward has biases; set moe_expert_bias: true")


def upcycle(
    source: str | Path, save: str | Path, dense: ModelArgs, args: NeoXArgs, progress: LayerProgress = no_progress
) -> Path:
    """Writes a dense checkpoint as one with experts to `<save>/global_step0`; returns this folder.

    source: the dense checkpoint. dense: its configuration. args: the configuration of the result, from
        `upcycled_args`.

    Each expert is an exact copy of the dense feed-forward. Routers have the initial values of `args.seed`;
    biases that the source lacks are 0. Other weights, tokenizer and configurations are copied; optimizer
    state is not. `latest` is set to the result, which a run of any layout loads with `finetune: true`. One
    layer is in memory at a time. The result appears only when it is complete. Raises CheckpointError."""
    source, save = Path(source), Path(save)
    if layout.list_checkpoints(save):
        raise CheckpointError(f"{save}: holds checkpoints already; choose another folder")
    opened, dtype = open_checkpoint(source), only_dtype(source, describe_checkpoint(source).dtypes)
    specs = layer_params(args)
    check_sizes(specs, args.tp)
    size = weight_bytes((spec.shape for layer in specs.values() for spec in layer), dtype)
    with new_checkpoint(save, 0, size, check_space) as temporary:
        records: list[FileRecord] = []
        for layer in progress(sorted(specs), len(specs)):
            tensors = load_weights(opened, dense, layers=[layer], tensor_rank=0, tensor_size=1)[layer]
            records += save_layer(temporary, layer, _with_experts(tensors, layer, specs[layer], args, dtype), args)
            del tensors
        records += write_bare_files(temporary, args, 0)
        records += copy_folders(source, temporary)
        config = args.public_values
        tokenizer = opened.manifest.tokenizer if opened.manifest is not None else None
        manifest = untrained_manifest(
            f"experts of {source.resolve()}", ParallelLayout.from_args(args, PRECISIONS[dtype]), model_keys(args),
            config, records, seed=args.seed, tokenizer=tokenizer,
        )  # fmt: skip
        added = {key: config[key] for key in config if key in keys_of(MoEKeys)}
        text = f"# what was added to the model of {source}\n{yaml.safe_dump(added, sort_keys=False)}"
        return publish(temporary, save, 0, manifest, {EXPERTS_FILE: text})


def _with_experts(
    dense: Mapping[str, Tensor], layer: int, specs: Sequence[ParamSpec], args: NeoXArgs, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the new layer's full tensors by name: dense tensors, copies for experts, initial values for new
    ones.

    dense: the dense layer's tensors. layer: its NeoX index. specs: parameters of the new layer."""
    available = {**dense, **_copies(dense, args)} if any(spec.experts for spec in specs) else dict(dense)
    return {
        spec.name: available[spec.name]
        if spec.name in available
        else initial_weight(spec, layer, args).to(dtype if spec.trained else torch.float32)
        for spec in specs
    }


def _copies(dense: Mapping[str, Tensor], args: ModelArgs) -> dict[str, Tensor]:
    """Returns the experts' tensors by name, each the dense feed-forward's repeated for every expert.

    dense: the dense layer's tensors; rows of a gated linear1 are [up; gate]."""
    expert_tensors: dict[str, Tensor] = {}
    names = ("w3", "w1") if args.is_gated else ("w1",)
    for kind, name_format in (("weight", "{}"), ("bias", "{}_bias")):
        if (linear1 := dense.get(f"mlp.linear1.{kind}")) is None:
            continue
        parts = dict(zip(names, linear1.chunk(len(names)), strict=True))
        linear2 = dense[f"mlp.linear2.{kind}"]
        parts["w2"] = linear2.t() if kind == "weight" else linear2.unsqueeze(0)
        for name, value in parts.items():
            copies = (args.moe_num_experts, *([1] * (value.dim() - 1)))
            expert_tensors[f"mlp.experts.mlp.{name_format.format(name)}"] = value.repeat(copies)
    return expert_tensors
