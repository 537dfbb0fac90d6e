"""The steps of a run that is trained on its own answers: the model answers prompts, the answers are judged,
and micro-batches are made of them."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megatron.callbacks import TrainingRun
from megatron.checkpointing.huggingface import declared_eos_ids
from megatron.data import Batch
from megatron.distributed import on_rank_zero, run_on_all_ranks, run_on_all_ranks_of, run_on_each_rank
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.mpu import mix_seed
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.neox_arguments.values.rollouts import rollout_servers
from megatron.objectives.reinforcement import divergence
from megatron.process import look_for_stop
from megatron.rollouts.answers import Answer, as_pairs, at_tokens, batch_of
from megatron.rollouts.conversations import ENVIRONMENT, Conversations, Speech, with_environment
from megatron.rollouts.environments.environments import Environments
from megatron.rollouts.generation import Generation, Shares, advantages_of, pairs_of, penalties, width_of
from megatron.rollouts.generation_files import GenerationFiles
from megatron.rollouts.judging import compare, second_first
from megatron.rollouts.prompts import Prompt, Prompts, read_rows, tokens_of
from megatron.rollouts.record import RolloutRecord, judged_by
from megatron.rollouts.reward_model import NAME as REWARD_MODEL
from megatron.rollouts.reward_model import RewardModel
from megatron.rollouts.rewards import Completion, RewardError, RewardFunctions, Scores
from megatron.rollouts.sampler import Asked, EngineSampler, ExactSampler, Sampler, Turn, turn_of
from megatron.rollouts.servers import ServerSampler
from megatron.rollouts.unrewarded import EmptySteps, failure_of_all

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
        self.run, self.args = run, args
        self.options = args.rollout
        self.shares = Shares.of(args, run.groups.size("data"))
        self.steps: int = self.shares.steps * args.rollout["num_iterations"]  # of a generation
        self.group: int = args.rollout["num_generations"]
        self.pairs = writes_pairs(args)
        generations = None if folder is None else folder / "generations"
        self.files = GenerationFiles(generations, self.steps, self.shares.total, args.save_dir)
        if self.shares.total % self.group:
            raise args.error(
                "rollout.num_generations",
                f"{self.group} answers to a prompt do not divide the {self.shares.total} answers of a generation "
                "(train_batch_size x steps_per_generation); change one of them",
            )
        read = partial(read_rows, self.options["prompts"], self.options["prompt_key"], self.options["chat"])
        rows = on_rank_zero(run.groups, read)
        template = _template(run, any(not isinstance(row.prompt, str) for row in rows))
        ends = {run.tokenizer.eod, run.tokenizer.eos, *declared_eos_ids(run.companion_files)}
        stop_token_ids = tuple(sorted(ends | set(template.stop_token_ids if template is not None else ())))
        self.speech = Speech(run, template, stop_token_ids)
        with run.watchdog.phase("reading the prompts"):
            tokens = on_rank_zero(run.groups, lambda: tokens_of(args, rows, self.speech.of_prompt))
        self.prompts = Prompts.of(args, rows, tokens)
        on_rank_zero(run.groups, lambda: _check_variables(args))
        self.rewards = run_on_each_rank(run.groups, lambda: _reward_functions(args))
        columns = {name for row in rows for name in row.columns}
        if args.rollout["judge"] is not None:
            on_rank_zero(run.groups, lambda: _reported(args, self.rewards.check))
        elif args.reward_functions:
            on_rank_zero(run.groups, lambda: _reported(args, partial(self.rewards.check, columns)))
        self.conversations = run_on_each_rank(run.groups, lambda: _conversations(args, self.speech))
        if self.conversations is not None:
            check = partial(self.conversations.check, columns)
            on_rank_zero(run.groups, lambda: _reported(args, check, "rollout.environment"))
        sampler = ExactSampler if args.rollout["exact"] else EngineSampler
        self.sampler: Sampler = sampler(run, stop_token_ids)
        servers = rollout_servers(args)
        self.server_sampler = (
            ServerSampler(run, run_id, servers, stop_token_ids, self.shares, self.conversations) if servers else None
        )
        self.reward_model = RewardModel(run) if args.reward_model is not None else None
        self.record = RolloutRecord(run, folder, run_id, self.text_of)
        self.empty_steps = EmptySteps(run)
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step still to do. Raises StopRequested where a stop signal comes
        while answers are made, which the next start makes again."""
        while True:
            number, step = divmod(self.run.iteration, self.steps)
            if self._generation is None or self._generation.number != number:
                self._generation = None  # before the next is made
                self._generation = self._make(number) if step == 0 else self._kept(number)
            if step < self.shares.steps:  # later ones are on the same answers
                rows = slice(step * self.shares.of_step, (step + 1) * self.shares.of_step)
                self.empty_steps.look(self._generation.rewards[rows], self._generation.answers[rows])
            yield self._batches(self._generation, step % self.shares.steps)

    def close(self) -> None:
        """End the processes of reward functions and environments, and what asks servers."""
        if self.conversations is not None:
            self.conversations.close()
        if self.server_sampler is not None:
            self.server_sampler.close()
        self.rewards.close()

    # -- a generation ----------------------------------------------------------------------------------------

    def _asked(self, number: int) -> list[Asked]:
        """The prompts of a generation, and which answer to them each of its rows is, in the order of rows."""
        first = number * (self.shares.total // self.group)
        return [(self.prompts[first + row // self.group], row % self.group) for row in range(self.shares.total)]

    def _make(self, number: int) -> Generation:
        self._look_for_stop()
        asked, version = self._asked(number), number
        began = time.perf_counter()
        with self.run.watchdog.phase("sampling answers"):
            if self.server_sampler is not None:
                answers, version = self.server_sampler(number, self._asked)
            else:
                answers = self._answers(asked)
        self._look_for_stop()
        sampled = time.perf_counter()
        with self.run.watchdog.phase("judging answers"):
            scores = on_rank_zero(self.run.groups, lambda: self._judge(asked, answers))
            if self.reward_model is not None:
                by_model, failures = self.reward_model(answers)
                parts = {**scores.parts, "reward_model": by_model}
                scores = replace(scores, parts=parts, failures=[*scores.failures, *failures])
            if self.conversations is not None:
                judge = partial(with_environment, scores, answers)
                scores = _reported(self.args, judge, "rollout.environment")
        judged = time.perf_counter()
        weights = self.args.reward_weights or [1.0] * len(scores.parts)
        rewards = np.array([math.nan if value is None else value for value in scores.total(weights)])
        old_logprobs, kl = self._of_trainer(answers)
        penalised = rewards - penalties(self.args, answers) - (0.0 if kl is None else self.args.kl_div_beta * kl)
        if self.pairs:  # what failed with one of two answers is no reason to prefer the other
            failed = [failure.row for failure in scores.failures if failure.row is not None]
            penalised[[*failed, *(row for row, answer in enumerate(answers) if not answer.length)]] = math.nan
        advantages = advantages_of(self.args, penalised, self.record.history)
        generation = Generation(number, version, answers, rewards.tolist(), advantages, old_logprobs)
        self.record.take(generation, asked, scores, penalised, sampled - began, judged - sampled)
        self._end_where_all_failed(number, asked, scores, penalised)
        if self.steps > 1:
            on_rank_zero(self.run.groups, lambda: self.files.write(generation, self.record.saved))
        return generation

    def _end_where_all_failed(self, number: int, asked: Sequence[Asked], scores: Scores, rewards: np.ndarray) -> None:
        """Raises ConfigError where every answer failed and none has a reward. rewards: as they are
        trained."""
        first = failure_of_all(scores.failures, rewards, 2 if self.options["judge"] is not None else 1)
        if first is None or first.row is None:
            return
        keys = {REWARD_MODEL: "reward_model", ENVIRONMENT: "rollout.environment"}
        raise self.args.error(
            keys.get(first.function, judged_by(self.args)),
            f"{first.function}: all {len(asked)} answers of generation {number} failed and none has a reward; the "
            f"first, {asked[first.row][0].row.place}: {first.reason}",
        )

    def _answers(self, asked: Sequence[Asked]) -> list[Answer]:
        """Answers by the training processes: a turn each, or turns until all conversations are over."""
        if self.conversations is None:
            return self._written([turn_of(self.run, one) for one in asked])
        conversations, groups = self.conversations, self.run.groups
        turns = on_rank_zero(groups, lambda: conversations.begin(asked))
        while any(turn.room for turn in turns):
            written = self._written(turns)
            self._look_for_stop()
            turns = on_rank_zero(groups, partial(conversations.take, written))
        return on_rank_zero(groups, conversations.answers)

    def _written(self, turns: Sequence[Turn]) -> list[Answer]:
        """What the model writes in the turns of all rows, by all ranks."""
        own = self.shares.micro_batches(self.run.groups.rank("data"))
        return self._from_all(self.sampler([[turns[row] for row in rows] for rows in own]))

    def _kept(self, number: int) -> Generation:
        """A generation that an earlier start has made."""
        return on_rank_zero(self.run.groups, lambda: self.files.read(number))

    def _look_for_stop(self) -> None:
        """Raises StopRequested on all ranks once a stop signal has come to any."""
        run_on_all_ranks(self.run.groups, look_for_stop)

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
        completions = [self._completion(prompt, answer) for (prompt, _), answer in zip(asked, answers, strict=True)]
        if self.options["judge"] is not None:
            order = second_first(self.args.seed, asked)
            return _reported(self.args, lambda: compare(completions, order, self.rewards.score))
        if not self.args.reward_functions:
            return Scores({}, [], 0.0)
        return _reported(self.args, lambda: self.rewards.score(completions))

    def _completion(self, prompt: Prompt, answer: Answer) -> Completion:
        columns, held = prompt.row.columns, answer.transcript
        if held is None:
            return Completion(prompt.row.prompt, self.text_of(answer), answer.tokens, columns)
        said = [str(message["content"]) for message in held.messages if message["role"] == "assistant"]
        return Completion(held.prompt, said[-1] if said else "", answer.tokens, columns, held.messages)

    def text_of(self, answer: Answer) -> str:
        """The answer without the token that ends it."""
        return self.speech.text(answer.tokens, answer.finished)

    def _of_trainer(self, answers: Sequence[Answer]) -> tuple[list[list[float]] | None, np.ndarray | None]:
        """The log-probabilities that the trainer gives the answers' tokens, where more than one step is taken
        on them or other weights wrote them; and of each answer the sum of its KL from the reference, where
        that is part of rewards."""
        several = not self.pairs and (self.steps > 1 or self.options["staleness"] > 0)
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
            at_tokens(answers[row], torch.where(weights > 0, values, 0.0))
            for rows, batch, of_batch in zip(own, batches, found, strict=True)
            for row, values, weights in zip(rows, of_batch.cpu(), batch.loss_weights, strict=True)
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
        old, advantages = generation.old_logprobs, generation.advantages
        trained = pairs_of(advantages, self.group) if self.pairs else range(len(advantages))
        width = width_of(self.args, [generation.answers[row] for row in trained])
        chosen = [([row for row in trained if row in rows], rows.start) for rows in rows_of_step]
        batches = [
            self._batch(
                [generation.answers[row] for row in rows],
                width,
                [generation.rewards[row] for row in rows],
                [advantages[row] for row in rows],
                None if old is None else [old[row] for row in rows],
                first,
            )
            for rows, first in chosen
        ]
        return [as_pairs(batch) for batch in batches] if self.pairs else batches

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


def _reported(args: NeoXArgs, work: Callable[[], T], key: str | None = None) -> T:
    """What `work` gives; what it says of users' functions and classes names the key and its place."""
    try:
        return work()
    except RewardError as problem:
        raise args.error(key or judged_by(args), str(problem)) from problem


def _reward_functions(args: NeoXArgs) -> RewardFunctions:
    assert args.rollout is not None
    judge = args.rollout["judge"]
    functions = args.reward_functions or () if judge is None else (judge,)
    others = {"reward_model": args.reward_model, ENVIRONMENT: args.rollout["environment"]}
    for name, there in others.items():
        if there is not None and any(entry.endswith(f":{name}") for entry in functions):
            raise args.error("reward_functions", f"{name} is the name of another part of rewards; rename the function")
    make = partial(
        RewardFunctions,
        functions,
        timeout_s=args.reward_timeout_s,
        workers=args.reward_workers,
        pairwise=judge is not None,
        variables=args.reward_variables or (),
        hidden=_hidden(args),
    )
    return _reported(args, make)


def _hidden(args: NeoXArgs) -> list[str]:
    """The folders that hold the prompts, with their answers and tests, and what has been answered before."""
    assert args.rollout is not None
    folders = {Path.cwd(), *(Path(name).resolve().parent for name in args.rollout["prompts"])}
    if args.save is not None:
        folders.add(Path(args.save).resolve())
    return sorted(map(str, folders))


def _check_variables(args: NeoXArgs) -> None:
    """Raises ConfigError for a variable of `reward_variables` that rank 0, which starts functions, has
    not."""
    for name in args.reward_variables or ():
        if name not in os.environ:
            raise args.error("reward_variables", f"{name} is not set in the environment of rank 0; export it")


def _conversations(args: NeoXArgs, speech: Speech) -> Conversations | None:
    assert args.rollout is not None
    entry = args.rollout["environment"]
    if entry is None:
        return None
    make = partial(
        Environments,
        entry,
        timeout_s=args.reward_timeout_s,
        workers=args.rollout["environment_workers"],
        variables=args.reward_variables or (),
    )
    return Conversations(speech, _reported(args, make, "rollout.environment"))


def _template(run: TrainingRun, needed: bool) -> ChatTemplate | None:
    """The chat template of the run, found by rank 0."""
    if not needed:
        return None

    def find() -> tuple[str, str]:
        template = find_template(run.args, run.tokenizer, run.companion_files)
        return template.text, template.source

    text, source = on_rank_zero(run.groups, find)
    return ChatTemplate(text, run.tokenizer, source)
