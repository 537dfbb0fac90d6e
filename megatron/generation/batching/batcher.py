"""Continuous batching: requests come and go while others run, with a token a step for each of them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from megatron.checkpointing import CheckpointError
from megatron.generation.batching.block_allocator import BlockAllocator
from megatron.generation.batching.detokenize import IncrementalDetokenizer
from megatron.generation.batching.forward import DecodeBatch, Forward, RowOutput, run
from megatron.generation.batching.memory_budget import free_memory
from megatron.generation.batching.requests import Event, FinishReason, Logprob, Request, RequestError
from megatron.generation.sampling import TokenSampler
from megatron.model import KVCache, Model
from megatron.model.positions import dynamic_ntk_limit

_BLOCK = 16  # tokens
_PREFILL = {"cpu": 1024, "cuda": 8192}  # tokens of prompts a step, so that those who write need not wait long
_READ = 512  # tokens of prompts a step whose logits are all read
_TOGETHER = 8192  # tokens of a forward, with padding
_SHARE = {"cpu": 0.25, "cuda": 0.8}  # of free memory


class _Sequence:
    """A request on its way."""

    def __init__(self, id: int, request: Request, model: Model, limit: int | None) -> None:
        self.id, self.request = id, request
        self.tokens = list(request.tokens)
        self.prompt = len(self.tokens)
        self.stop_token_ids = frozenset(
            model.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        )
        self.draws = random.Random(request.seed) if request.sampling.temperature > 0.0 else None
        self.text = None
        if request.text:
            self.text = IncrementalDetokenizer(model.tokenizer.detokenize, request.stop, request.minimum_tokens)
        self.top = request.logprobs if request.logprobs is not None else 0 if request.prompt_logprobs else None
        self.prompt_logprobs: list[Logprob | None] | None = [None] if request.prompt_logprobs else None
        # Keys in a cache would keep the rotary frequencies of a shorter text.
        self.cached = not model.args.recompute and (limit is None or self.longest <= limit)
        self.blocks: list[int] = []
        self.computed = 0  # tokens whose keys and values are in the cache
        self.known, self.number = 0, 0  # as `BlockAllocator.know`
        self.column = -1  # of the last chunk

    @property
    def longest(self) -> int:
        """Tokens that are run, at most."""
        return self.prompt + max(self.request.maximum_tokens - 1, 0)

    @property
    def reading(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt


class Batcher:
    """Requests of one model. Every rank of its tensor and pipe groups (with `model.lockstep`, every rank) makes one,
    and calls the same methods with the same arguments in the same order; the constructor and `step` are collective.

    A cache of keys and values in blocks is shared by all; texts that begin alike share blocks. A row takes a block when
    it needs one; where none is left, the youngest row gives its own back and is run again later. What a request becomes
    depends on its own values and seed alone.
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
        """maximum_rows: requests that run at once, others wait. tokens: of all requests there will be, with those to
        come, if that is known: the cache need hold no more. cache_gb: of keys and values on this rank, None: as
        `kv_cache_gb` says. log: told of an automatic choice. Raises ConfigError for a cache that holds nothing."""
        self.model, self.maximum_rows = model, maximum_rows
        self.device = model.groups.device
        self.limit = dynamic_ntk_limit(model.args)
        self.capacity = -(-model.positions // _BLOCK)  # blocks of the longest text
        self.cache: KVCache | None = None
        self.blocks = BlockAllocator(0, _BLOCK)
        if not model.args.recompute:
            most = maximum_rows * self.capacity
            if tokens is not None:  # a block each is begun
                most = min(most, tokens // _BLOCK + maximum_rows)
            self.blocks = BlockAllocator(self._room(most, cache_gb, log), _BLOCK)
            self.cache = model.stage.empty_cache(self.blocks.total + 1, _BLOCK)
        self._last_id = -1
        self._waiting: deque[_Sequence] = deque()
        self._rows: list[_Sequence] = []
        self._parting: list[Event] = []
        self._decoding: list[tuple[list[_Sequence], DecodeBatch, TokenSampler, int | None]] = []

    def _room(self, most: int, cache_gb: float | None, log: Callable[[str], None] | None) -> int:
        """BlockAllocator, as the rank with the least memory has them."""
        args, groups, size = self.model.args, self.model.groups, self.model.stage.cache_bytes * _BLOCK
        auto = cache_gb is None and args.kv_cache_gb == "auto"
        if auto:
            ranks_here = groups.world_size if self.device.type == "cpu" else 1
            room = int(_SHARE[self.device.type] * free_memory(self.device)) // ranks_here
        else:
            room = int(float(args.kv_cache_gb if cache_gb is None else cache_gb) * 1e9)
        least = torch.tensor([min(room // size, most)], device=self.device)
        for axis in ("tensor", "pipe", "data") if self.model.lockstep else ("tensor", "pipe"):
            if groups.group(axis) is not None:
                dist.all_reduce(least, dist.ReduceOp.MIN, group=groups.group(axis))
        blocks = int(least)
        if blocks < 1:
            raise args.problem("kv_cache_gb", f"{room / 1e9:.3g} GB hold no {_BLOCK} tokens; set it higher")
        if auto and log is not None:
            log(f"kv_cache_gb: auto chose {blocks * size / 1e9:.3g}, for {blocks * _BLOCK} tokens")
        return blocks

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Its id; it waits for its turn. Raises RequestError (nothing is kept) for an empty prompt, for tokens that do
        not exist, and where prompt and maximum_tokens do not fit the model's positions or the whole cache."""
        sequence = _Sequence(self._last_id + 1, request, self.model, self.limit)
        vocab, positions = self.model.tokenizer.vocab_size, self.model.positions
        if not request.tokens:
            raise RequestError("the prompt is empty: it needs a token at least, as the one that begins a document")
        if min(request.tokens) < 0 or max(request.tokens) >= vocab:
            raise RequestError(f"the prompt has tokens that do not exist: they go from 0 to {vocab - 1}")
        if request.maximum_tokens < (0 if request.prompt_logprobs else 1):
            raise RequestError(f"maximum_tokens is {request.maximum_tokens}: nothing is asked for")
        if request.minimum_tokens > request.maximum_tokens:
            raise RequestError(
                f"minimum_tokens is {request.minimum_tokens} and maximum_tokens is {request.maximum_tokens}"
            )
        if not all(0 <= token < vocab for token, _ in request.sampling.logit_bias):
            raise RequestError(f"logit_bias has tokens that do not exist: they go from 0 to {vocab - 1}")
        if request.logprobs is not None and not 0 <= request.logprobs <= vocab:
            raise RequestError(f"logprobs is {request.logprobs}: expected 0 to {vocab}")
        if request.stop and not request.text:
            raise RequestError("stop strings are looked for in the text, and text is False")
        if sequence.longest > positions:
            raise RequestError(
                f"the prompt has {sequence.prompt} tokens and maximum_tokens is {request.maximum_tokens}; the model "
                f"has {positions} positions, and all tokens but the last one take one"
            )
        if sequence.cached and -(-sequence.longest // _BLOCK) > self.blocks.total:
            raise RequestError(
                f"the prompt has {sequence.prompt} tokens and maximum_tokens is {request.maximum_tokens}; the whole "
                f"cache holds {self.blocks.total * _BLOCK} (kv_cache_gb)"
            )
        self._last_id += 1
        self._waiting.append(sequence)
        return sequence.id

    def cancel(self, id: int) -> None:
        """Give its blocks back now; the next step has its last event. Nothing for one that is unknown or has ended."""
        for sequences in (self._rows, self._waiting):
            for sequence in sequences:
                if sequence.id == id:
                    sequences.remove(sequence)
                    self._release(sequence)
                    self._parting.append(Event(id, finish_reason="cancelled"))
                    return

    @property
    def busy(self) -> bool:
        """Whether a step would bring events, or bring them nearer."""
        return bool(self._rows or self._waiting or self._parting)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """A token for every row whose prompt has been read, after admitting those that wait as far as there is room.

        Raises CheckpointError when logits are not numbers; whatever is raised, all requests are gone.
        """
        events, self._parting = self._parting, []
        try:
            self._admit()
            self._grow()
            work = [*self._decode(), *self._prefill()]
            if work:
                results = run(self.model, [forward for _, forward in work])
                for (rows, _), found in zip(work, results, strict=True):
                    for sequence, one in zip(rows, found, strict=True):
                        event = self._advance(sequence, one)
                        if event is not None:
                            events.append(event)
                for rows, decoding, _, _ in self._decoding:
                    decoding.advance([sequence.tokens[-1] for sequence in rows])
        except BaseException:
            for sequence in self._rows:
                self._release(sequence)
            self._rows, self._decoding = [], []
            self._waiting.clear()
            raise
        return events

    def _admit(self) -> None:
        begun = {tuple(row.tokens[:_BLOCK]) for row in self._rows if row.cached and row.computed < _BLOCK}
        while self._waiting and len(self._rows) < self.maximum_rows:
            sequence = self._waiting[0]
            if sequence.cached:
                shared, number = ([], 0) if sequence.reading else self.blocks.share(sequence.tokens)
                beginning = tuple(sequence.tokens[:_BLOCK])
                needed = -(-len(sequence.tokens) // _BLOCK) - len(shared)
                # A row more must not drive those that run out of the cache at once.
                wanted = needed + (len(self._rows) if self._rows else 0)
                soon = not shared and beginning in begun and len(sequence.tokens) > _BLOCK and not sequence.reading
                taken = None if soon or wanted > self.blocks.free else self.blocks.take(needed)
                if taken is None:  # or soon another row will have written what it can share
                    self.blocks.release(shared)
                    return
                begun.add(beginning)
                sequence.blocks, sequence.computed = shared + taken, len(shared) * _BLOCK
                sequence.known, sequence.number = len(shared), number
            self._rows.append(self._waiting.popleft())

    def _grow(self) -> None:
        """A block for every row whose last token begins one."""
        gone: set[_Sequence] = set()
        for sequence in list(self._rows):
            while sequence not in gone and sequence.cached and len(sequence.tokens) > len(sequence.blocks) * _BLOCK:
                taken = self.blocks.take(1)
                if taken is not None:
                    sequence.blocks += taken
                    continue
                youngest = max((row for row in self._rows if row.cached), key=lambda row: row.id)
                gone.add(youngest)
                self._rows.remove(youngest)
                self._release(youngest)
                self._waiting.appendleft(youngest)

    def _release(self, sequence: _Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.known, sequence.number = [], 0, 0, 0
        if sequence.reading:
            sequence.prompt_logprobs = [None]

    # -- forwards ------------------------------------------------------------------------------------------------------

    def _decode(self) -> list[tuple[list[_Sequence], Forward]]:
        """Rows of which only the last token is to be run; several stages share them out."""
        ready = [row for row in self._rows if row.cached and row.computed == len(row.tokens) - 1]
        ready.sort(key=lambda row: row.computed)
        parts = min(self.model.groups.size("pipe"), len(ready))
        bounds = [len(ready) * i // parts for i in range(parts + 1)] if parts else [0]
        shares = [ready[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        if [rows for rows, _, _, _ in self._decoding] != shares:
            self._decoding = [
                (
                    rows,
                    DecodeBatch([(row.tokens[-1], row.computed, row.blocks) for row in rows], self.capacity, _BLOCK),
                    self._chooser(rows),
                    _top(rows),
                )
                for rows in shares
            ]
        work = []
        for rows, decoding, chooser, top in self._decoding:
            for place, row in enumerate(rows):
                row.column = 0
                decoding.extend(place, row.blocks)
            assert self.cache is not None
            work.append((rows, decoding.forward(self.cache, self.device, chooser, _draw(rows, chooser), top)))
        return work

    def _prefill(self) -> list[tuple[list[_Sequence], Forward]]:
        """Rows that have more to run, as far as a step goes; alike ones together."""
        left = _PREFILL[self.device.type]
        found: list[tuple[tuple[bool, bool, bool, int], int, _Sequence]] = []
        for row in self._rows:
            pending = len(row.tokens) - row.computed
            if row.cached and pending == 1:
                continue
            count = min(pending, left, _READ if row.reading else left) if row.cached else pending
            if row.cached:
                left -= count
            if count > 0:
                alone = row.id if row.reading and not row.cached else -1  # so that no row pads it
                found.append(((row.cached, row.computed == 0, row.reading, alone), count, row))
        found.sort(key=lambda one: (one[0], one[1], one[2].id))
        work = []
        for (cached, fresh, reading, _), group in groupby(found, key=lambda one: one[0]):
            for rows in _alike([(count, row) for _, count, row in group], _READ if reading else _TOGETHER):
                work.append(([row for _, row in rows], self._chunk(rows, cached, fresh, reading)))
        return work

    def _chunk(self, chunks: Sequence[tuple[int, _Sequence]], cached: bool, fresh: bool, reading: bool) -> Forward:
        """The next tokens of some rows, as many as told of each."""
        rows = [row for _, row in chunks]
        width = max(count for count, _ in chunks)
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        positions, slots, targets = tokens.clone(), tokens.clone(), tokens.clone()
        table = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.long)
        for i, (count, row) in enumerate(chunks):
            start, end = row.computed, row.computed + count
            row.column = count - 1
            tokens[i, :count] = torch.tensor(row.tokens[start:end])
            if cached:
                table[i, : len(row.blocks)] = torch.tensor(row.blocks)
                places = torch.arange(start, end)
                positions[i, :count], positions[i, count:] = places, end - 1
                slots[i, :count] = table[i, places // _BLOCK] * _BLOCK + places % _BLOCK
            if reading:
                targets[i, : min(end, row.prompt - 1) - start] = torch.tensor(
                    row.tokens[start + 1 : min(end + 1, row.prompt)]
                )
        view = None
        if cached:
            assert self.cache is not None
            view = self.cache.of(slots.flatten().to(self.device), table.to(self.device))
        chooser = self._chooser(rows)
        last = torch.tensor([count - 1 for count, _ in chunks], device=self.device)
        done = [row if row.computed + count == len(row.tokens) else None for count, row in chunks]
        return Forward(
            tokens, None if fresh else positions, last, view, chooser, _draw(done, chooser), _top(rows),
            targets if reading else None,
        )  # fmt: skip

    def _chooser(self, rows: Sequence[_Sequence]) -> TokenSampler:
        texts = [(row.prompt, row.tokens) for row in rows]
        least = [(row.request.minimum_tokens, row.stop_token_ids) for row in rows]
        vocab = self.model.tokenizer.vocab_size
        return TokenSampler([row.request.sampling for row in rows], texts, vocab, self.device, least)

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def _advance(self, sequence: _Sequence, found: RowOutput) -> Event | None:
        """Take a row's token in; None while its prompt is not read to the end."""
        request, start = sequence.request, sequence.computed
        if sequence.cached:
            sequence.computed += sequence.column + 1
            while (sequence.known + 1) * _BLOCK <= sequence.computed:
                first = sequence.known * _BLOCK
                own = sequence.tokens[first : first + _BLOCK]
                sequence.number = self.blocks.know(sequence.blocks[sequence.known], sequence.number, own)
                sequence.known += 1
        if sequence.reading and found.targets and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += found.targets[: min(sequence.column + 1, sequence.prompt - 1 - start)]
        if sequence.cached and sequence.computed < len(sequence.tokens):
            return None
        if found.token < 0:
            raise CheckpointError(
                f"the model gives NaN as logits in {self.model.args.params_dtype}: the checkpoint's weights are "
                "damaged or precision cannot hold its activations; load another `iteration`, or set precision"
            )
        prompt_logprobs, text = None, ""
        finish_reason: FinishReason | None = None
        if len(sequence.tokens) == sequence.prompt:
            prompt_logprobs = sequence.prompt_logprobs
        if request.maximum_tokens == 0:
            self._finish(sequence)
            return Event(sequence.id, finish_reason="length", prompt_logprobs=prompt_logprobs)
        sequence.tokens.append(found.token)
        ended = found.token in sequence.stop_token_ids
        if ended:
            finish_reason = "stop"
        elif len(sequence.tokens) - sequence.prompt >= request.maximum_tokens:
            finish_reason = "length"
        if sequence.text is not None:
            text = "" if ended else sequence.text.add(found.token)
            if finish_reason is not None:
                text += sequence.text.finish()
            if sequence.text.stopped:
                finish_reason = "stop"
        if finish_reason is not None:
            self._finish(sequence)
        logprobs = () if request.logprobs is None or found.logprob is None else (_cut(found.logprob, request.logprobs),)
        return Event(sequence.id, (found.token,), text, logprobs, finish_reason, prompt_logprobs)

    def _finish(self, sequence: _Sequence) -> None:
        self._rows.remove(sequence)
        self._release(sequence)


def _top(rows: Sequence[_Sequence]) -> int | None:
    return max((row.top for row in rows if row.top is not None), default=None)


def _cut(found: Logprob, top: int) -> Logprob:
    """Without what another row asked for."""
    return found if len(found.top) == top else found._replace(top=found.top[:top])


def _draw(rows: Sequence[_Sequence | None], chooser: TokenSampler) -> list[float]:
    """The next draw of each row that needs one; none is used up for a token that nobody takes."""
    draws = [row.draws if row is not None else None for row in (rows[i] for i in chooser.drawn)]
    return [0.0 if one is None else one.random() for one in draws]


def _alike(chunks: Sequence[tuple[int, _Sequence]], most: int) -> list[list[tuple[int, _Sequence]]]:
    """Rows in order of length, together as long as padding is less than half of what is run, and no more than `most`
    tokens."""
    batches: list[list[tuple[int, _Sequence]]] = []
    for count, row in chunks:
        padded = (len(batches[-1]) + 1) * count if batches else 0
        if batches and padded <= min(most, 64 + 1.5 * (sum(have for have, _ in batches[-1]) + count)):
            batches[-1].append((count, row))
        else:
            batches.append([(count, row)])
    return batches
