"""Samples answers from the model under training, by the generation engine or by the training forward pass."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.callbacks import TrainingRun
from megatron.data import Batch
from megatron.generation.batching.requests import Event
from megatron.generation.complete import complete, prompts_of_all_ranks
from megatron.generation.sampling import SamplingParams, TokenSampler
from megatron.generation.stopping import looks_for_stop, signal_to
from megatron.methods.reinforcement.answers import Answer, batch_of
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys, rollout_servers
from megatron.methods.reinforcement.prompts import Prompt
from megatron.mpu import HeadInput, choose_tokens, mix_seed
from megatron.neox_arguments.values.losses import loss_temperature
from megatron.process import StopRequested

AnswerRequest = tuple[Prompt, int]
"""A prompt, and which of its answers is requested: 0 up to `num_generations` - 1."""


@dataclass(frozen=True)
class Turn:
    """A request for the model's next text.

    tokens: the context.
    room: maximum number of tokens; 0: no text is requested.
    seed: for sampling.
    """

    tokens: list[int]
    room: int
    seed: int


class Sampler(Protocol):
    """A callable that samples answers from the model.

    All ranks must call it together, each data rank with its own micro-batches, the same number on each.
    """

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """Returns the model's answer to each turn of each micro-batch.

        After a stop signal answers may be incomplete: the caller must check for the signal.
        """


def turn_of(run: TrainingRun, request: AnswerRequest) -> Turn:
    """Returns the turn that answers a request. Its seed, and so the answer, is the same in every parallel
    layout."""
    prompt, number = request
    return Turn(prompt.tokens, room_for(run, prompt.tokens), mix_seed(run.args.seed, "rollout", prompt.number, number))


def room_for(run: TrainingRun, prompt: Sequence[int]) -> int:
    """Returns the maximum number of tokens that an answer to `prompt` may have.

    The last token of an answer is only a label. It needs no position in the row, unless a reward model or a
    server reads it.
    """
    reads_all = ReinforcementKeys.read_from(run.args).reward_model is not None or bool(rollout_servers(run.args))
    row = run.args.seq_length + (not reads_all)
    return min(rollout_keys(run.args)["max_completion_length"], row - len(prompt))


class EngineSampler:
    """Samples answers with the generation engine, on the weights of the training engine."""

    def __init__(self, run: TrainingRun, stop_token_ids: tuple[int, ...]) -> None:
        self.run, self.stop_token_ids = run, stop_token_ids
        self.sampling = SamplingParams(temperature=rollout_keys(run.args)["temperature"])
        self.as_drawn = loss_temperature(run.args) != 1.0  # return log-probabilities at the sampling temperature

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """Returns the model's answer to each turn of each micro-batch; all ranks must call it together."""
        local_turns = [turn for batch in turns for turn in batch if turn.room]
        with self.run.inference() as model:
            all_turns, own_turns = prompts_of_all_ranks(model, local_turns)
            tokens: list[list[int]] = [[] for _ in all_turns]
            logprobs: list[list[float]] = [[] for _ in all_turns]
            finished = [False] * len(all_turns)
            look_for_stop = looks_for_stop(self.run, model)

            def take(event: Event) -> None:
                tokens[event.id].extend(event.tokens)
                logprobs[event.id].extend(choice.logprob for choice in event.logprobs)
                finished[event.id] |= event.finish_reason == "stop"
                look_for_stop(event)

            if all_turns:
                with suppress(StopRequested):
                    complete(
                        replace(model, columns=self.run.args.softmax_rows),  # the same softmax as in the loss
                        [turn.tokens for turn in all_turns],
                        self.sampling,
                        maximum_tokens=[turn.room for turn in all_turns],
                        seeds=[turn.seed for turn in all_turns],
                        stop_token_ids=self.stop_token_ids,
                        logprobs=0,
                        processed_logprobs=self.as_drawn,
                        on_event=take,
                    )
        written = list(map(Answer, [turn.tokens for turn in all_turns], tokens, logprobs, finished))
        answers = iter(written[own_turns])
        return [
            [next(answers) if turn.room else Answer(turn.tokens, [], [], False) for turn in batch] for batch in turns
        ]


class ExactSampler:
    """Samples answers with the training forward pass: one pass over full rows per token (`rollout.exact`).

    Rows and micro-batches are those of the training step, so matrix products have the same shapes and
    results.
    """

    def __init__(self, run: TrainingRun, stop_token_ids: tuple[int, ...]) -> None:
        self.run, self.stop_token_ids = run, stop_token_ids
        # The logits come already divided by the loss's temperature: divide by the rest
        self.temperature = rollout_keys(run.args)["temperature"] / loss_temperature(run.args)

    def __call__(self, turns: Sequence[Sequence[Turn]]) -> list[list[Answer]]:
        """Returns the model's answer to each turn of each micro-batch; all ranks must call it together."""
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
            samples = iter(
                self.run.engine.forward_only(
                    batches, self._reader(rows, draws, open_rows), lambda batch: (len(batch.tokens), 2)
                )
            )
            for number, batch in enumerate(rows):
                chosen = next(samples).tolist()
                rows[number] = [
                    self._longer(row, int(token), logprob) if goes_on else row
                    for row, (token, logprob), goes_on in zip(batch, chosen, open_rows[number], strict=True)
                ]

    def _longer(self, row: Answer, token: int, logprob: float) -> Answer:
        return Answer(row.prompt, [*row.tokens, token], [*row.logprobs, logprob], token in self.stop_token_ids)

    def _reader(
        self, rows: Sequence[Sequence[Answer]], draws: Sequence[Sequence], open_rows: Sequence[Sequence[bool]]
    ) -> Callable[[HeadInput, Batch], Tensor]:
        """Returns a function that samples the next token of each row, one micro-batch per call.

        Its result is `[rows, 2]`: token and log-probability. Rows that are not open get a token too, which
        the caller ignores.
        """
        args, tokenizer = self.run.args, self.run.tokenizer
        waiting = iter(zip(rows, draws, open_rows, strict=True))
        group, width = self.run.groups.group("tensor"), args.seq_length

        def read(head: HeadInput, batch: Batch) -> Tensor:
            answers, generators, is_open = next(waiting)
            size = len(answers)
            last = [min(len(row.prompt) + len(row.tokens), width) - 1 for row in answers]  # the position to sample at
            places = torch.tensor(
                [position * size + row for row, position in enumerate(last)], device=batch.tokens.device
            )

            def choose(logits: Tensor) -> Tensor:
                sampling = [SamplingParams(self.temperature)] * size
                sampler = TokenSampler(sampling, [(0, ())] * size, tokenizer.vocab_size, logits.device)
                uniforms = [draw.random() if go else 0.0 for draw, go in zip(generators, is_open, strict=True)]
                return sampler.sample(
                    logits[:, : tokenizer.vocab_size].float(), [uniforms[i] for i in sampler.sampled_rows]
                )

            tokens, logprobs = choose_tokens(head, places, choose, group, args.softmax_rows, loss_temperature(args))
            return torch.stack([tokens.float(), logprobs], dim=1)

        return read
