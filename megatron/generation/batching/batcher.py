"""Continuous batching: requests come and go while others run, with a token a step for each of them."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from megatron.checkpointing import CheckpointError
from megatron.generation.batching.block_allocator import BLOCK_SIZE, BlockAllocator
from megatron.generation.batching.forward import DecodeBatch, Forward, RowOutput, run_forwards
from megatron.generation.batching.memory_budget import cache_blocks
from megatron.generation.batching.requests import Event, FinishReason, Logprob, Request
from megatron.generation.batching.scheduler import Scheduler
from megatron.generation.batching.sequence import SequenceState, check_request
from megatron.generation.sampling import TokenSampler
from megatron.model import KVCache, Model
from megatron.model.positions import rope_length_limit

_PREFILL = {"cpu": 1024, "cuda": 8192}  # prompt tokens a step, so that rows that decode need not wait long
_SCORED = 512  # prompt tokens a step whose logits are all read
_FORWARD_TOKENS = 8192  # of one forward, with padding


class Batcher:
    """Requests of one model. Every rank of its tensor and pipe groups (with `model.lockstep`, every rank)
    makes one, and calls the same methods with the same arguments in the same order; the constructor and
    `step` are collective.

    A KV cache in blocks is shared by all; requests that begin alike share blocks, but in models with states
    (Mamba's), of which each row has its own. A row takes a block when it needs one; where none is left, the
    youngest row gives its own back and is run again later. What a request becomes depends on its own values
    and seed alone.
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
        """maximum_rows: requests that run at once, others wait. tokens: of all requests there will be,
        prompts and what is generated, if that is known: the cache need hold no more. cache_gb: of keys,
        values and states on this rank, None: as `kv_cache_gb` says. log: called with an automatic choice.
        Raises ConfigError for a cache that holds nothing, or not the states of so many rows."""
        self.model, self.device = model, model.groups.device
        limit, scaling = rope_length_limit(model.args), model.args.rope_scaling or {}
        self.longest_cached = limit if scaling.get("rope_type") == "dynamic" else None
        self.longest_short = limit if self.longest_cached is None else None
        # Blocks of the longest text
        self.capacity = -(-model.positions // BLOCK_SIZE) if model.args.attends else 0
        self.cache: KVCache | None = None
        self.blocks = BlockAllocator(0, BLOCK_SIZE)
        if not model.args.recompute:
            most = maximum_rows * self.capacity
            if tokens is not None:  # each row may leave a block half full
                most = min(most, tokens // BLOCK_SIZE + maximum_rows)
            texts = maximum_rows if model.args.mamba_blocks else 0
            self.blocks = BlockAllocator(cache_blocks(model, most, texts, cache_gb, log), BLOCK_SIZE)
            self.cache = model.stage.empty_cache(self.blocks.total + 1, BLOCK_SIZE, texts)
        self.scheduler = Scheduler(self.blocks, maximum_rows)
        self._last_id = -1
        self._cancelled: list[Event] = []  # for the next step to return
        self._decoding: list[tuple[list[SequenceState], DecodeBatch, TokenSampler, int | None]] = []

    def add(self, request: Request) -> int:
        """Let a request wait for its turn; its id. Raises RequestError, and keeps nothing of it, where it
        cannot be served (`check_request`)."""
        sequence = SequenceState(self._last_id + 1, request, self.model, self.longest_cached, self.longest_short)
        check_request(sequence, self.model, self.blocks.total)
        self._last_id += 1
        self.scheduler.waiting.append(sequence)
        return sequence.id

    def cancel(self, id: int) -> None:
        """Give the request's blocks back now; the next step returns its last event. Does nothing for an id
        that is unknown or has ended."""
        if self.scheduler.cancel(id):
            self._cancelled.append(Event(id, finish_reason="cancelled"))

    @property
    def busy(self) -> bool:
        """Whether a step would bring events, or bring them nearer."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._cancelled)

    @property
    def running(self) -> int:
        """How many requests have a row."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """How many requests wait for a row."""
        return len(self.scheduler.waiting)

    def step(self) -> list[Event]:
        """A token for every row whose prompt has been read, after admitting those that wait as far as there
        is room.

        Raises CheckpointError when logits are not numbers; whatever is raised, all requests are gone.
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
                for rows, decoding, _, _ in self._decoding:
                    decoding.advance([sequence.tokens[-1] for sequence in rows])
        except BaseException:
            self.scheduler.clear()
            self._decoding = []
            raise
        return events

    # -- forwards --------------------------------------------------------------------------------------------

    def _decode(self) -> list[tuple[list[SequenceState], Forward]]:
        """The rows of which only the last token is to be run, as a forward for each pipeline stage to work
        on."""
        ready = [row for row in self.scheduler.running if row.decodes]
        ready.sort(key=lambda row: row.computed)
        parts = min(self.model.groups.size("pipe"), len(ready))
        bounds = [len(ready) * i // parts for i in range(parts + 1)] if parts else [0]
        shares = [ready[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        if [rows for rows, _, _, _ in self._decoding] != shares:
            self._decoding = [
                (
                    rows,
                    DecodeBatch(
                        [(row.tokens[-1], row.computed, row.blocks) for row in rows],
                        self.capacity,
                        BLOCK_SIZE,
                        self._adapters(rows),
                        self._state_slots(rows),
                    ),
                    self._sampler(rows),
                    _top(rows),
                )
                for rows in shares
            ]
        work = []
        for rows, decoding, sampler, top in self._decoding:
            for place, row in enumerate(rows):
                row.last_column = 0
                decoding.extend(place, row.blocks)
            assert self.cache is not None
            draws, divisors = _draw(rows, sampler), self._divisors(rows)
            work.append((rows, decoding.forward(self.cache, self.device, sampler, draws, top, divisors)))
        return work

    def _prefill(self) -> list[tuple[list[SequenceState], Forward]]:
        """The rows that have more tokens to run, up to `_PREFILL` tokens in all; rows of similar lengths
        together."""
        tokens_left = _PREFILL[self.device.type]
        chunks: list[tuple[tuple[bool, bool, bool, int], int, SequenceState]] = []
        for row in self.scheduler.running:
            pending = len(row.tokens) - row.computed
            if row.decodes:
                continue
            count = min(pending, tokens_left, _SCORED if row.scoring_prompt else tokens_left) if row.cached else pending
            if row.cached:
                tokens_left -= count
            if count > 0:
                alone = row.id if row.scoring_prompt and not row.cached else -1  # so that no row pads it
                chunks.append(((row.cached, row.computed == 0, row.scoring_prompt, alone), count, row))
        chunks.sort(key=lambda chunk: (chunk[0], chunk[1], chunk[2].id))
        work = []
        for (cached, fresh, scoring, _), group in groupby(chunks, key=lambda chunk: chunk[0]):
            for rows in _similar_lengths(
                [(count, row) for _, count, row in group], _SCORED if scoring else _FORWARD_TOKENS
            ):
                work.append(([row for _, row in rows], self._chunk(rows, cached, fresh, scoring)))
        return work

    def _chunk(self, chunks: Sequence[tuple[int, SequenceState]], cached: bool, fresh: bool, scoring: bool) -> Forward:
        """A forward over the next `count` tokens of each (count, row)."""
        rows = [row for _, row in chunks]
        width = max(count for count, _ in chunks)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        positions, slots, targets = tokens.clone(), tokens.clone(), tokens.clone()
        table = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.long)  # may be of none
        for i, (count, row) in enumerate(chunks):
            start, end = row.computed, row.computed + count
            row.last_column = count - 1
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
            view = self.cache.of(slots, table, states=self._state_slots(rows))
        sampler = self._sampler(rows)
        last = torch.tensor([count - 1 for count, _ in chunks], device=self.device)
        finished = [row if row.computed + count == len(row.tokens) else None for count, row in chunks]
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
        """`Forward.divisors`: the temperatures of rows that want `processed_logprobs`."""
        if not any(row.request.processed_logprobs for row in rows):
            return None
        asked = [row.request.sampling.temperature if row.request.processed_logprobs else 1.0 for row in rows]
        return torch.tensor([temperature or 1.0 for temperature in asked], device=self.device)

    def _state_slots(self, rows: Sequence[SequenceState]) -> torch.Tensor | None:
        """`[rows]` int64, where each row's states stand in the cache; None for models without."""
        slots = [row.state_slot for row in rows if row.state_slot is not None]
        return torch.tensor(slots, device=self.device) if slots else None

    def _sampler(self, rows: Sequence[SequenceState]) -> TokenSampler:
        """A sampler of the next tokens for rows that run together."""
        texts = [(row.prompt_length, row.tokens) for row in rows]
        minimums = [(row.request.minimum_tokens, row.stop_token_ids) for row in rows]
        vocab = self.model.tokenizer.vocab_size
        return TokenSampler([row.request.sampling for row in rows], texts, vocab, self.device, minimums)

    # -- what comes of it ------------------------------------------------------------------------------------

    def _advance(self, sequence: SequenceState, output: RowOutput) -> Event | None:
        """Take in what a forward gave for a row; None while its prompt is not read to the end."""
        request, start = sequence.request, sequence.computed
        if sequence.cached:
            sequence.computed += sequence.last_column + 1
            while sequence.shares_blocks and (sequence.registered + 1) * BLOCK_SIZE <= sequence.computed:
                first = sequence.registered * BLOCK_SIZE
                block_tokens = sequence.tokens[first : first + BLOCK_SIZE]
                sequence.prefix_id = self.blocks.register(
                    sequence.blocks[sequence.registered], sequence.prefix_id, block_tokens
                )
                sequence.registered += 1
        if sequence.scoring_prompt and output.targets and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += output.targets[
                : min(sequence.last_column + 1, sequence.prompt_length - 1 - start)
            ]
        if sequence.cached and sequence.computed < len(sequence.tokens):
            return None
        if output.token < 0:
            raise CheckpointError(
                f"the model gives NaN as logits in {self.model.args.params_dtype}: the checkpoint's weights are "
                "damaged or precision cannot hold its activations; load another `iteration`, or set precision"
            )
        prompt_logprobs, text = None, ""
        finish_reason: FinishReason | None = None
        if len(sequence.tokens) == sequence.prompt_length:
            prompt_logprobs = sequence.prompt_logprobs
        if request.maximum_tokens == 0:
            self.scheduler.finish(sequence)
            return Event(sequence.id, finish_reason="length", prompt_logprobs=prompt_logprobs)
        was_long = sequence.is_long
        sequence.tokens.append(output.token)
        ended = output.token in sequence.stop_token_ids
        if ended:
            finish_reason = "stop"
        elif len(sequence.tokens) - sequence.prompt_length >= request.maximum_tokens:
            finish_reason = "length"
        if sequence.detokenizer is not None:
            text = "" if ended else sequence.detokenizer.add(output.token)
            if finish_reason is not None:
                text += sequence.detokenizer.finish()
            if sequence.detokenizer.stopped:
                finish_reason = "stop"
        if finish_reason is not None:
            self.scheduler.finish(sequence)
        elif sequence.cached and sequence.is_long != was_long:
            self.scheduler.preempt(sequence)  # all that the cache holds of it would have other frequencies now
        logprobs = (
            () if request.logprobs is None or output.logprob is None else (_only_top(output.logprob, request.logprobs),)
        )
        return Event(sequence.id, (output.token,), text, logprobs, finish_reason, prompt_logprobs)


def _top(rows: Sequence[SequenceState]) -> int | None:
    """How many most likely tokens the row that asks for most wants; None: none wants log-probabilities."""
    return max((row.top for row in rows if row.top is not None), default=None)


def _only_top(logprob: Logprob, top: int) -> Logprob:
    """With `top` most likely tokens, without more that another row asked for."""
    return logprob if len(logprob.top) == top else logprob._replace(top=logprob.top[:top])


def _draw(rows: Sequence[SequenceState | None], sampler: TokenSampler) -> list[float]:
    """A uniform number in [0, 1) for each row that is sampled; None for a row: its token is not taken, and no
    number of its generator is used up."""
    generators = [row.rng if row is not None else None for row in (rows[i] for i in sampler.sampled_rows)]
    return [0.0 if rng is None else rng.random() for rng in generators]


def _similar_lengths(chunks: Sequence[tuple[int, SequenceState]], most: int) -> list[list[tuple[int, SequenceState]]]:
    """Batches of (count, row) in order of count: neighbours are batched while padding is less than half of
    what is run, and while a batch has no more than `most` tokens."""
    batches: list[list[tuple[int, SequenceState]]] = []
    for count, row in chunks:
        padded = (len(batches[-1]) + 1) * count if batches else 0
        if batches and padded <= min(most, 64 + 1.5 * (sum(n for n, _ in batches[-1]) + count)):
            batches[-1].append((count, row))
        else:
            batches.append([(count, row)])
    return batches
