"""Which requests run in the next step: first come, first served, as far as rows and blocks of the KV cache
reach; each of a model with states has a slot for its own as long as it runs."""

from collections import deque

from megatron.generation.batching.block_allocator import BLOCK_SIZE, BlockAllocator
from megatron.generation.batching.sequence import SequenceState


class Scheduler:
    """Sequences that run (a row each, at most `maximum_rows`) and those that wait for a row or for blocks."""

    def __init__(self, blocks: BlockAllocator, maximum_rows: int) -> None:
        self.blocks, self.maximum_rows = blocks, maximum_rows
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.free_slots = list(range(maximum_rows - 1, -1, -1))  # of states

    def admit(self) -> None:
        """Let those that wait run, in order, until rows or blocks run out."""
        being_prefilled = {row.beginning for row in self.running if row.shares_blocks and row.computed < BLOCK_SIZE}
        while self.waiting and len(self.running) < self.maximum_rows:
            sequence = self.waiting[0]
            if sequence.paged:
                shares, beginning = sequence.shares_blocks and not sequence.scoring_prompt, sequence.beginning
                shared, prefix_id = list[int](), sequence.first_prefix_id
                if shares:
                    shared, prefix_id = self.blocks.share_prefix(sequence.tokens, prefix_id)
                needed = -(-len(sequence.tokens) // BLOCK_SIZE) - len(shared)
                # One row more must not preempt those that run in the very next step: a block is left for
                # each.
                wanted = needed + (len(self.running) if self.running else 0)
                # A row that runs is about to write what this one could share: wait a step for it.
                sharable_soon = shares and not shared and beginning in being_prefilled
                sharable_soon = sharable_soon and len(sequence.tokens) > BLOCK_SIZE
                allocated = None
                if not sharable_soon and wanted <= self.blocks.free_blocks:
                    allocated = self.blocks.allocate(needed)
                if allocated is None:
                    self.blocks.release(shared)
                    return
                being_prefilled.add(beginning)
                sequence.blocks, sequence.computed = shared + allocated, len(shared) * BLOCK_SIZE
                sequence.registered, sequence.prefix_id = len(shared), prefix_id
            if sequence.has_state:
                sequence.state_slot = self.free_slots.pop()
            self.running.append(self.waiting.popleft())

    def grow(self) -> None:
        """Allocate a block for every row whose last token begins one; where none is left, the youngest row is
        preempted: it gives its blocks back and waits in front of all others, to be run again."""
        preempted: set[SequenceState] = set()
        for sequence in list(self.running):
            while (
                sequence not in preempted
                and sequence.paged
                and len(sequence.tokens) > len(sequence.blocks) * BLOCK_SIZE
            ):
                allocated = self.blocks.allocate(1)
                if allocated is not None:
                    sequence.blocks += allocated
                    continue
                youngest = max((row for row in self.running if row.paged), key=lambda row: row.id)
                preempted.add(youngest)
                self.preempt(youngest)

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence off its row, give its blocks and slot back, and let it wait in front of all others,
        to be run again."""
        self.finish(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequence: SequenceState) -> None:
        """Take a sequence off its row, and give its blocks and slot back."""
        self.running.remove(sequence)
        self.release(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Give back a sequence's blocks and slot: if it is to run again, it begins anew."""
        self.blocks.release(sequence.blocks)
        if sequence.state_slot is not None:
            self.free_slots.append(sequence.state_slot)
            sequence.state_slot = None
        sequence.blocks, sequence.computed, sequence.registered, sequence.prefix_id = [], 0, 0, sequence.first_prefix_id
        if sequence.scoring_prompt:
            sequence.prompt_logprobs = [None]

    def cancel(self, id: int) -> bool:
        """Drop the sequence of this id; False where none runs or waits."""
        for sequences in (self.running, self.waiting):
            for sequence in sequences:
                if sequence.id == id:
                    sequences.remove(sequence)
                    self.release(sequence)
                    return True
        return False

    def clear(self) -> None:
        """Drop all sequences."""
        for sequence in self.running:
            self.release(sequence)
        self.running.clear()
        self.waiting.clear()
