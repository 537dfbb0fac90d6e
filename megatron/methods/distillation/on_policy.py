"""Replaces the data's answers by answers that the student writes during training (`distillation.lmbda`)."""

from collections.abc import Sequence

import numpy as np

from megatron.callbacks import TrainingRun
from megatron.data import Batch, collation
from megatron.data.packed_dataset import answer_row
from megatron.distributed import run_on_all_ranks_of, run_on_each_rank
from megatron.generation.batching.requests import Event
from megatron.generation.complete import complete, prompts_of_all_ranks
from megatron.generation.sampling import SamplingParams
from megatron.generation.stopping import looks_for_stop
from megatron.methods.distillation.keys import distillation_keys
from megatron.methods.distillation.objective import with_teacher_values
from megatron.model import Model
from megatron.mpu import mix_seed

Prompt = tuple[list[int], int]  # tokens, and the seed of the answer


class OnPolicy:
    """Replaces the tokens after each row's prompt by an answer of the model under training.

    The prompt of a row is everything before its first trained token.
    """

    def __init__(self, run: TrainingRun) -> None:
        args = run.args
        keys = distillation_keys(args)
        self.run, self.width = run, args.seq_length + 1
        self.max_new_tokens: int = keys["max_new_tokens"]
        self.sampling = SamplingParams(temperature=keys["temperature"])
        self.collate = collation(args, run.tokenizer.eod)

    def __call__(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches with the tokens after each prompt replaced by the current model's answer.

        An answer ends with a stop token, after `max_new_tokens`, or at the end of the row. Rows without a
        trained token stay as they are. All ranks must call it together. Raises StopRequested after a stop
        signal.
        """
        prompts = [prompt for batch in batches for prompt in _prompts(batch)]
        with self.run.watchdog.phase("sampling answers of the student"), self.run.inference() as model:
            # If one data rank stops for a signal, all do
            own_answers = run_on_each_rank(self.run.groups, lambda: self._answers(model, prompts))
        groups = self.run.groups  # whose context ranks train the same rows
        answers = iter(run_on_all_ranks_of(groups.group("context"), groups.size("context"), lambda: own_answers)[0])
        return [self._with_answers(batch, [next(answers) for _ in _prompts(batch)]) for batch in batches]

    def _answers(self, model: Model, prompts: list[Prompt]) -> list[list[int]]:
        """Returns the model's answers to this data rank's prompts as token ids, including the stop token."""
        everyone, own_prompts = prompts_of_all_ranks(model, prompts)
        answers: list[list[int]] = [[] for _ in everyone]
        look_for_stop = looks_for_stop(self.run, model)

        def take(event: Event) -> None:
            answers[event.id].extend(event.tokens)
            look_for_stop(event)

        if everyone:
            complete(
                model,
                [tokens for tokens, _ in everyone],
                self.sampling,
                maximum_tokens=[min(self.max_new_tokens, self.width - len(tokens)) for tokens, _ in everyone],
                seeds=[seed for _, seed in everyone],
                stop_token_ids=tuple({*model.stop_token_ids, self.run.tokenizer.eos}),
                on_event=take,
            )
        return answers[own_prompts]

    def _with_answers(self, batch: Batch, answers: Sequence[list[int]]) -> Batch:
        rows, waiting = [], iter(answers)
        for number, prompt in enumerate(_prompt_lengths(batch)):
            tokens = batch.tokens[number, : prompt or None].tolist()
            rows.append(answer_row(tokens, next(waiting) if prompt else [], self.width, True))
        return with_teacher_values(self.collate(rows, seed=batch.seed), is_on_policy=True)


def _prompt_lengths(batch: Batch) -> list[int]:
    """Returns the number of tokens before the first trained token of each row; 0 if no token is trained."""
    trained = batch.loss_weights.numpy() > 0
    return [int(np.argmax(row)) + 1 if row.any() else 0 for row in trained]


def _prompts(batch: Batch) -> list[Prompt]:
    """Returns (tokens, seed for sampling) of the prompt of each row that has a trained token.

    The seed depends on the micro-batch and the row, not on the parallel layout.
    """
    lengths = _prompt_lengths(batch)
    return [
        (batch.tokens[number, :length].tolist(), mix_seed(batch.seed, "on_policy", number))
        for number, length in enumerate(lengths)
        if length
    ]
