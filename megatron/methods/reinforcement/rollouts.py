"""Makes the steps of a run that trains on its own answers.

The model answers prompts, the answers are judged, and micro-batches are built from them.
"""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from megatron.callbacks import TrainingRun
from megatron.checkpointing.huggingface import declared_eos_ids
from megatron.data import Batch
from megatron.data.set_config import data_seed
from megatron.distributed import on_rank_zero, run_on_all_ranks, run_on_all_ranks_of, run_on_each_rank
from megatron.generation.prompts.chat import ChatTemplate, find_shared_template
from megatron.methods.reinforcement.answers import Answer, as_pairs, at_tokens, batch_of
from megatron.methods.reinforcement.conversations import ENVIRONMENT, Conversations, Speech, with_environment
from megatron.methods.reinforcement.environments.environments import Environments
from megatron.methods.reinforcement.generation import (
    Generation,
    GenerationFiles,
    Shares,
    advantages_of,
    pairs_of,
    penalties,
    width_of,
)
from megatron.methods.reinforcement.judging import (
    REWARD_MODEL,
    RewardModel,
    check_variables,
    compare,
    draw_swaps,
    failure_of_all,
    judge_key,
    reported,
    reward_functions,
)
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_keys, rollout_servers
from megatron.methods.reinforcement.objective import divergence, rollout_values
from megatron.methods.reinforcement.prompts import Prompt, Prompts, read_rows, tokens_of
from megatron.methods.reinforcement.record import EmptySteps, RolloutRecord
from megatron.methods.reinforcement.rewards.functions import Completion, Scores
from megatron.methods.reinforcement.sampler import AnswerRequest, EngineSampler, ExactSampler, Sampler, Turn, turn_of
from megatron.methods.reinforcement.servers import ServerSampler
from megatron.mpu import mix_seed
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.process import look_for_stop

T = TypeVar("T")


class Rollouts:
    """Yields the micro-batches of each training step, from answers that the model writes.

    All ranks must call every method together.
    """

    def __init__(self, run: TrainingRun, folder: Path | None, run_id: str) -> None:
        """Reads the prompts, loads reward functions, and prepares sampling.

        folder: for `rollouts.jsonl`, and for the files of generations, from which a run that was interrupted
            within a generation resumes. None: nothing is written.
        Raises DataError for prompts that cannot be used, and ConfigError for such reward functions.
        """
        args = run.args
        self.run, self.args = run, args
        self.keys, self.options = ReinforcementKeys.read_from(args), rollout_keys(args)
        self.shares = Shares.from_args(args, run.groups.size("data"))
        self.local_batches = self.shares.micro_batches(run.groups.rank("data"))
        self.steps: int = self.shares.steps * self.options["num_iterations"]  # of a generation
        self.group: int = self.options["num_generations"]
        self.pairs = writes_pairs(args)
        generations = None if folder is None else folder / "generations"
        self.files = GenerationFiles(generations, self.steps, self.shares.total, args.save_dir)
        if self.shares.total % self.group:
            raise args.error(
                "rollout.num_generations",
                f"{self.group} answers per prompt do not divide the {self.shares.total} answers of a generation "
                "(train_batch_size x steps_per_generation); change one of the three",
            )
        read = partial(read_rows, self.options["prompts"], self.options["prompt_key"], self.options["chat"])
        rows = on_rank_zero(run.groups, read)
        template = _template(run, any(not isinstance(row.prompt, str) for row in rows))
        ends = {run.tokenizer.eod, run.tokenizer.eos, *declared_eos_ids(run.companion_files)}
        stop_token_ids = tuple(sorted(ends | set(template.stop_token_ids if template is not None else ())))
        self.speech = Speech(run, template, stop_token_ids)
        with run.watchdog.phase("reading the prompts"):
            tokens = on_rank_zero(run.groups, lambda: tokens_of(args, rows, self.speech.prompt_tokens))
        self.prompts = Prompts(rows, tokens, data_seed(args), self.options["shuffle"])
        on_rank_zero(run.groups, lambda: check_variables(args))
        self.rewards = run_on_each_rank(run.groups, lambda: reward_functions(args))
        columns = {name for row in rows for name in row.columns}
        on_rank_zero(run.groups, lambda: reported(args, partial(self.rewards.check, columns)))
        self.conversations = run_on_each_rank(run.groups, lambda: _conversations(args, self.speech))
        if self.conversations is not None:
            check = partial(self.conversations.environments.check, columns)
            on_rank_zero(run.groups, lambda: reported(args, check, "rollout.environment"))
        sampler = ExactSampler if self.options["exact"] else EngineSampler
        self.sampler: Sampler = sampler(run, stop_token_ids)
        servers = rollout_servers(args)
        self.server_sampler = (
            ServerSampler(run, run_id, servers, stop_token_ids, self.shares, self.conversations) if servers else None
        )
        self.reward_model = RewardModel(run) if self.keys.reward_model is not None else None
        self.record = RolloutRecord(run, folder, run_id, self.text_of)
        self.empty_steps = EmptySteps(run)
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yields this rank's micro-batches of each remaining step.

        Raises StopRequested if a stop signal comes during sampling; the next start samples that generation
        again.
        """
        while True:
            number, step = divmod(self.run.iteration, self.steps)
            if self._generation is None or self._generation.number != number:
                self._generation = None  # frees memory before the next generation is made
                read = partial(self.files.read, number)  # within a generation: an earlier process has written it
                self._generation = self._make(number) if step == 0 else on_rank_zero(self.run.groups, read)
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
        """Returns the requests of a generation for answers, one per row."""
        first_prompt = number * (self.shares.total // self.group)
        return [(self.prompts[first_prompt + row // self.group], row % self.group) for row in range(self.shares.total)]

    def _make(self, number: int) -> Generation:
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
                scores = self.reward_model(scores, answers)
            if self.conversations is not None:
                judge = partial(with_environment, scores, answers)
                scores = reported(self.args, judge, "rollout.environment")
        judged = time.perf_counter()
        weights = self.keys.reward_weights or [1.0] * len(scores.parts)
        rewards = np.array(scores.total(weights), np.float64)  # NaN for None
        old_logprobs, kl = self._trainer_logprobs(answers)
        penalised = rewards - penalties(self.args, answers, kl)
        if self.pairs:  # an answer without a judgement is neither better nor worse: no reward
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
        """Raises ConfigError if every answer failed to be judged and none has a reward.

        rewards: `[answers]`, with penalties, NaN for none.
        """
        failure = failure_of_all(scores.failures, rewards, 2 if self.options["judge"] is not None else 1)
        if failure is None or failure.row is None:
            return
        names = {REWARD_MODEL: "reward_model", ENVIRONMENT: "rollout.environment"}
        raise self.args.error(
            names.get(failure.function, judge_key(self.args)),
            f"{failure.function}: judging failed for all {len(requests)} answers of generation {number}, so none has a "
            f"reward; the first failure, for the prompt at {requests[failure.row][0].row.place}: {failure.reason}",
        )

    def _answers(self, requests: Sequence[AnswerRequest]) -> list[Answer]:
        """Samples answers to the requests in the training processes.

        Without an environment the model writes one text per request; with one it writes texts until all
        conversations are over.
        """
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
        """Samples the model's texts for the turns of all rows, and returns them on all ranks."""
        return self._gather(self.sampler([[turns[row] for row in rows] for rows in self.local_batches]))

    def _look_for_stop(self) -> None:
        """Raises StopRequested on all ranks if any rank has received a stop signal."""
        run_on_all_ranks(self.run.groups, look_for_stop)

    def _gather(self, values: Sequence[Sequence[T]]) -> list[T]:
        """Gathers one value per answer from all data ranks, in the order of the generation's rows.

        values: this rank's values, a sequence for each of its micro-batches. Context ranks of a data rank
            sample the same rows; the values of the first of them count.
        """
        groups = self.run.groups
        everyone = run_on_all_ranks_of(groups.group("data_context"), groups.size("data_context"), lambda: values)
        shares = everyone[:: groups.size("context")]
        row_values: dict[int, T] = {}
        for rank, batches in enumerate(shares):
            for rows, batch_values in zip(self.shares.micro_batches(rank), batches, strict=True):
                row_values.update(zip(rows, batch_values, strict=True))
        return [row_values[row] for row in range(self.shares.total)]

    def _judge(self, requests: Sequence[AnswerRequest], answers: Sequence[Answer]) -> Scores:
        completions = [self._completion(prompt, answer) for (prompt, _), answer in zip(requests, answers, strict=True)]
        if self.options["judge"] is None:
            return reported(self.args, lambda: self.rewards.score(completions))
        swapped = draw_swaps(self.args.seed, requests)
        return reported(self.args, lambda: compare(completions, swapped, self.rewards.score))

    def _completion(self, prompt: Prompt, answer: Answer) -> Completion:
        columns, conversation = prompt.row.columns, answer.transcript
        if conversation is None:
            return Completion(prompt.row.prompt, self.text_of(answer), answer.tokens, columns)
        texts = [str(message["content"]) for message in conversation.messages if message["role"] == "assistant"]
        return Completion(
            conversation.prompt, texts[-1] if texts else "", answer.tokens, columns, conversation.messages
        )

    def text_of(self, answer: Answer) -> str:
        """Returns the answer's text, without its stop token."""
        return self.speech.text(answer.tokens, answer.finished)

    def _trainer_logprobs(self, answers: Sequence[Answer]) -> tuple[list[list[float]] | None, np.ndarray | None]:
        """Returns (the trainer's log-probabilities of each answer's tokens, the KL of each answer from the
        reference).

        The first is None unless several steps train on the answers, or stale weights may have written them.
        The second is None unless rewards include the KL; it is summed over each answer's tokens.
        """
        several = not self.pairs and (self.steps > 1 or self.options["staleness"] > 0)
        in_reward = self.keys.rl_kl_in_reward
        if not several and not in_reward:
            return None, None
        width, no_values = width_of(self.args, answers), [0.0] * len(answers)
        unjudged = Generation(0, 0, list(answers), no_values, no_values, None)
        batches = [self._batch(unjudged, rows, width, rows.start) for rows in self.local_batches]
        with self.run.watchdog.phase("scoring answers"):
            batch_logprobs = self.run.engine.step_logprobs(batches)
            completed = self.run.engine.complete(batches) if in_reward else []
        old = []
        for rows, batch, logprobs in zip(self.local_batches, batches, batch_logprobs, strict=True):
            trained = torch.where(batch.loss_weights > 0, logprobs.cpu(), 0.0)
            old.append([at_tokens(answers[row], values) for row, values in zip(rows, trained, strict=True)])
        kl = [self._kl(batch, logprobs) for batch, logprobs in zip(completed, batch_logprobs, strict=False)]
        return self._gather(old) if several else None, np.array(self._gather(kl)) if in_reward else None

    def _kl(self, batch: Batch, logprobs: torch.Tensor) -> list[float]:
        """Returns each answer's KL between policy and reference model, summed over its trained tokens.

        logprobs: the policy's, `[answers, seq]`.
        """
        reference_logprobs = rollout_values(batch).reference_logprobs
        assert reference_logprobs is not None
        token_kl = divergence(self.keys.kl_impl, logprobs, reference_logprobs)
        return torch.where(batch.loss_weights > 0, token_kl, 0.0).sum(1).tolist()

    # -- steps of a generation -------------------------------------------------------------------------------

    def _batches(self, generation: Generation, step: int) -> list[Batch]:
        rows_of_step = self.local_batches[step * self.shares.accumulation : (step + 1) * self.shares.accumulation]
        advantages = generation.advantages
        trained = pairs_of(advantages, self.group) if self.pairs else range(len(advantages))
        width = width_of(self.args, [generation.answers[row] for row in trained])
        chosen = [([row for row in trained if row in rows], rows.start) for rows in rows_of_step]
        batches = [self._batch(generation, rows, width, first_row) for rows, first_row in chosen]
        return [as_pairs(batch) for batch in batches] if self.pairs else batches

    def _batch(self, generation: Generation, rows: Sequence[int], width: int, first_row: int) -> Batch:
        """Returns the micro-batch of the answers in `rows`.

        first_row: the first row of the micro-batch, also if it is not trained; seeds the dropout.
        """
        old = generation.old_logprobs
        return batch_of(
            [generation.answers[row] for row in rows],
            width,
            rewards=[generation.rewards[row] for row in rows],
            advantages=[generation.advantages[row] for row in rows],
            old_logprobs=None if old is None else [old[row] for row in rows],
            all_places=self.options["exact"],
            finished_only=self.keys.rl_mask_truncated,
            seed=mix_seed(self.args.seed, "rollout batch", self.run.iteration, first_row),
        )


def _conversations(args: ModelArgs, speech: Speech) -> Conversations | None:
    keys, rollout = ReinforcementKeys.read_from(args), rollout_keys(args)
    if rollout["environment"] is None:
        return None
    make = partial(
        Environments, rollout["environment"], timeout_s=keys.reward_timeout_s,
        workers=rollout["environment_workers"], variables=keys.reward_variables or (),
    )  # fmt: skip
    return Conversations(speech, reported(args, make, "rollout.environment"))


def _template(run: TrainingRun, has_messages: bool) -> ChatTemplate | None:
    """Returns the run's chat template, which rank 0 looks for; None if no prompt consists of messages."""
    if not has_messages:
        return None
    return find_shared_template(run.args, run.tokenizer, run.groups, run.companion_files)
