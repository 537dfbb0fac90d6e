"""How many rows of tokens one forward may run."""

import logging
from dataclasses import dataclass

import torch

from megatron.distributed import run_on_all_ranks
from megatron.model import Model, block_specs
from megatron.model.specs import AttentionSpec, DenseSpec
from megatron.mpu.memory import free_host_memory

# More than this gains no speed, whatever memory there is.
_TOKENS = {"cpu": 1024, "cuda": 32768}
_SHARE = {"cpu": 0.25, "cuda": 0.5}  # of free memory; pages of files and other processes want the rest of a CPU's
_SCORES_AT_ONCE = 3  # copies of attention scores where a kernel writes them out


@dataclass(frozen=True)
class ForwardBudget:
    """bytes: for what a forward holds at a time; rows: at most so many, None: what memory allows; the others: bytes a
    token, a query's key (with branches), and a token whose logits are read."""

    bytes: int
    tokens: int
    rows: int | None
    token_bytes: int
    key_bytes: int
    logits_bytes: int

    def allows(self, rows: int, width: int, wanted: int, branched: bool) -> bool:
        """Whether rows of `width` tokens, of which `wanted` are read, can be run together."""
        if self.rows is not None:
            return rows <= self.rows
        keys = width * self.key_bytes if branched else 0
        needed = rows * width * (self.token_bytes + keys) + wanted * self.logits_bytes
        return needed <= self.bytes and rows * width <= self.tokens


def forward_budget(model: Model, batch_size: int | None = None) -> ForwardBudget:
    """The same on every rank: that of the one with the least memory. batch_size: rows, instead."""
    args, groups = model.args, model.groups
    tensor, size, device = groups.size("tensor"), model.dtype.itemsize, groups.device
    assert args.padded_vocab_size is not None
    blocks = block_specs(args)
    mixers = [block.mixer for block in blocks if isinstance(block.mixer, AttentionSpec)]
    widths = [block.feed_forward.width for block in blocks if isinstance(block.feed_forward, DenseSpec)]
    heads = max((mixer.heads for mixer in mixers), default=0) // tensor
    attended = max((mixer.heads * mixer.head_dim for mixer in mixers), default=0)
    inner = (3 * max(widths, default=0) + 4 * attended) // tensor
    values = 2 * (8 * args.hidden_size + inner)  # of a block, and as much again for what its kernels make
    scores = (_SCORES_AT_ONCE if any(mixer.biased for mixer in mixers) or device.type == "cpu" else 1) * heads * 4
    share = int(_SHARE[device.type] * free_memory(device))
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


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take, on the device or of the machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_memory(unknown=1 << 32)
