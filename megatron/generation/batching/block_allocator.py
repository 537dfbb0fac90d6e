"""Which blocks of the cache belong to whom."""

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]  # what stands before (the number of the key of the block before, 0: nothing), tokens


class BlockAllocator:
    """Blocks 1 to `total`, counted by who holds them; 0 belongs to none.

    A full block can be known by all tokens up to its end; texts that begin alike then share it. It stays known after
    the last text let go of it, until it is needed for something else, the longest unused first.
    """

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._holders = [0] * (total + 1)
        self._unknown = list(range(total, 0, -1))  # free, taken from the end
        self._known: OrderedDict[int, None] = OrderedDict()  # free
        self._numbers: dict[_Key, tuple[int, int]] = {}  # (block, number of the key, which is never used again)
        self._keys: dict[int, _Key] = {}
        self._last_number = 0

    @property
    def free(self) -> int:
        return len(self._unknown) + len(self._known)

    def take(self, count: int) -> list[int] | None:
        """So many blocks with one holder each; None where there are fewer."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if self._unknown:
                block = self._unknown.pop()
            else:
                block, _ = self._known.popitem(last=False)
                del self._numbers[self._keys.pop(block)]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer of each."""
        for block in reversed(blocks):  # the end of a text is of less use than its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._known[block] = None
                else:
                    self._unknown.append(block)

    def share(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Known blocks that hold the beginning of a text, without its last token, with a holder more each; and the
        number of the last one's key."""
        blocks: list[int] = []
        number = 0
        for start in range(0, len(tokens) - self.size, self.size):
            found = self._numbers.get((number, tuple(tokens[start : start + self.size])))
            if found is None:
                break
            block, number = found
            if self._holders[block] == 0:
                del self._known[block]
            self._holders[block] += 1
            blocks.append(block)
        return blocks, number

    def know(self, block: int, number: int, tokens: Sequence[int]) -> int:
        """A held block is full of these tokens, after those of another key's number; the number of its key."""
        key = (number, tuple(tokens))
        found = self._numbers.get(key)
        if found is not None:
            return found[1]
        self._last_number += 1
        self._numbers[key], self._keys[block] = (block, self._last_number), key
        return self._last_number
