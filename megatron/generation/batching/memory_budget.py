"""What memory allows: how many rows of tokens one forward may run, and how many blocks the KV cache may
have."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.distributed import run_on_all_ranks
from megatron.generation.batching.block_allocator import BLOCK_SIZE
from megatron.model import Model, block_specs
from megatron.model.specs import AttentionSpec, DenseSpec, FeedForwardSpec
from megatron.mpu.memory import free_host_memory

# More than this gains no speed, whatever memory there is.
_TOKENS = {"cpu": 1024, "cuda": 32768}
# Shares of free memory; pages of files and other processes want the rest of a CPU's.
_FORWARD_SHARE = {"cpu": 0.25, "cuda": 0.5}
_CACHE_SHARE = {"cpu": 0.25, "cuda": 0.8}
_SCORES_AT_ONCE = 3  # copies of attention scores where a kernel writes them out


@dataclass(frozen=True)
class ForwardBudget:
    """The limits of one forward. bytes: for what it holds at a time; tokens: at most, with padding; rows: at
    most, None: what memory allows.

    token_bytes, key_bytes and logits_bytes are the memory of a token, of a pair of query and key (where rows
    have branches, and so a mask), and of a token whose logits are read.
    """

    bytes: int
    tokens: int
    rows: int | None
    token_bytes: int
    key_bytes: int
    logits_bytes: int

    def allows(self, rows: int, width: int, wanted: int, branched: bool) -> bool:
        """Whether so many rows of `width` tokens can be run together, with the logits of `wanted` tokens."""
        if self.rows is not None:
            return rows <= self.rows
        keys = width * self.key_bytes if branched else 0
        needed = rows * width * (self.token_bytes + keys) + wanted * self.logits_bytes
        return needed <= self.bytes and rows * width <= self.tokens


def forward_budget(model: Model, batch_size: int | None = None) -> ForwardBudget:
    """The limits of a forward, the same on every rank: those of the rank with the least memory; all ranks
    call it.

    batch_size: a fixed number of rows instead of what memory allows.
    """
    args, groups = model.args, model.groups
    tensor, size, device = groups.size("tensor"), model.dtype.itemsize, groups.device
    assert args.padded_vocab_size is not None
    blocks = block_specs(args)
    mixers = [block.mixer for block in blocks if isinstance(block.mixer, AttentionSpec)]
    widths = [_inner_width(block.feed_forward) for block in blocks]
    heads = max((mixer.heads for mixer in mixers), default=0) // tensor
    attended = max((mixer.heads * mixer.head_dim for mixer in mixers), default=0)
    inner = (3 * max(widths, default=0) + 4 * attended) // tensor
    values = 2 * (8 * args.hidden_size + inner)  # of a block, and as much again for what its kernels make
    scores = (_SCORES_AT_ONCE if any(mixer.biased for mixer in mixers) or device.type == "cpu" else 1) * heads * 4
    share = int(_FORWARD_SHARE[device.type] * free_memory(device))
    ranks_here = groups.world_size if device.type == "cpu" else 1
    least = min(run_on_all_ranks(groups, lambda: share // ranks_here))
    budget = ForwardBudget(
        bytes=least, tokens=_TOKENS[device.type], rows=batch_size, token_bytes=values * size, key_bytes=scores,
        logits_bytes=args.padded_vocab_size // tensor * (size + 4),
    )  # fmt: skip
    if batch_size is None:
        logging.getLogger("megatron").info(
            f"eval_batch_size: auto runs up to {budget.tokens} tokens at once in {budget.bytes / 1e9:.1f} GB"
        )
    return budget


def _inner_width(feed_forward: FeedForwardSpec) -> int:
    """Numbers that a token has within a feed-forward, over all of its experts, in units of what a gated one
    of that width has."""
    if isinstance(feed_forward, DenseSpec):
        return feed_forward.width
    shared = feed_forward.shared.width if feed_forward.shared is not None else 0
    # Its inputs and outputs are there once for each expert.
    return feed_forward.router.top_k * (feed_forward.expert.width + feed_forward.expert.hidden) + shared


def cache_blocks(
    model: Model, most: int, cache_gb: float | None = None, log: Callable[[str], None] | None = None
) -> int:
    """How many blocks the KV cache gets, at most `most`: what the rank with the least memory has room for.
    All ranks of the model call it together.

    cache_gb: of keys and values on this rank; None: as `kv_cache_gb` says. log: called with an automatic
    choice. Raises ConfigError where not one block fits.
    """
    args, groups, device = model.args, model.groups, model.groups.device
    block_bytes = model.stage.cache_bytes * BLOCK_SIZE
    auto = cache_gb is None and args.kv_cache_gb == "auto"
    if auto:
        ranks_here = groups.world_size if device.type == "cpu" else 1
        available = int(_CACHE_SHARE[device.type] * free_memory(device)) // ranks_here
    else:
        available = int(float(args.kv_cache_gb if cache_gb is None else cache_gb) * 1e9)
    least = torch.tensor([min(available // block_bytes, most)], device=device)
    for axis in ("tensor", "pipe", "data") if model.lockstep else ("tensor", "pipe"):
        if groups.group(axis) is not None:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=groups.group(axis))
    blocks = int(least)
    if blocks < 1:
        raise args.error("kv_cache_gb", f"{available / 1e9:.3g} GB hold no {BLOCK_SIZE} tokens; set it higher")
    if auto and log is not None:
        log(f"kv_cache_gb: auto chose {blocks * block_bytes / 1e9:.3g}, for {blocks * BLOCK_SIZE} tokens")
    return blocks


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take, on the device or of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_memory(unknown=1 << 32)
