"""Which blocks of the KV cache are held by which requests, and which blocks hold a prefix that others can
share."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16  # tokens of a block of the KV cache
_Key = tuple[int, tuple[int, ...]]  # prefix id of the block before (0 or less: none), tokens of this block


class BlockAllocator:
    """Reference counts of the blocks 1 to `total`, each of `size` tokens; block 0 takes what padding writes.

    A full block can be registered under all tokens up to its end (its prefix); requests that begin alike then
    share it. It stays registered after the last of them has released it, until it is needed for something
    else: the least recently used goes first (as vLLM's automatic prefix caching).
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
        """How many blocks nobody holds."""
        return len(self._unregistered) + len(self._registered)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, each with a reference count of 1; None, and nothing taken, where there
        are fewer."""
        if count > self.free_blocks:
            return None
        taken = []
        for _ in range(count):
            if self._unregistered:
                block = self._unregistered.pop()
            else:
                block, _ = self._registered.popitem(last=False)
                del self._prefixes[self._keys.pop(block)]
            self._ref_counts[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a reference to each of these blocks."""
        for block in reversed(blocks):  # the end of a text is of less use than its beginning
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._registered[block] = None
                else:
                    self._unregistered.append(block)

    def share_prefix(self, tokens: Sequence[int], first: int = 0) -> tuple[list[int], int]:
        """Take a reference to each registered block that holds the beginning of `tokens`; the last token is
        never part of it, since its logits are wanted. Returns the blocks and the prefix id of the last one,
        without any `first`: 0 or less, the texts under another one are others."""
        blocks: list[int] = []
        prefix_id = first
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
        """Share nothing that was written so far: it is of other weights. Nobody holds a block."""
        self._unregistered += self._registered
        for known in (self._registered, self._prefixes, self._keys):
            known.clear()

    def register(self, block: int, prefix_id: int, tokens: Sequence[int]) -> int:
        """Let others share a held block, which is full of `tokens` behind the prefix `prefix_id`; its own
        prefix id."""
        key = (prefix_id, tuple(tokens))
        registered = self._prefixes.get(key)
        if registered is not None:
            return registered[1]
        self._last_prefix_id += 1
        self._prefixes[key], self._keys[block] = (block, self._last_prefix_id), key
        return self._last_prefix_id
