"""Runs requests by continuous batching: a step generates one token for every running request.

New requests may join between any two steps, and finished requests leave.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from megatron.checkpointing import CheckpointError
from megatron.generation.batching.block_allocator import BLOCK_SIZE, BlockAllocator
from megatron.generation.batching.captured_decode import CapturedDecode, captures_decode
from megatron.generation.batching.forward import DecodeBatch, Forward, RowOutput, run_forwards
from megatron.generation.batching.memory_budget import cache_blocks
from megatron.generation.batching.requests import Event, FinishReason, Logprob, Request
from megatron.generation.batching.scheduler import Scheduler
from megatron.generation.batching.sequence import SequenceState, check_request
from megatron.generation.sampling import TokenSampler
from megatron.model import KVCache, Model
from megatron.model.positions import rope_length_limit

_PREFILL = {"cpu": 1024, "cuda": 8192}  # most prompt tokens per step, so that decoding rows do not wait long
_SCORED = 512  # most prompt tokens per step if the logits of all of them are read
_FORWARD_TOKENS = 8192  # most tokens of one forward pass, padding included


class Batcher:
    """Continuous batching of one model's requests: `add` queues a request, `step` generates tokens for all.

    Every rank of the tensor and pipe groups (with `model.lockstep`, every rank of the run) makes a batcher
    and calls the same methods with the same arguments in the same order. The constructor and `step` are
    collective.

    All requests share a paged KV cache. Requests with a common prefix share the blocks of this prefix, except
    in models with Mamba states. Each running request has a row, which allocates blocks as its text grows. If
    no block is free, the youngest row is preempted: it frees its blocks and is recomputed later. The output
    of a request depends only on the request and its seed.
    """

    def __init__(
        self,
        model: Model,
        *,
        maximum_rows: int = 64,
        tokens: int | None = None,
        cache_gb: float | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Allocates the KV cache and starts with no requests.

        maximum_rows: most requests that run at once; further requests wait.
        tokens: total of prompt and generated tokens of all requests, if known; limits the size of the cache.
        cache_gb: GB for keys, values and states on this rank; None: `kv_cache_gb` of the configuration.
        log: called with a line of text for each value that `auto` chose.

        Raises ConfigError if the cache has no room for one block, or for the states of `maximum_rows` rows.
        """
        self.model, self.device = model, model.groups.device
        limit, scaling = rope_length_limit(model.args), model.args.rope_scaling or {}
        self.longest_cached = limit if scaling.get("rope_type") == "dynamic" else None
        self.longest_short = limit if self.longest_cached is None else None
        # Number of blocks of the longest text
        self.capacity = -(-model.positions // BLOCK_SIZE) if model.args.attends else 0
        self.cache: KVCache | None = None
        self.captured: CapturedDecode | None = None
        self.blocks = BlockAllocator(0, BLOCK_SIZE)
        if not model.args.recompute:
            max_blocks = maximum_rows * self.capacity
            if tokens is not None:  # the last block of each row may be partly empty
                max_blocks = min(max_blocks, tokens // BLOCK_SIZE + maximum_rows)
            captured = captures_decode(model, log)
            texts = maximum_rows + captured if model.args.state_blocks else 0  # padding rows need a state too
            self.blocks = BlockAllocator(cache_blocks(model, max_blocks, texts, cache_gb, log), BLOCK_SIZE)
            self.cache = model.stage.empty_cache(self.blocks.total + 1, BLOCK_SIZE, texts)
            if captured:
                self.captured = CapturedDecode(model, self.cache, maximum_rows, self.capacity)
        self.scheduler = Scheduler(self.blocks, maximum_rows)
        self._last_id = -1
        self._cancelled: list[Event] = []  # for the next step to return
        self._decoding: list[DecodeBatch] = []

    def add(self, request: Request) -> int:
        """Queues a request and returns its id. Raises RequestError if the request cannot be served
        (`check_request`); it is then not queued."""
        sequence = SequenceState(self._last_id + 1, request, self.model, self.longest_cached, self.longest_short)
        check_request(sequence, self.model, self.blocks.total)
        self._last_id += 1
        self.scheduler.waiting.append(sequence)
        return sequence.id

    def cancel(self, id: int) -> None:
        """Drops a request and frees its blocks at once; the next `step` returns its last event, "cancelled".
        Does nothing if no request with this id is queued or running."""
        if self.scheduler.cancel(id):
            self._cancelled.append(Event(id, finish_reason="cancelled"))

    @property
    def busy(self) -> bool:
        """Whether there is work for `step`: requests run or wait, or events of cancelled requests are due."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._cancelled)

    @property
    def running(self) -> int:
        """The number of requests that run, each in a row of the batch."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a free row or for free KV-cache blocks."""
        return len(self.scheduler.waiting)

    def step(self) -> list[Event]:
        """Admits waiting requests if there is room, decodes one token per running request, and prefills new
        prompts.

        Returns the new events. Raises CheckpointError if logits are NaN. After any exception, all requests
        are dropped.
        """
        events, self._cancelled = self._cancelled, []
        try:
            self.scheduler.admit()
            self.scheduler.grow()
            work = [*self._decode(), *self._prefill()]
            if work:
                results = run_forwards(self.model, [forward for _, forward in work])
                for (rows, _), outputs in zip(work, results, strict=True):
                    for sequence, output in zip(rows, outputs, strict=True):
                        event = self._advance(sequence, output)
                        if event is not None:
                            events.append(event)
                for decoding in self._decoding:
                    decoding.advance()
        except BaseException:
            self.scheduler.clear()
            self._decoding = []
            raise
        return events

    # -- forwards --------------------------------------------------------------------------------------------

    def _decode(self) -> list[tuple[list[SequenceState], Forward]]:
        """Returns (rows, forward pass) pairs for the rows in which only the last token is left to compute.

        The rows are split evenly, shortest first, into one pair per pipeline stage, so that no stage is idle.
        The input arrays are reused while the same rows run together.
        """
        ready = sorted((row for row in self.scheduler.running if row.decodes), key=lambda row: row.computed)
        parts = min(self.model.groups.size("pipe"), len(ready))
        shares = [ready[len(ready) * i // parts : len(ready) * (i + 1) // parts] for i in range(parts)]
        if [decoding.rows for decoding in self._decoding] != shares:
            self._decoding = [
                DecodeBatch(
                    rows, self.capacity, self._adapters(rows), _state_slots(rows), self._sampler(rows), _top(rows),
                    self.device, self.captured,
                )
                for rows in shares
            ]  # fmt: skip
        work = []
        for decoding in self._decoding:
            for row in decoding.rows:
                row.count = 1
            assert self.cache is not None
            draws, divisors = _draw(decoding.rows, decoding.sampler), self._divisors(decoding.rows)
            work.append((decoding.rows, decoding.forward(self.cache, draws, divisors)))
        return work

    def _prefill(self) -> list[tuple[list[SequenceState], Forward]]:
        """Returns (rows, forward pass) pairs for the rows in which more than the last token is left to
        compute.

        Rows of similar lengths share a forward pass. Rows that use the KV cache compute up to `_PREFILL`
        tokens in all. Rows that do not use the cache compute their full text in every step.
        """
        tokens_left = _PREFILL[self.device.type]
        chunks: list[tuple[tuple[bool, bool, bool, int], SequenceState]] = []
        for row in self.scheduler.running:
            if row.decodes:
                continue
            row.count = len(row.tokens) - row.computed
            if row.cached:
                row.count = min(row.count, tokens_left, _SCORED if row.scoring_prompt else tokens_left)
                tokens_left -= row.count
            if row.count > 0:
                unbatched_id = row.id if row.scoring_prompt and not row.cached else -1  # it runs alone, without padding
                chunks.append(((row.cached, row.computed == 0, row.scoring_prompt, unbatched_id), row))
        chunks.sort(key=lambda chunk: (chunk[0], chunk[1].count, chunk[1].id))
        work = []
        for (cached, fresh, scoring, _), group in groupby(chunks, key=lambda chunk: chunk[0]):
            max_tokens = _SCORED if scoring else _FORWARD_TOKENS
            for rows in _similar_lengths([row for _, row in group], max_tokens):
                work.append((rows, self._chunk(rows, cached, fresh, scoring)))
        return work

    def _chunk(self, rows: Sequence[SequenceState], cached: bool, fresh: bool, scoring: bool) -> Forward:
        """Returns a forward pass that computes the next `row.count` tokens of each row.

        cached: whether the rows use the KV cache. fresh: whether no token of the rows is computed yet.
            scoring: whether log-probabilities of the prompts are requested.
        """
        counts = [row.count for row in rows]
        tokens = torch.zeros(len(rows), max(counts), dtype=torch.long)
        positions, slots, targets = tokens.clone(), tokens.clone(), tokens.clone()
        table = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.long)  # maybe without columns
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start, end = row.computed, row.computed + count
            tokens[i, :count] = torch.tensor(row.tokens[start:end])
            if cached:
                places = torch.arange(start, end)
                positions[i, :count], positions[i, count:] = places, end - 1
            if row.blocks:
                table[i, : len(row.blocks)] = torch.tensor(row.blocks)
                slots[i, :count] = table[i, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            if scoring:
                targets[i, : min(end, row.prompt_length - 1) - start] = torch.tensor(
                    row.tokens[start + 1 : min(end + 1, row.prompt_length)]
                )
        view = None
        if cached:
            assert self.cache is not None
            slots, table = slots.flatten().to(self.device), table.to(self.device)
            states = _state_slots(rows)
            state_slots = None if states is None else torch.tensor(states, device=self.device)
            view = self.cache.with_rows(slots, table, states=state_slots)
        sampler = self._sampler(rows)
        last = torch.tensor(counts, device=self.device) - 1
        finished = [
            row if row.computed + count == len(row.tokens) else None for row, count in zip(rows, counts, strict=True)
        ]
        return Forward(
            tokens, None if fresh else positions, last, view, sampler, _draw(finished, sampler), _top(rows),
            targets if scoring else None, self._adapters(rows),
            None if self.longest_short is None else torch.tensor([len(row.tokens) for row in rows]),
            self._divisors(rows),
        )  # fmt: skip

    def _adapters(self, rows: Sequence[SequenceState]) -> torch.Tensor | None:
        numbers = [row.request.adapter for row in rows]
        return torch.tensor(numbers, device=self.device) if any(numbers) else None

    def _divisors(self, rows: Sequence[SequenceState]) -> torch.Tensor | None:
        """Returns `Forward.divisors`: the temperature for rows that request `processed_logprobs`, 1 for other
        rows. Returns None if no row requests them."""
        if not any(row.request.processed_logprobs for row in rows):
            return None
        temperatures = [row.request.sampling.temperature if row.request.processed_logprobs else 1.0 for row in rows]
        return torch.tensor([temperature or 1.0 for temperature in temperatures], device=self.device)

    def _sampler(self, rows: Sequence[SequenceState]) -> TokenSampler:
        """Returns a sampler that chooses the next token of each row, with the row's own sampling
        parameters."""
        texts = [(row.prompt_length, row.tokens) for row in rows]
        minimums = [(row.request.minimum_tokens, row.stop_token_ids) for row in rows]
        vocab = self.model.tokenizer.vocab_size
        return TokenSampler([row.request.sampling for row in rows], texts, vocab, self.device, minimums)

    # -- results ---------------------------------------------------------------------------------------------

    def _advance(self, sequence: SequenceState, output: RowOutput) -> Event | None:
        """Adds the output of a forward pass to a request, and ends the request if its text is complete.

        Returns the request's event; None while tokens of its prompt are still to be computed. Raises
        CheckpointError if logits are NaN.
        """
        request, start = sequence.request, sequence.computed
        if sequence.cached:
            sequence.computed += sequence.count
            while sequence.shares_blocks and (sequence.registered + 1) * BLOCK_SIZE <= sequence.computed:
                block_start = sequence.registered * BLOCK_SIZE
                block_tokens = sequence.tokens[block_start : block_start + BLOCK_SIZE]
                sequence.prefix_id = self.blocks.register(
                    sequence.blocks[sequence.registered], sequence.prefix_id, block_tokens
                )
                sequence.registered += 1
        if sequence.scoring_prompt and output.targets and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += output.targets[: min(sequence.count, sequence.prompt_length - 1 - start)]
        if sequence.cached and sequence.computed < len(sequence.tokens):
            return None
        if output.token < 0:
            raise CheckpointError(
                f"the model's logits are NaN in {self.model.args.params_dtype}: its weights are damaged, or "
                "activations overflow this precision; load another `iteration`, or set precision: fp32"
            )
        finish_reason: FinishReason | None = None
        prompt_logprobs = sequence.prompt_logprobs if len(sequence.tokens) == sequence.prompt_length else None
        if request.maximum_tokens == 0:
            self.scheduler.finish(sequence)
            return Event(sequence.id, finish_reason="length", prompt_logprobs=prompt_logprobs)
        was_long = sequence.is_long
        sequence.tokens.append(output.token)
        is_stop_token = output.token in sequence.stop_token_ids
        if is_stop_token:
            finish_reason = "stop"
        elif len(sequence.tokens) - sequence.prompt_length >= request.maximum_tokens:
            finish_reason = "length"
        text = ""
        if sequence.detokenizer is not None:
            text = "" if is_stop_token else sequence.detokenizer.add(output.token)
            if finish_reason is not None:
                text += sequence.detokenizer.finish()
            if sequence.detokenizer.stopped:
                finish_reason = "stop"
        if finish_reason is not None:
            self.scheduler.finish(sequence)
        elif sequence.cached and sequence.is_long != was_long:
            self.scheduler.preempt(sequence)  # its cached keys have the other rotary frequencies
        logprobs: tuple[Logprob, ...] = ()
        if request.logprobs is not None and output.logprob is not None:
            logprobs = (output.logprob._replace(top=output.logprob.top[: request.logprobs]),)
        return Event(sequence.id, (output.token,), text, logprobs, finish_reason, prompt_logprobs)


def _state_slots(rows: Sequence[SequenceState]) -> list[int] | None:
    """Returns the index of each row's Mamba states in the cache; None for models without Mamba states."""
    return [row.state_slot for row in rows if row.state_slot is not None] or None


def _top(rows: Sequence[SequenceState]) -> int | None:
    """Returns the largest number of most likely tokens that a row requests; None if no row requests
    log-probabilities."""
    return max((row.top for row in rows if row.top is not None), default=None)


def _draw(rows: Sequence[SequenceState | None], sampler: TokenSampler) -> list[float]:
    """Returns a random number in [0, 1) for each row with temperature above 0, drawn from the row's own
    generator.

    For a row that is None it returns 0: the row's token is not used, and its generator does not advance.
    """
    generators = [row.rng if row is not None else None for row in (rows[i] for i in sampler.sampled_rows)]
    return [0.0 if rng is None else rng.random() for rng in generators]


def _similar_lengths(rows: Sequence[SequenceState], max_tokens: int) -> list[list[SequenceState]]:
    """Groups rows, which are sorted by `count`, into batches of similar lengths, so that there is little
    padding.

    The padding of a batch is at most 64 tokens plus half the number of its real tokens.

    max_tokens: most tokens of a batch with several rows, padding included.
    """
    batches: list[list[SequenceState]] = []
    for row in rows:
        batch = [*batches[-1], row] if batches else []
        if batch and len(batch) * row.count <= min(max_tokens, 64 + 1.5 * sum(member.count for member in batch)):
            batches[-1] = batch
        else:
            batches.append([row])
    return batches
