"""Decides which requests run in the next step: first come, first served, while rows and KV-cache blocks last.

In models with Mamba states, each running request also holds a state slot.
"""

from collections import deque

from megatron.generation.batching.block_allocator import BLOCK_SIZE, BlockAllocator
from megatron.generation.batching.sequence import SequenceState


class Scheduler:
    """Holds the requests, called sequences here: those that run, at most `maximum_rows`, and those that wait
    for a row or for KV-cache blocks."""

    def __init__(self, blocks: BlockAllocator, maximum_rows: int) -> None:
        self.blocks, self.maximum_rows = blocks, maximum_rows
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.free_slots = list(range(maximum_rows - 1, -1, -1))  # indices of free Mamba states

    def admit(self) -> None:
        """Moves waiting sequences to free rows, in order, until rows or KV-cache blocks run out."""
        being_prefilled = {row.beginning for row in self.running if row.shares_blocks and row.computed < BLOCK_SIZE}
        while self.waiting and len(self.running) < self.maximum_rows:
            sequence = self.waiting[0]
            if sequence.paged:
                shares, beginning = sequence.shares_blocks and not sequence.scoring_prompt, sequence.beginning
                shared, prefix_id = list[int](), sequence.first_prefix_id
                if shares:
                    shared, prefix_id = self.blocks.share_prefix(sequence.tokens, prefix_id)
                num_new_blocks = -(-len(sequence.tokens) // BLOCK_SIZE) - len(shared)
                # One free block is left for each running row, so that the new row does not cause a
                # preemption in the next step.
                num_required_blocks = num_new_blocks + len(self.running)
                # A running row is about to compute the first block of this sequence: wait to share it.
                sharable_soon = shares and not shared and beginning in being_prefilled
                sharable_soon = sharable_soon and len(sequence.tokens) > BLOCK_SIZE
                allocated = None
                if not sharable_soon and num_required_blocks <= self.blocks.free_blocks:
                    allocated = self.blocks.allocate(num_new_blocks)
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
        """Allocates a KV-cache block for every row whose blocks have no room for its last token.

        If no block is free, the youngest row is preempted: it frees its blocks, and is put first in the queue
        of waiting requests.
        """
        for sequence in [row for row in self.running if row.paged]:
            while len(sequence.tokens) > len(sequence.blocks) * BLOCK_SIZE and sequence in self.running:
                allocated = self.blocks.allocate(1)
                if allocated is not None:
                    sequence.blocks += allocated
                else:
                    self.preempt(max((row for row in self.running if row.paged), key=lambda row: row.id))

    def preempt(self, sequence: SequenceState) -> None:
        """Stops a running sequence, frees its blocks and state slot, and puts it first in the queue, so that
        it is recomputed later."""
        self.finish(sequence)
        self.waiting.appendleft(sequence)

    def finish(self, sequence: SequenceState) -> None:
        """Removes a sequence from the running ones, and frees its KV-cache blocks and state slot."""
        self.running.remove(sequence)
        self.release(sequence)

    def release(self, sequence: SequenceState) -> None:
        """Frees a sequence's blocks and state slot, and marks all its tokens as not computed."""
        self.blocks.release(sequence.blocks)
        if sequence.state_slot is not None:
            self.free_slots.append(sequence.state_slot)
            sequence.state_slot = None
        sequence.blocks, sequence.computed, sequence.registered, sequence.prefix_id = [], 0, 0, sequence.first_prefix_id
        if sequence.scoring_prompt:
            sequence.prompt_logprobs = [None]

    def cancel(self, id: int) -> bool:
        """Drops the sequence with this id and frees its blocks. Returns False if no sequence with this id
        runs or waits."""
        for sequences in (self.running, self.waiting):
            for sequence in sequences:
                if sequence.id == id:
                    sequences.remove(sequence)
                    self.release(sequence)
                    return True
        return False

    def clear(self) -> None:
        """Drops all running and waiting sequences, and frees their blocks and state slots."""
        for sequence in self.running:
            self.release(sequence)
        self.running.clear()
        self.waiting.clear()
