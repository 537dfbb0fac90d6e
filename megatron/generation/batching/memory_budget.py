"""Computes from free memory how many tokens a forward pass may have, and how many blocks the KV cache
gets."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.distributed import run_on_all_ranks
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.model import Model, block_specs
from megatron.model.mamba.selective_scan import AT_A_TIME
from megatron.model.specs import (
    AttentionSpec,
    DenseSpec,
    FeedForwardSpec,
    GatedDeltaNetSpec,
    KimiDeltaAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
)
from megatron.mpu import ParallelGroups
from megatron.mpu.memory import free_host_memory

# Most tokens of a forward pass: more do not make it faster.
_TOKENS = {"cpu": 1024, "cuda": 32768}
# Shares of free memory to use. File caches and other processes need the rest of host memory.
_FORWARD_SHARE = {"cpu": 0.25, "cuda": 0.5}
_CACHE_SHARE = {"cpu": 0.25, "cuda": 0.8}
_SCORES_AT_ONCE = 3  # copies of the attention scores that exist at once in kernels that write them out
# fp32 copies that exist at once in a Mamba scan: of the states, and of the decays between a chunk's tokens
_STATES_AT_ONCE, _DECAYS_AT_ONCE = 8, 6


@dataclass(frozen=True)
class ForwardBudget:
    """The limits of one forward pass on this rank.

    bytes: most bytes for activations and logits.
    tokens: most tokens, padding included.
    rows: most rows, in place of the limits on bytes and tokens; None: no such limit.
    token_bytes: bytes per token.
    key_bytes: bytes per pair of query and key, counted only for rows with branches, which need a mask.
    logits_bytes: bytes per token whose logits are read.
    """

    bytes: int
    tokens: int
    rows: int | None
    token_bytes: int
    key_bytes: int
    logits_bytes: int

    def allows(self, rows: int, width: int, num_logits: int, branched: bool) -> bool:
        """Returns whether a forward pass may have `rows` rows of `width` tokens, with logits of `num_logits`
        tokens.

        branched: whether rows hold branches (tree attention).
        """
        if self.rows is not None:
            return rows <= self.rows
        keys = width * self.key_bytes if branched else 0
        required_bytes = rows * width * (self.token_bytes + keys) + num_logits * self.logits_bytes
        return required_bytes <= self.bytes and rows * width <= self.tokens


def forward_budget(model: Model, batch_size: int | None = None) -> ForwardBudget:
    """Returns the limits of a forward pass, computed from the free memory of the rank that has the least.

    All ranks call this function together.

    batch_size: a fixed number of rows, in place of limits by memory; None: limits by memory, which are
        logged.
    """
    args, groups = model.args, model.groups
    tensor, size, device = groups.size("tensor"), model.dtype.itemsize, groups.device
    assert args.padded_vocab_size is not None
    blocks = block_specs(args)
    mixers = [block.mixer for block in blocks if isinstance(block.mixer, AttentionSpec)]
    widths = [_inner_width(block.feed_forward) for block in blocks]
    heads = max((mixer.heads for mixer in mixers), default=0) // tensor
    mixed, scanned = (max(sizes) for sizes in zip(*(_mixer_sizes(block.mixer) for block in blocks), strict=True))
    inner = (3 * max(widths) + mixed) // tensor
    values = 2 * (8 * args.hidden_size + inner)  # of a block, doubled for buffers of its kernels
    scores = (_SCORES_AT_ONCE if any(mixer.biased for mixer in mixers) or device.type == "cpu" else 1) * heads * 4
    share = _share_of_free_memory(groups, _FORWARD_SHARE)
    least_memory = min(run_on_all_ranks(groups, lambda: share))
    # Mamba's scan holds the states of AT_A_TIME tokens, however many tokens there are
    scanned_states = [spec.inner * spec.state for block in blocks if isinstance(spec := block.mixer, MambaSpec)]
    held = 4 * _STATES_AT_ONCE * AT_A_TIME * max(scanned_states, default=0) // tensor
    budget = ForwardBudget(
        bytes=max(least_memory - held, least_memory // 2), tokens=_TOKENS[device.type], rows=batch_size,
        token_bytes=values * size + scanned // tensor, key_bytes=scores,
        logits_bytes=args.padded_vocab_size // tensor * (size + 4),
    )  # fmt: skip
    if batch_size is None:
        logging.getLogger("megatron").info(
            f"eval_batch_size: auto chose up to {budget.tokens} tokens per forward pass, in {budget.bytes / 1e9:.1f} GB"
        )
    return budget


def _mixer_sizes(mixer: MixerSpec | None) -> tuple[int, int]:
    """Returns the memory that a mixer needs per token: (number of values, further bytes
    for a scan in chunks)."""
    match mixer:
        case AttentionSpec():
            # Queries, keys, values and output. Latent attention over a cache has queries as wide as latents.
            return 4 * mixer.heads * max(mixer.head_dim, mixer.cached.head_dim), 0
        case MambaSpec():
            return 6 * mixer.inner, 0  # its states are `held`
        case Mamba2Spec():
            states = mixer.inner * mixer.state // mixer.chunk  # one for each chunk
            decays = mixer.heads * mixer.chunk
            return 6 * (mixer.inner + mixer.groups * mixer.state), 4 * (
                _STATES_AT_ONCE * states + _DECAYS_AT_ONCE * decays
            )
        case ShortConvSpec():
            return 6 * mixer.hidden, 0
        case GatedDeltaNetSpec():
            states = mixer.heads * mixer.key_dim * mixer.value_dim // mixer.chunk  # one for each chunk
            pairs = mixer.heads * mixer.chunk
            widths = 4 * mixer.keys + 4 * mixer.values
            # fp32 copies of queries, keys and values, of the solved system, and matrices of pairs of tokens
            rows = mixer.heads * (4 * mixer.key_dim + 4 * mixer.value_dim)
            if isinstance(mixer, KimiDeltaAttentionSpec):  # decays of rows of pairs, also in fp64, for each dimension
                rows += 6 * mixer.keys
            return widths, 4 * (rows + _STATES_AT_ONCE * states + _DECAYS_AT_ONCE * pairs)
    return 0, 0


def _inner_width(feed_forward: FeedForwardSpec | None) -> int:
    """Returns the width of a dense gated feed-forward layer whose activations need as much memory as
    `feed_forward`.

    A mixture of experts counts `top_k` experts, their inputs and outputs, and the shared expert.
    """
    if feed_forward is None:
        return 0
    if isinstance(feed_forward, DenseSpec):
        return feed_forward.width
    shared = feed_forward.shared.width if feed_forward.shared is not None else 0
    # Each chosen expert has its own copy of the inputs and outputs.
    return feed_forward.router.top_k * (feed_forward.expert.width + feed_forward.expert.hidden) + shared


def cache_blocks(
    model: Model,
    max_blocks: int,
    texts: int = 0,
    cache_gb: float | None = None,
    log: Callable[[str], None] | None = None,
) -> int:
    """Returns how many blocks the KV cache gets: as many as fit in memory, at most `max_blocks`.

    The rank with the least memory decides. All ranks of the model call this function together. Raises
    ConfigError if the Mamba states do not fit, or not even one block.

    texts: number of texts whose Mamba states must fit too.
    cache_gb: GB for keys, values and states on this rank; None: `kv_cache_gb` of the configuration.
    log: called with a line of text if `kv_cache_gb` is auto.
    """
    args, groups, device = model.args, model.groups, model.groups.device
    block_bytes, state_bytes = model.stage.cache_bytes * BLOCK_SIZE, texts * model.stage.state_bytes
    auto = cache_gb is None and args.kv_cache_gb == "auto"
    if auto:
        available = _share_of_free_memory(groups, _CACHE_SHARE)
    else:
        available = int(float(args.kv_cache_gb if cache_gb is None else cache_gb) * 1e9)
    left = available - state_bytes
    room = min(left // block_bytes, max_blocks) if block_bytes else max_blocks if left >= 0 else -1
    num_blocks = torch.tensor([room], device=device)
    for axis in ("context", "tensor", "pipe", *(("data",) if model.lockstep else ())):
        if groups.group(axis) is not None:
            dist.all_reduce(num_blocks, dist.ReduceOp.MIN, group=groups.group(axis))
    blocks = int(num_blocks)
    if blocks < 0:
        states_text = f"the Mamba states of {texts} texts at once, which need {state_bytes / 1e9:.3g} GB on this rank"
        raise args.error(
            "kv_cache_gb", f"{available / 1e9:.3g} GB cannot hold {states_text}; set it higher (or, in a "
            "server, serve_max_rows lower)"
        )  # fmt: skip
    if blocks < min(max_blocks, 1):
        states_suffix = f" beside {state_bytes / 1e9:.3g} GB of Mamba states of {texts} texts" if texts else ""
        raise args.error(
            "kv_cache_gb",
            f"{available / 1e9:.3g} GB cannot hold even {BLOCK_SIZE} tokens{states_suffix}; set it higher",
        )
    if auto and log is not None:
        held = [f"{blocks * BLOCK_SIZE} tokens"] * (max_blocks > 0) + [f"the states of {texts} texts"] * (texts > 0)
        log(f"kv_cache_gb: auto chose {(blocks * block_bytes + state_bytes) / 1e9:.3g}, for {' and '.join(held)}")
    return blocks


def _share_of_free_memory(groups: ParallelGroups, shares: Mapping[str, float]) -> int:
    """Returns how many bytes this rank may use: a share of the free memory of its GPU, or its part of free
    host memory.

    shares: the share of free memory to use, 0 to 1, by device type ("cpu", "cuda").
    """
    device = groups.device
    if device.type != "cuda":
        return int(shares[device.type] * free_host_memory(unknown=1 << 32)) // groups.world_size
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return int(shares["cuda"] * (free - torch.cuda.memory_allocated(device)))
