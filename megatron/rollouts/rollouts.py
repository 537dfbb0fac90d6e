"""The steps of a run that is trained with rewards: the model answers prompts, the answers are judged, and
micro-batches are made of them."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megatron.callbacks import TrainingRun
from megatron.checkpointing import replace_file
from megatron.checkpointing.huggingface import declared_eos_ids
from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.data import Batch, DataError
from megatron.distributed import on_rank_zero, run_on_all_ranks_of, run_on_each_rank
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.mpu import mix_seed
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.rollouts import rollout_servers
from megatron.objectives.reinforcement import divergence
from megatron.rollouts.answers import Answer, batch_of
from megatron.rollouts.generation import Generation, Shares, advantages_of, overlong, width_of
from megatron.rollouts.prompts import Messages, Prompts, read_rows, tokens_of
from megatron.rollouts.record import RolloutRecord
from megatron.rollouts.reward_model import RewardModel
from megatron.rollouts.rewards import Completion, RewardError, RewardFunctions, Scores
from megatron.rollouts.sampler import Asked, EngineSampler, ExactSampler, Sampler
from megatron.rollouts.servers import ServerSampler

T = TypeVar("T")


class Rollouts:
    """What gives the loop of training its steps. All ranks call every method together."""

    def __init__(self, run: TrainingRun, folder: Path | None, run_id: str) -> None:
        """folder: of `rollouts.jsonl`, and of what a run that is interrupted between the steps of a
        generation needs; None: nothing is written.

        Raises DataError for prompts, ConfigError for reward functions that cannot be used.
        """
        args = run.args
        assert args.rollout is not None
        self.run, self.args, self.folder = run, args, folder
        self.options = args.rollout
        self.shares = Shares.of(args, run.groups.size("data"))
        self.steps: int = self.shares.steps * args.rollout["num_iterations"]  # of a generation
        self.group: int = args.rollout["num_generations"]
        if self.shares.total % self.group:
            raise args.error(
                "rollout.num_generations",
                f"{self.group} answers to a prompt do not divide the {self.shares.total} answers of a generation "
                "(train_batch_size x steps_per_generation); change one of them",
            )
        read = partial(read_rows, self.options["prompts"], self.options["prompt_key"], self.options["chat"])
        rows = on_rank_zero(run.groups, read)
        template = _template(run, any(not isinstance(row.prompt, str) for row in rows))

        def tokenize(prompt: str | Messages) -> list[int]:
            if isinstance(prompt, str):
                return run.tokenizer.tokenize(prompt)
            assert template is not None
            return template.tokens(prompt)

        with run.watchdog.phase("reading the prompts"):
            tokens = on_rank_zero(run.groups, lambda: tokens_of(args, rows, tokenize))
        self.prompts = Prompts.of(args, rows, tokens)
        ends = {run.tokenizer.eod, run.tokenizer.eos, *declared_eos_ids(run.companion_files)}
        self.stop_token_ids = tuple(sorted(ends | set(template.stop_token_ids if template is not None else ())))
        sampler = ExactSampler if args.rollout["exact"] else EngineSampler
        self.sampler: Sampler = sampler(run, self.stop_token_ids)
        servers = rollout_servers(args)
        self.server_sampler = ServerSampler(run, servers, self.stop_token_ids, self.shares) if servers else None
        self.rewards = run_on_each_rank(run.groups, lambda: _reward_functions(args))
        if args.reward_functions:
            columns = {name for row in rows for name in row.columns}
            on_rank_zero(run.groups, lambda: _reported(args, partial(self.rewards.check, columns)))
        self.reward_model = RewardModel(run) if args.reward_model is not None else None
        self.record = RolloutRecord(run, folder, run_id, self.text_of)
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step still to do."""
        while True:
            number, step = divmod(self.run.iteration, self.steps)
            if self._generation is None or self._generation.number != number:
                self._generation = None  # before the next is made
                self._generation = self._make(number) if step == 0 else self._read(number)
            yield self._batches(self._generation, step % self.shares.steps)

    def close(self) -> None:
        """End the processes of reward functions, and what asks servers."""
        if self.server_sampler is not None:
            self.server_sampler.close()
        self.rewards.close()

    # -- a generation ----------------------------------------------------------------------------------------

    def _asked(self, number: int) -> list[Asked]:
        """The prompts of a generation, and which answer to them each of its rows is, in the order of rows."""
        first = number * (self.shares.total // self.group)
        return [(self.prompts[first + row // self.group], row % self.group) for row in range(self.shares.total)]

    def _make(self, number: int) -> Generation:
        asked, version = self._asked(number), number
        own = self.shares.micro_batches(self.run.groups.rank("data"))
        began = time.perf_counter()
        with self.run.watchdog.phase("sampling answers"):
            if self.server_sampler is not None:
                answers, version = self.server_sampler(number, self._asked)
            else:
                answers = self._from_all(self.sampler([[asked[row] for row in rows] for rows in own]))
        sampled = time.perf_counter()
        with self.run.watchdog.phase("judging answers"):
            scores = on_rank_zero(self.run.groups, lambda: self._judge(asked, answers))
            if self.reward_model is not None:
                by_model: list[float | None] = [*self.reward_model(answers)]
                scores = replace(scores, parts={**scores.parts, "reward_model": by_model})
        judged = time.perf_counter()
        weights = self.args.reward_weights or [1.0] * len(scores.parts)
        rewards = np.array([math.nan if value is None else value for value in scores.total(weights)])
        old_logprobs, kl = self._of_trainer(answers)
        penalised = rewards - overlong(self.args, answers) - (0.0 if kl is None else self.args.kl_div_beta * kl)
        advantages = advantages_of(self.args, penalised, self.record.history)
        generation = Generation(number, version, answers, rewards.tolist(), advantages, old_logprobs)
        self.record.take(generation, asked, scores, penalised, sampled - began, judged - sampled)
        if self.steps > 1:
            on_rank_zero(self.run.groups, lambda: self._write(generation))
        return generation

    def _from_all(self, written: Sequence[Sequence[Answer]]) -> list[Answer]:
        """The answers of all data ranks, in the order of the generation's rows."""
        groups = self.run.groups
        shares = run_on_all_ranks_of(groups.group("data"), groups.size("data"), lambda: written)
        found: list[Answer | None] = [None] * self.shares.total
        for rank, batches in enumerate(shares):
            for rows, answers in zip(self.shares.micro_batches(rank), batches, strict=True):
                found[rows.start : rows.stop] = answers
        return [answer for answer in found if answer is not None]

    def _judge(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> Scores:
        completions = [
            Completion(prompt.row.prompt, self.text_of(answer), answer.tokens, prompt.row.columns)
            for (prompt, _), answer in zip(asked, answers, strict=True)
        ]
        if not self.args.reward_functions:
            return Scores({}, [], 0.0)
        return _reported(self.args, lambda: self.rewards.score(completions))

    def text_of(self, answer: Answer) -> str:
        """The answer without the token that ends it."""
        ended = answer.finished and answer.tokens and answer.tokens[-1] in self.stop_token_ids
        return self.run.tokenizer.detokenize(answer.tokens[:-1] if ended else answer.tokens)

    def _of_trainer(self, answers: Sequence[Answer]) -> tuple[list[list[float]] | None, np.ndarray | None]:
        """The log-probabilities that the trainer gives the answers' tokens, where more than one step is taken
        on them or other weights wrote them; and of each answer the sum of its KL from the reference, where
        that is part of rewards."""
        several = self.steps > 1 or self.options["staleness"] > 0
        if not several and not self.args.rl_kl_in_reward:
            return None, None
        width, nothing = width_of(self.args, answers), [0.0] * self.shares.rows
        own = self.shares.micro_batches(self.run.groups.rank("data"))
        batches = [
            self._batch([answers[row] for row in rows], width, nothing, nothing, None, rows.start) for rows in own
        ]
        with self.run.watchdog.phase("scoring answers"):
            found = self.run.engine.step_logprobs(batches)
            compared = self.run.engine.complete(batches) if self.args.rl_kl_in_reward else []
        old = [
            values[trained].tolist()
            for batch, of_batch in zip(batches, found, strict=True)
            for values, trained in zip(of_batch.cpu(), batch.loss_weights > 0, strict=True)
        ]
        sums = [value for batch, of_batch in zip(compared, found, strict=False) for value in self._kl(batch, of_batch)]
        everyone = run_on_all_ranks_of(self.run.groups.group("data"), self.run.groups.size("data"), lambda: (old, sums))
        logprobs: list[list[float]] = [[] for _ in answers]
        kl = np.zeros(len(answers))
        for rank, (theirs, of_answers) in enumerate(everyone):
            places = [row for rows in self.shares.micro_batches(rank) for row in rows]
            for place, values in zip(places, theirs, strict=True):
                logprobs[place] = values
            if of_answers:
                kl[places] = of_answers
        return logprobs if several else None, kl if self.args.rl_kl_in_reward else None

    def _kl(self, batch: Batch, logprobs: torch.Tensor) -> list[float]:
        """The sum of each answer's KL from the reference."""
        assert batch.rollout is not None and batch.rollout.reference_logprobs is not None
        of_tokens = divergence(self.args.kl_impl, logprobs, batch.rollout.reference_logprobs)
        return torch.where(batch.loss_weights > 0, of_tokens, 0.0).sum(1).tolist()

    # -- its steps -------------------------------------------------------------------------------------------

    def _batches(self, generation: Generation, step: int) -> list[Batch]:
        own = self.shares.micro_batches(self.run.groups.rank("data"))
        rows_of_step = own[step * self.shares.accumulation : (step + 1) * self.shares.accumulation]
        width, old = width_of(self.args, generation.answers), generation.old_logprobs
        return [
            self._batch(
                [generation.answers[row] for row in rows],
                width,
                [generation.rewards[row] for row in rows],
                [generation.advantages[row] for row in rows],
                None if old is None else [old[row] for row in rows],
                rows.start,
            )
            for rows in rows_of_step
        ]

    def _batch(
        self,
        answers: Sequence[Answer],
        width: int,
        rewards: Sequence[float],
        advantages: Sequence[float],
        old_logprobs: Sequence[Sequence[float]] | None,
        first: int,
    ) -> Batch:
        return batch_of(
            answers, width, rewards=rewards, advantages=advantages, old_logprobs=old_logprobs,
            all_places=self.options["exact"], ended_alone=self.args.rl_mask_truncated,
            seed=mix_seed(self.args.seed, "rollout batch", self.run.iteration, first),
        )  # fmt: skip

    # -- between its steps -----------------------------------------------------------------------------------

    def _file(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / "generations" / f"{number}.json"

    def _write(self, generation: Generation) -> None:
        """Keep the generation for a run that is interrupted between its steps, and those that kept
        checkpoints may need."""
        file = self._file(generation.number)
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(generation.as_json()).encode())
        saved = [] if self.args.save_dir is None else list_checkpoints(self.args.save_dir)
        first = min(map(step_of, saved), default=0) // self.steps
        for kept in file.parent.glob("*.json"):
            if kept.stem.isdecimal() and int(kept.stem) < first:
                kept.unlink()

    def _read(self, number: int) -> Generation:
        file = self._file(number)

        def read() -> Generation:
            if file is None or not file.is_file():
                raise DataError(
                    f"{file}: missing; the run goes on between the steps of a generation, whose answers it held: set "
                    f"iteration to a checkpoint at a multiple of {self.steps}"
                )
            generation = Generation.from_json(json.loads(file.read_bytes()))
            if (generation.number, len(generation.answers)) != (number, self.shares.total):
                raise DataError(
                    f"{file}: holds {len(generation.answers)} answers of generation {generation.number}, not "
                    f"{self.shares.total} of {number}: of another run; set log_dir to this run's"
                )
            return generation

        return on_rank_zero(self.run.groups, read)


def _reported(args: NeoXArgs, work: Callable[[], T]) -> T:
    """What `work` gives; what it says of reward functions names the key and its place."""
    try:
        return work()
    except RewardError as problem:
        raise args.error("reward_functions", str(problem)) from problem


def _reward_functions(args: NeoXArgs) -> RewardFunctions:
    functions = args.reward_functions or ()
    if args.reward_model is not None and any(entry.endswith(":reward_model") for entry in functions):
        raise args.error("reward_functions", "reward_model is the name of the model's part; rename the function")
    make = partial(RewardFunctions, functions, timeout_s=args.reward_timeout_s, workers=args.reward_workers)
    return _reported(args, make)


def _template(run: TrainingRun, needed: bool) -> ChatTemplate | None:
    """The chat template of the run, found by rank 0."""
    if not needed:
        return None

    def find() -> tuple[str, str]:
        template = find_template(run.args, run.tokenizer, run.companion_files)
        return template.text, template.source

    text, source = on_rank_zero(run.groups, find)
    return ChatTemplate(text, run.tokenizer, source)
