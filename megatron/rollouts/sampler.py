"""Answers by the model under training: by the generation engine, or by the forward pass of training itself
(`rollout.exact`)."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.callbacks import TrainingRun
from megatron.data import Batch
from megatron.distributed import run_on_all_ranks_of
from megatron.generation.batching.requests import Event
from megatron.generation.complete import complete
from megatron.generation.sampling import SamplingParams, TokenSampler
from megatron.generation.stopping import looks_for_stop, signal_to
from megatron.mpu import HeadInput, choose_tokens, mix_seed
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.neox_arguments.values.rollouts import rollout_servers
from megatron.process import StopRequested
from megatron.rollouts.answers import Answer, batch_of
from megatron.rollouts.prompts import Prompt

Asked = tuple[Prompt, int]
"""A prompt, and which of its answers is wanted."""


@dataclass(frozen=True)
class Turn:
    """What the model is to write next. tokens: before it; room: the most tokens, 0 for nothing; seed: of the
    draws."""

    tokens: list[int]
    room: int
    seed: int


class Sampler(Protocol):
    """What writes answers. All ranks call it together, each data rank with its own micro-batches, as many as
    all others."""

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """What the model writes in each of the turns of each micro-batch. Once a stop signal has come they
        may be what is there of them: who asks looks for it afterwards."""


def turn_of(run: TrainingRun, one: Asked) -> Turn:
    """The turn in which a prompt is answered, the same in every layout."""
    prompt, number = one
    return Turn(prompt.tokens, room_for(run, prompt.tokens), mix_seed(run.args.seed, "rollout", prompt.number, number))


def room_for(run: TrainingRun, prompt: Sequence[int]) -> int:
    """Tokens that an answer may have. The last one is only predicted, unless a reward model or a server reads
    it."""
    assert run.args.rollout is not None
    reads_all = run.args.reward_model is not None or bool(rollout_servers(run.args))
    row = run.args.seq_length + (not reads_all)
    return min(run.args.rollout["max_completion_length"], row - len(prompt))


class EngineSampler:
    """By the generation engine, on the weights of the training engine."""

    def __init__(self, run: TrainingRun, stop_token_ids: tuple[int, ...]) -> None:
        assert run.args.rollout is not None
        self.run, self.stop_token_ids = run, stop_token_ids
        self.sampling = SamplingParams(temperature=run.args.rollout["temperature"])
        self.as_drawn = loss_temperature(run.args) != 1.0  # else the loss has the log-probabilities of the model

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """As of `Sampler`."""
        own = [turn for batch in turns for turn in batch if turn.room]
        with self.run.inference() as model:
            groups, first, everyone = model.groups, 0, own
            if model.lockstep:  # all ranks write all answers
                shares = run_on_all_ranks_of(groups.group("data"), groups.size("data"), lambda: own)
                rank = groups.rank("data")
                first, everyone = sum(map(len, shares[:rank])), [one for share in shares for one in share]
            tokens: list[list[int]] = [[] for _ in everyone]
            logprobs: list[list[float]] = [[] for _ in everyone]
            finished = [False] * len(everyone)
            look_for_stop = looks_for_stop(self.run, model)

            def take(event: Event) -> None:
                tokens[event.id].extend(event.tokens)
                logprobs[event.id].extend(one.logprob for one in event.logprobs)
                finished[event.id] |= event.finish_reason == "stop"
                look_for_stop(event)

            if everyone:
                with suppress(StopRequested):
                    complete(
                        replace(model, columns=self.run.args.softmax_rows),  # as the loss sees them
                        [turn.tokens for turn in everyone],
                        self.sampling,
                        maximum_tokens=[turn.room for turn in everyone],
                        seeds=[turn.seed for turn in everyone],
                        stop_token_ids=self.stop_token_ids,
                        logprobs=0,
                        processed_logprobs=self.as_drawn,
                        on_event=take,
                    )
        written = [
            Answer(turn.tokens, *values)
            for turn, values in zip(everyone, zip(tokens, logprobs, finished, strict=True), strict=True)
        ]
        answers = iter(written[first : first + len(own)])
        return [
            [next(answers) if turn.room else Answer(turn.tokens, [], [], False) for turn in batch] for batch in turns
        ]


class ExactSampler:
    """By the forward pass of training, over the rows and micro-batches that are trained, so that products
    have the same shapes and give the same bits: a pass over whole rows for each token."""

    def __init__(self, run: TrainingRun, stop_token_ids: tuple[int, ...]) -> None:
        assert run.args.rollout is not None
        self.run, self.stop_token_ids = run, stop_token_ids
        # What is left to divide by: the logits come as the loss has them
        self.temperature = run.args.rollout["temperature"] / loss_temperature(run.args)

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """As of `Sampler`."""
        rows = [[Answer(turn.tokens, [], [], False) for turn in batch] for batch in turns]
        draws = [[random.Random(turn.seed) for turn in batch] for batch in turns]
        rooms = [[turn.room for turn in batch] for batch in turns]
        groups, width = self.run.groups, self.run.args.seq_length
        while True:
            open_rows = [
                [len(row.tokens) < room and not row.finished for row, room in zip(*pair, strict=True)]
                for pair in zip(rows, rooms, strict=True)
            ]
            left = torch.tensor(float(any(map(any, open_rows))), device=groups.device)
            if not float(groups.max(left, "data")) or signal_to(self.run, "data"):
                return rows
            batches = []
            for batch in rows:
                zeros = [0.0] * len(batch)
                batches.append(batch_of(batch, width, rewards=zeros, advantages=zeros, all_places=True))
            drawn = iter(
                self.run.engine.forward_only(
                    batches, self._reader(rows, draws, open_rows), lambda batch: (len(batch.tokens), 2)
                )
            )
            for number, batch in enumerate(rows):
                chosen = next(drawn).tolist()
                rows[number] = [
                    self._longer(row, int(token), logprob) if goes_on else row
                    for row, (token, logprob), goes_on in zip(batch, chosen, open_rows[number], strict=True)
                ]

    def _longer(self, row: Answer, token: int, logprob: float) -> Answer:
        ends = token in self.stop_token_ids
        return Answer(row.prompt, [*row.tokens, token], [*row.logprobs, logprob], ends)

    def _reader(
        self, rows: Sequence[Sequence[Answer]], draws: Sequence[Sequence], open_rows: Sequence[Sequence[bool]]
    ) -> Callable[[HeadInput, Batch], Tensor]:
        """What reads the next token of each row of the micro-batches in turn and its log-probability, `[rows,
        2]`."""
        args, tokenizer = self.run.args, self.run.tokenizer
        waiting = iter(zip(rows, draws, open_rows, strict=True))
        group, width = self.run.groups.group("tensor"), args.seq_length

        def read(head: HeadInput, batch: Batch) -> Tensor:
            answers, generators, going = next(waiting)
            size = len(answers)
            last = [min(len(row.prompt) + len(row.tokens), width) - 1 for row in answers]  # a full row goes not on
            places = torch.tensor([at * size + row for row, at in enumerate(last)], device=batch.tokens.device)

            def choose(logits: Tensor) -> Tensor:
                params = SamplingParams(self.temperature)
                sampler = TokenSampler([params] * size, [(0, ())] * size, tokenizer.vocab_size, logits.device)
                uniforms = [one.random() if go else 0.0 for one, go in zip(generators, going, strict=True)]
                return sampler.sample(
                    logits[:, : tokenizer.vocab_size].float(), [uniforms[i] for i in sampler.sampled_rows]
                )

            tokens, logprobs = choose_tokens(head, places, choose, group, args.softmax_rows, loss_temperature(args))
            return torch.stack([tokens.float(), logprobs], dim=1)

        return read
