"""Tracks which blocks of the KV cache are held by which requests, and which blocks hold a prefix that others
can share."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16  # tokens of a block of the KV cache
_Key = tuple[int, tuple[int, ...]]  # prefix id of the block before (0 or less: none), tokens of this block


class BlockAllocator:
    """Allocates blocks 1 to `total` of the KV cache, each of `size` tokens, and counts references to them.
    Padding writes to block 0.

    A full block can be registered under all tokens up to its end (its prefix), so that later requests with
    this prefix share it. A registered block without references stays registered until `allocate` needs it;
    the least recently used is taken first (vLLM's automatic prefix caching).
    """

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._ref_counts = [0] * (total + 1)
        self._unregistered = list(range(total, 0, -1))  # free, taken from the end
        self._registered: OrderedDict[int, None] = OrderedDict()  # free, least recently used first
        self._prefixes: dict[_Key, tuple[int, int]] = {}  # (block, prefix id, which is never used again)
        self._keys: dict[int, _Key] = {}
        self._last_prefix_id = 0

    @property
    def free_blocks(self) -> int:
        """The number of blocks without a reference, registered ones included."""
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
        """Drops one reference to each of these blocks. A block without references is free."""
        for block in reversed(blocks):  # the end of a text is of less use than its beginning
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._registered[block] = None
                else:
                    self._unregistered.append(block)

    def share_prefix(self, tokens: Sequence[int], root_id: int = 0) -> tuple[list[int], int]:
        """Finds the registered blocks that hold the beginning of `tokens`, and adds a reference to each.

        Returns these blocks, and the prefix id of the last one (`root_id` if there is none). The last token
        is never in them, since its logits must be computed. Prefixes under different root ids (0 or less)
        never match.
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
        """Registers a full block that a request holds, so that other requests can share it. Returns its
        prefix id.

        tokens: the block's own tokens. prefix_id: id of the prefix before them.
        """
        key = (prefix_id, tuple(tokens))
        registered = self._prefixes.get(key)
        if registered is not None:
            return registered[1]
        self._last_prefix_id += 1
        self._prefixes[key], self._keys[block] = (block, self._last_prefix_id), key
        return self._last_prefix_id
