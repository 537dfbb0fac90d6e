"""The steps of a run that trains on its own answers.

The model answers prompts, the answers are judged, and micro-batches are built from them."""

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
from megatron.methods.reinforcement.answers import Answer, as_pairs, at_tokens, batch_of
from megatron.methods.reinforcement.conversations import ENVIRONMENT, Conversations, Speech, with_environment
from megatron.methods.reinforcement.environments.environments import Environments
from megatron.methods.reinforcement.generation import Generation, Shares, advantages_of, pairs_of, penalties, width_of
from megatron.methods.reinforcement.generation_files import GenerationFiles
from megatron.methods.reinforcement.judging import compare, draw_swaps
from megatron.methods.reinforcement.keys import ReinforcementKeys
from megatron.methods.reinforcement.objective import divergence, rollout_values
from megatron.methods.reinforcement.prompts import Prompt, Prompts, read_rows, tokens_of
from megatron.methods.reinforcement.record import RolloutRecord, judge_key
from megatron.methods.reinforcement.reward_model import NAME as REWARD_MODEL
from megatron.methods.reinforcement.reward_model import RewardModel
from megatron.methods.reinforcement.rewards import Completion, RewardError, RewardFunctions, Scores
from megatron.methods.reinforcement.sampler import AnswerRequest, EngineSampler, ExactSampler, Sampler, Turn, turn_of
from megatron.methods.reinforcement.server_addresses import rollout_servers
from megatron.methods.reinforcement.servers import ServerSampler
from megatron.methods.reinforcement.unrewarded import EmptySteps, failure_of_all
from megatron.mpu import mix_seed
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.process import look_for_stop

T = TypeVar("T")


class Rollouts:
    """Gives the training loop its steps. All ranks call every method together."""

    def __init__(self, run: TrainingRun, folder: Path | None, run_id: str) -> None:
        """folder: for `rollouts.jsonl`, and for generations, which a run interrupted between the steps of one
        needs. None: nothing is written.

        Raises DataError for prompts, ConfigError for reward functions that cannot be used.
        """
        args = run.args
        keys = ReinforcementKeys.read_from(args)
        assert keys.rollout is not None
        self.run, self.args = run, args
        self.options = keys.rollout
        self.shares = Shares.from_args(args, run.groups.size("data"))
        self.steps: int = self.shares.steps * keys.rollout["num_iterations"]  # of a generation
        self.group: int = keys.rollout["num_generations"]
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
            tokens = on_rank_zero(run.groups, lambda: tokens_of(args, rows, self.speech.prompt_tokens))
        self.prompts = Prompts.from_args(args, rows, tokens)
        on_rank_zero(run.groups, lambda: _check_variables(args))
        self.rewards = run_on_each_rank(run.groups, lambda: _reward_functions(args))
        columns = {name for row in rows for name in row.columns}
        if keys.rollout["judge"] is not None:
            on_rank_zero(run.groups, lambda: _reported(args, self.rewards.check))
        elif keys.reward_functions:
            on_rank_zero(run.groups, lambda: _reported(args, partial(self.rewards.check, columns)))
        self.conversations = run_on_each_rank(run.groups, lambda: _conversations(args, self.speech))
        if self.conversations is not None:
            check = partial(self.conversations.check, columns)
            on_rank_zero(run.groups, lambda: _reported(args, check, "rollout.environment"))
        sampler = ExactSampler if keys.rollout["exact"] else EngineSampler
        self.sampler: Sampler = sampler(run, stop_token_ids)
        servers = rollout_servers(args)
        self.server_sampler = (
            ServerSampler(run, run_id, servers, stop_token_ids, self.shares, self.conversations) if servers else None
        )
        self.reward_model = RewardModel(run) if keys.reward_model is not None else None
        self.record = RolloutRecord(run, folder, run_id, self.text_of)
        self.empty_steps = EmptySteps(run)
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yields this rank's micro-batches of each remaining step. Raises StopRequested where a stop signal
        comes during sampling; the next start samples that generation again."""
        while True:
            number, step = divmod(self.run.iteration, self.steps)
            if self._generation is None or self._generation.number != number:
                self._generation = None  # freed before the next is made
                self._generation = self._make(number) if step == 0 else self._read(number)
            if step < self.shares.steps:  # later iterations repeat the same answers
                rows = slice(step * self.shares.rows_per_step, (step + 1) * self.shares.rows_per_step)
                self.empty_steps.look(self._generation.rewards[rows], self._generation.answers[rows])
            yield self._batches(self._generation, step % self.shares.steps)

    def close(self) -> None:
        """Ends the processes of reward functions and environments, and requests to servers."""
        if self.conversations is not None:
            self.conversations.close()
        if self.server_sampler is not None:
            self.server_sampler.close()
        self.rewards.close()

    # -- a generation ----------------------------------------------------------------------------------------

    def _requests(self, number: int) -> list[AnswerRequest]:
        """Returns a generation's requests, one per row."""
        first_prompt = number * (self.shares.total // self.group)
        return [(self.prompts[first_prompt + row // self.group], row % self.group) for row in range(self.shares.total)]

    def _make(self, number: int) -> Generation:
        keys = ReinforcementKeys.read_from(self.args)
        self._look_for_stop()
        requests, version = self._requests(number), number
        start_time = time.perf_counter()
        with self.run.watchdog.phase("sampling answers"):
            if self.server_sampler is not None:
                answers, version = self.server_sampler(number, self._requests)
            else:
                answers = self._answers(requests)
        self._look_for_stop()
        sampled = time.perf_counter()
        with self.run.watchdog.phase("judging answers"):
            scores = on_rank_zero(self.run.groups, lambda: self._judge(requests, answers))
            if self.reward_model is not None:
                model_scores, failures = self.reward_model(answers)
                parts = {**scores.parts, "reward_model": model_scores}
                scores = replace(scores, parts=parts, failures=[*scores.failures, *failures])
            if self.conversations is not None:
                judge = partial(with_environment, scores, answers)
                scores = _reported(self.args, judge, "rollout.environment")
        judged = time.perf_counter()
        weights = keys.reward_weights or [1.0] * len(scores.parts)
        rewards = np.array([math.nan if value is None else value for value in scores.total(weights)])
        old_logprobs, kl = self._trainer_logprobs(answers)
        penalised = rewards - penalties(self.args, answers) - (0.0 if kl is None else keys.kl_div_beta * kl)
        if self.pairs:  # a failed answer does not make the other one better
            failed = [failure.row for failure in scores.failures if failure.row is not None]
            penalised[[*failed, *(row for row, answer in enumerate(answers) if not answer.length)]] = math.nan
        advantages = advantages_of(self.args, penalised, self.record.history)
        generation = Generation(number, version, answers, rewards.tolist(), advantages, old_logprobs)
        self.record.take(generation, requests, scores, penalised, sampled - start_time, judged - sampled)
        self._end_where_all_failed(number, requests, scores, penalised)
        if self.steps > 1:
            on_rank_zero(self.run.groups, lambda: self.files.write(generation, self.record.saved))
        return generation

    def _end_where_all_failed(
        self, number: int, requests: Sequence[AnswerRequest], scores: Scores, rewards: np.ndarray
    ) -> None:
        """Raises ConfigError where every answer failed and none has a reward. rewards: with penalties, as
        trained."""
        failure = failure_of_all(scores.failures, rewards, 2 if self.options["judge"] is not None else 1)
        if failure is None or failure.row is None:
            return
        keys = {REWARD_MODEL: "reward_model", ENVIRONMENT: "rollout.environment"}
        raise self.args.error(
            keys.get(failure.function, judge_key(self.args)),
            f"{failure.function}: all {len(requests)} answers of generation {number} failed and none has a reward; the "
            f"first, {requests[failure.row][0].row.place}: {failure.reason}",
        )

    def _answers(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        """Samples answers in the training processes: one turn each, or turns until all conversations are
        over."""
        if self.conversations is None:
            return self._sample([turn_of(self.run, request) for request in requests])
        conversations, groups = self.conversations, self.run.groups
        turns = on_rank_zero(groups, lambda: conversations.begin(requests))
        while any(turn.room for turn in turns):
            written = self._sample(turns)
            self._look_for_stop()
            turns = on_rank_zero(groups, partial(conversations.take, written))
        return on_rank_zero(groups, conversations.answers)

    def _sample(self, turns: Sequence[Turn]) -> list[Answer]:
        """Samples the turns of all rows, on all ranks, and returns all answers."""
        local_batches = self.shares.micro_batches(self.run.groups.rank("data"))
        return self._gather(self.sampler([[turns[row] for row in rows] for rows in local_batches]))

    def _read(self, number: int) -> Generation:
        """Reads a generation that an earlier process has made."""
        return on_rank_zero(self.run.groups, lambda: self.files.read(number))

    def _look_for_stop(self) -> None:
        """Raises StopRequested on all ranks once a stop signal has come to any."""
        run_on_all_ranks(self.run.groups, look_for_stop)

    def _gather(self, written: Sequence[Sequence[Answer]]) -> list[Answer]:
        """Gathers the answers of all data ranks, in the order of the generation's rows."""
        groups = self.run.groups
        shares = run_on_all_ranks_of(groups.group("data"), groups.size("data"), lambda: written)
        all_answers: list[Answer | None] = [None] * self.shares.total
        for rank, batches in enumerate(shares):
            for rows, answers in zip(self.shares.micro_batches(rank), batches, strict=True):
                all_answers[rows.start : rows.stop] = answers
        return [answer for answer in all_answers if answer is not None]

    def _judge(self, requests: Sequence[AnswerRequest], answers: Sequence[Answer]) -> Scores:
        keys = ReinforcementKeys.read_from(self.args)
        completions = [self._completion(prompt, answer) for (prompt, _), answer in zip(requests, answers, strict=True)]
        if self.options["judge"] is not None:
            order = draw_swaps(self.args.seed, requests)
            return _reported(self.args, lambda: compare(completions, order, self.rewards.score))
        if not keys.reward_functions:
            return Scores({}, [], 0.0)
        return _reported(self.args, lambda: self.rewards.score(completions))

    def _completion(self, prompt: Prompt, answer: Answer) -> Completion:
        columns, conversation = prompt.row.columns, answer.transcript
        if conversation is None:
            return Completion(prompt.row.prompt, self.text_of(answer), answer.tokens, columns)
        texts = [str(message["content"]) for message in conversation.messages if message["role"] == "assistant"]
        return Completion(
            conversation.prompt, texts[-1] if texts else "", answer.tokens, columns, conversation.messages
        )

    def text_of(self, answer: Answer) -> str:
        """Returns the answer's text, without its end token."""
        return self.speech.text(answer.tokens, answer.finished)

    def _trainer_logprobs(self, answers: Sequence[Answer]) -> tuple[list[list[float]] | None, np.ndarray | None]:
        """Returns the trainer's log-probabilities of the answers' tokens, and each answer's KL from the
        reference.

        The former are None unless several steps train on the answers or stale weights may have written them;
        the latter, a sum per answer, is None unless it is part of rewards."""
        keys = ReinforcementKeys.read_from(self.args)
        several = not self.pairs and (self.steps > 1 or self.options["staleness"] > 0)
        if not several and not keys.rl_kl_in_reward:
            return None, None
        width, no_values = width_of(self.args, answers), [0.0] * self.shares.rows
        local_batches = self.shares.micro_batches(self.run.groups.rank("data"))
        batches = [
            self._batch([answers[row] for row in rows], width, no_values, no_values, None, rows.start)
            for rows in local_batches
        ]
        with self.run.watchdog.phase("scoring answers"):
            batch_logprobs = self.run.engine.step_logprobs(batches)
            completed = self.run.engine.complete(batches) if keys.rl_kl_in_reward else []
        old = [
            at_tokens(answers[row], torch.where(weights > 0, values, 0.0))
            for rows, batch, logprobs_of_batch in zip(local_batches, batches, batch_logprobs, strict=True)
            for row, values, weights in zip(rows, logprobs_of_batch.cpu(), batch.loss_weights, strict=True)
        ]
        sums = [
            value
            for batch, logprobs_of_batch in zip(completed, batch_logprobs, strict=False)
            for value in self._kl(batch, logprobs_of_batch)
        ]
        results = run_on_all_ranks_of(self.run.groups.group("data"), self.run.groups.size("data"), lambda: (old, sums))
        logprobs: list[list[float]] = [[] for _ in answers]
        kl = np.zeros(len(answers))
        for rank, (rank_logprobs, rank_kl) in enumerate(results):
            places = [row for rows in self.shares.micro_batches(rank) for row in rows]
            for place, values in zip(places, rank_logprobs, strict=True):
                logprobs[place] = values
            if rank_kl:
                kl[places] = rank_kl
        return logprobs if several else None, kl if keys.rl_kl_in_reward else None

    def _kl(self, batch: Batch, logprobs: torch.Tensor) -> list[float]:
        """Returns the sum of each answer's KL from the reference."""
        keys = ReinforcementKeys.read_from(self.args)
        reference_logprobs = rollout_values(batch).reference_logprobs
        assert reference_logprobs is not None
        token_kl = divergence(keys.kl_impl, logprobs, reference_logprobs)
        return torch.where(batch.loss_weights > 0, token_kl, 0.0).sum(1).tolist()

    # -- its steps -------------------------------------------------------------------------------------------

    def _batches(self, generation: Generation, step: int) -> list[Batch]:
        local_batches = self.shares.micro_batches(self.run.groups.rank("data"))
        rows_of_step = local_batches[step * self.shares.accumulation : (step + 1) * self.shares.accumulation]
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
                first_row,
            )
            for rows, first_row in chosen
        ]
        return [as_pairs(batch) for batch in batches] if self.pairs else batches

    def _batch(
        self,
        answers: Sequence[Answer],
        width: int,
        rewards: Sequence[float],
        advantages: Sequence[float],
        old_logprobs: Sequence[Sequence[float]] | None,
        first_row: int,
    ) -> Batch:
        keys = ReinforcementKeys.read_from(self.args)
        return batch_of(
            answers, width, rewards=rewards, advantages=advantages, old_logprobs=old_logprobs,
            all_places=self.options["exact"], finished_only=keys.rl_mask_truncated,
            seed=mix_seed(self.args.seed, "rollout batch", self.run.iteration, first_row),
        )  # fmt: skip


def _reported(args: NeoXArgs, work: Callable[[], T], key: str | None = None) -> T:
    """Returns `work()`. Turns a RewardError of users' code into an error that names key, file and line."""
    try:
        return work()
    except RewardError as problem:
        raise args.error(key or judge_key(args), str(problem)) from problem


def _reward_functions(args: NeoXArgs) -> RewardFunctions:
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    judge = keys.rollout["judge"]
    functions = keys.reward_functions or () if judge is None else (judge,)
    other_parts = {"reward_model": keys.reward_model, ENVIRONMENT: keys.rollout["environment"]}
    for name, entry_name in other_parts.items():
        if entry_name is not None and any(entry.endswith(f":{name}") for entry in functions):
            raise args.error("reward_functions", f"{name} is the name of another part of rewards; rename the function")
    make = partial(
        RewardFunctions,
        functions,
        timeout_s=keys.reward_timeout_s,
        workers=keys.reward_workers,
        pairwise=judge is not None,
        variables=keys.reward_variables or (),
        hidden=_hidden(args),
    )
    return _reported(args, make)


def _hidden(args: NeoXArgs) -> list[str]:
    """Returns the folders that users' code may not read: prompts with their solutions, and earlier
    answers."""
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    folders = {Path.cwd(), *(Path(name).resolve().parent for name in keys.rollout["prompts"])}
    if args.save is not None:
        folders.add(Path(args.save).resolve())
    return sorted(map(str, folders))


def _check_variables(args: NeoXArgs) -> None:
    """Raises ConfigError for a variable of `reward_variables` that is unset on rank 0, which starts
    functions."""
    keys = ReinforcementKeys.read_from(args)
    for name in keys.reward_variables or ():
        if name not in os.environ:
            raise args.error("reward_variables", f"{name} is not set in the environment of rank 0; export it")


def _conversations(args: NeoXArgs, speech: Speech) -> Conversations | None:
    keys = ReinforcementKeys.read_from(args)
    assert keys.rollout is not None
    entry = keys.rollout["environment"]
    if entry is None:
        return None
    make = partial(
        Environments,
        entry,
        timeout_s=keys.reward_timeout_s,
        workers=keys.rollout["environment_workers"],
        variables=keys.reward_variables or (),
    )
    return Conversations(speech, _reported(args, make, "rollout.environment"))


def _template(run: TrainingRun, has_messages: bool) -> ChatTemplate | None:
    """Returns the run's chat template, which rank 0 finds; None if no prompt needs it."""
    if not has_messages:
        return None

    def find() -> tuple[str, str]:
        template = find_template(run.args, run.tokenizer, run.companion_files)
        return template.text, template.source

    text, source = on_rank_zero(run.groups, find)
    return ChatTemplate(text, run.tokenizer, source)
