"""Allocates the blocks of the KV cache, and finds blocks that hold a prefix which a new request can share."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16  # tokens in a block of the KV cache
_Key = tuple[int, tuple[int, ...]]  # prefix id of the preceding block (0 or less: none), tokens of this block


class BlockAllocator:
    """Allocates blocks 1 to `total` of the KV cache, each of `size` tokens, and counts the references to each
    block. Block 0 is for padding.

    A full block can be registered under all tokens of the text up to its end (its prefix), so that later
    requests with this prefix share it. Each registered prefix has a prefix id. A registered block without
    references stays registered until `allocate` needs it; the least recently used is taken first (vLLM's
    automatic prefix caching).
    """

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._ref_counts = [0] * (total + 1)
        self._unregistered = list(range(total, 0, -1))  # free blocks, taken from the end
        self._registered: OrderedDict[int, None] = OrderedDict()  # free blocks, least recently used first
        self._prefixes: dict[_Key, tuple[int, int]] = {}  # (block, prefix id); ids are not reused
        self._keys: dict[int, _Key] = {}
        self._last_prefix_id = 0

    @property
    def free_blocks(self) -> int:
        """The number of blocks that can be allocated: those without a reference, including registered
        blocks."""
        return len(self._unregistered) + len(self._registered)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` free blocks, each with a reference count of 1. Returns None and allocates nothing
        if fewer are free.
        """
        if count > self.free_blocks:
            return None
        allocated = []
        for _ in range(count):
            if self._unregistered:
                block = self._unregistered.pop()
            else:
                block, _ = self._registered.popitem(last=False)
                del self._prefixes[self._keys.pop(block)]
            self._ref_counts[block] = 1
            allocated.append(block)
        return allocated

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block in `blocks`. A block without references is free."""
        for block in reversed(blocks):  # a text's last block is reused first
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._registered[block] = None
                else:
                    self._unregistered.append(block)

    def share_prefix(self, tokens: Sequence[int], root_id: int = 0) -> tuple[list[int], int]:
        """Finds the registered blocks that hold the beginning of `tokens`, and adds a reference to each.

        Returns the blocks, and the prefix id of the last block (`root_id` if no block matches). The last of
        `tokens` is never in the blocks, since its logits must be computed.

        root_id: 0 or less. Prefixes that were registered under another root id do not match.
        """
        blocks: list[int] = []
        prefix_id = root_id
        for start in range(0, len(tokens) - self.size, self.size):
            registered = self._prefixes.get((prefix_id, tuple(tokens[start : start + self.size])))
            if registered is None:
                break
            block, prefix_id = registered
            if self._ref_counts[block] == 0:
                del self._registered[block]
            self._ref_counts[block] += 1
            blocks.append(block)
        return blocks, prefix_id

    def forget_prefixes(self) -> None:
        """Unregisters all blocks, because the weights have changed. No block may have a reference."""
        self._unregistered += self._registered
        for table in (self._registered, self._prefixes, self._keys):
            table.clear()

    def register(self, block: int, prefix_id: int, tokens: Sequence[int]) -> int:
        """Registers a full block of a request, so that other requests can share it. Returns the block's
        prefix id.

        tokens: the tokens in the block. prefix_id: prefix id of the preceding block of the text; for the
            first block, the root id.
        """
        key = (prefix_id, tuple(tokens))
        registered = self._prefixes.get(key)
        if registered is not None:
            return registered[1]
        self._last_prefix_id += 1
        self._prefixes[key], self._keys[block] = (block, self._last_prefix_id), key
        return self._last_prefix_id
