"""Small models: a configuration, whole random weights, and stages of any layout with their part."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.data.batch import Batch, document_starts
from megatron.model import InferenceContext, Stage, build_stage, forward_only, layer_params, materialize
from megatron.model.attention import AttentionBackends, AttentionInputs, choose_backends
from megatron.model.build_specs import attention_spec
from megatron.model.init import stage_parameters
from megatron.mpu import HeadInput, ParallelGroups, build_groups, gather_from_tensor, shard
from megatron.neox_arguments import NeoXArgs
from megatron.training.compile_blocks import compile_blocks
from megatron.training.recompute import recompute_blocks

Weights = dict[int, dict[str, Tensor]]
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
                         "max_position_embeddings": 32, "padded_vocab_size": 64, "pos_emb": "rotary",
                         "precision": "fp32"}  # fmt: skip


def small(**changes: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**SMALL, **changes})


def chosen(args: NeoXArgs, device: str = "cpu") -> AttentionBackends:
    """The attention of a model whose layers all ask for the same."""
    mixers = [attention_spec(args, block) for block in range(args.num_layers)]
    return choose_backends(args, torch.device(device), mixers)[mixers[0].backend]


def random_weights(args: NeoXArgs, seed: int = 0) -> Weights:
    """Every parameter random, biases and norms too, so that none of them can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for layer, specs in layer_params(args).items():
        weights[layer] = {}
        for spec in specs:
            value = torch.randn(spec.shape, generator=generator)
            value = 1 + 0.2 * value if spec.init == "ones" else 0.2 * value
            weights[layer][spec.name] = weights[2].get(spec.name, value) if spec.shared else value
    return weights


@torch.no_grad()
def make_stage(args: NeoXArgs, weights: Weights | None = None, groups: ParallelGroups | None = None) -> Stage:
    """This rank's stage with its part of `weights`, by default random ones, in evaluation mode."""
    weights, groups = weights or random_weights(args), groups or ParallelGroups.single()
    stage, specs = materialize(build_stage(args, groups)), layer_params(args)
    recompute_blocks(stage, args)
    compile_blocks(stage, args)
    for layer, name, param in stage_parameters(stage):
        spec = next(s for s in specs[layer] if s.name == name)
        param.copy_(shard(weights[layer][name], spec, groups.rank("tensor"), groups.size("tensor")))
    return stage.eval()


def full_logits(
    stage: Stage, args: NeoXArgs, groups: ParallelGroups, tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`[batch, seq, padded vocabulary]`, the same on every rank."""

    def read(head: HeadInput, batch: Batch) -> Tensor:
        return gather_from_tensor(head.logits(), groups.group("tensor")).transpose(0, 1)

    batch, shape = Batch(tokens, tokens, torch.ones_like(tokens)), (*tokens.shape, args.padded_vocab_size)
    return forward_only(stage, [batch], args, groups, read, dtype=dtype, shape=lambda batch: shape)[0]


def inputs_of(stage: Stage, batch: Batch, positions: Tensor, block: int = 0) -> AttentionInputs:
    """Returns the inputs that the attention of a block gets in training."""
    return stage.attention_inputs(stage.blocks[block].index, batch, positions, InferenceContext())


def groups_of(args: NeoXArgs, world_size: int) -> ParallelGroups:
    context, cpu = args.context_parallel_size, torch.device("cpu")
    data = world_size // (args.pp * args.tp * context)
    return build_groups(
        pipe=args.pp, data=data, context=context, tensor=args.tp, device=cpu, expert=args.expert_parallel_size,
        ulysses=args.ulysses_size, is_v_pipeline=args.is_v_pipeline,
    )  # fmt: skip


def gradients(stage: Stage) -> dict[tuple[int, str], Tensor]:
    grads = {(layer, name): param.grad for layer, name, param in stage_parameters(stage)}
    assert all(grad is not None for grad in grads.values())
    return {key: grad.clone() for key, grad in grads.items() if grad is not None}


def random_batch(args: NeoXArgs, rows: int = 2, seed: int = 0, seq: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape, vocab = (rows, seq or args.seq_length), args.padded_vocab_size
    tokens = torch.randint(0, vocab, shape, generator=generator)
    labels = torch.randint(0, vocab, shape, generator=generator)
    weights = torch.randint(0, 4, shape, generator=generator).clamp(max=1)
    return Batch(tokens, labels, weights, seed=seed)


def document_batch(args: NeoXArgs, rows: int = 2, seed: int = 0) -> Batch:
    """Rows of one to five documents cut anywhere, whose positions start anywhere."""
    batch, generator = random_batch(args, rows, seed), torch.Generator().manual_seed(seed + 1)
    seq = args.seq_length
    begins = np.zeros((rows, seq), bool)
    positions = torch.empty(rows, seq, dtype=torch.int64)
    for row in range(rows):
        count = int(torch.randint(0, 5, (), generator=generator)) if row else 4
        cuts = sorted((torch.randperm(seq - 1, generator=generator)[:count] + 1).tolist())
        begins[row, [0, *cuts]] = True
        for begin, end in zip([0, *cuts], [*cuts, seq], strict=True):
            room = args.max_position_embeddings - (end - begin) + 1
            offset = int(torch.randint(0, room, (), generator=generator))
            positions[row, begin:end] = torch.arange(offset, offset + end - begin)
    return replace(batch, positions=positions, documents=document_starts(begins))


def documents(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, first, last + 1) of every document."""
    seq, bounds = batch.tokens.shape[1], sorted(set(batch.documents.cu_seqlens.tolist()))
    spans = [(begin // seq, begin % seq, end - begin) for begin, end in pairwise(bounds)]
    return [(row, begin, begin + length) for row, begin, length in spans]
