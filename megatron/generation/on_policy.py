"""Answers that a model writes while it is trained, in place of those of the data (`distillation.lmbda`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.callbacks import TrainingRun
from megatron.data import Batch, collation
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.distributed import run_on_all_ranks_of, run_on_each_rank
from megatron.generation.batching.requests import Event
from megatron.generation.complete import complete
from megatron.generation.sampling import SamplingParams
from megatron.generation.stopping import looks_for_stop
from megatron.model import Model
from megatron.mpu import mix_seed

Prompt = tuple[list[int], int]  # tokens, and the seed of the answer


def answers_of(run: TrainingRun) -> "OnPolicy | None":
    """What answers prompts for a run whose steps, or some of them, are on policy; None for all others."""
    learned = run.args.distillation
    return OnPolicy(run) if learned is not None and learned["lmbda"] > 0.0 else None


class OnPolicy:
    """Replaces what follows the prompt of each row, which is all before its first trained token."""

    def __init__(self, run: TrainingRun) -> None:
        args = run.args
        assert args.distillation is not None
        self.run, self.width = run, args.seq_length + 1
        self.most: int = args.distillation["max_new_tokens"]
        self.sampling = SamplingParams(temperature=args.distillation["temperature"])
        self.collate = collation(args, run.tokenizer.eod)

    def __call__(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches with answers of the model as it is now, each to its end, `max_new_tokens` or the
        end of the row. Rows without a trained token stay as they are. All ranks call it together. Raises
        StopRequested where a stop signal comes first."""
        prompts = [prompt for batch in batches for prompt in _prompts(batch)]
        with self.run.watchdog.phase("answering prompts of the step"), self.run.inference() as model:
            # What one data rank gives up for a stop signal all give up
            answers = iter(run_on_each_rank(self.run.groups, lambda: self._answers(model, prompts)))
        return [self._with_answers(batch, [next(answers) for _ in _prompts(batch)]) for batch in batches]

    def _answers(self, model: Model, prompts: list[Prompt]) -> list[list[int]]:
        """The answers of this data rank's prompts, the tokens that end them among them."""
        first, everyone = 0, prompts
        if model.lockstep:  # all ranks write all answers
            groups = model.groups
            shares = run_on_all_ranks_of(groups.group("data"), groups.size("data"), lambda: prompts)
            rank = groups.rank("data")
            first, everyone = sum(map(len, shares[:rank])), [prompt for share in shares for prompt in share]
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
                maximum_tokens=[min(self.most, self.width - len(tokens)) for tokens, _ in everyone],
                seeds=[seed for _, seed in everyone],
                stop_token_ids=tuple({*model.stop_token_ids, self.run.tokenizer.eos}),
                on_event=take,
            )
        return answers[first : first + len(prompts)]

    def _with_answers(self, batch: Batch, answers: Sequence[list[int]]) -> Batch:
        rows, waiting = [], iter(answers)
        for number, prompt in enumerate(_prompt_lengths(batch)):
            if not prompt:
                rows.append(self._row(batch.tokens[number].tolist(), []))
                continue
            rows.append(self._row(batch.tokens[number, :prompt].tolist(), next(waiting)))
        return replace(self.collate(rows, seed=batch.seed), role="on_policy")

    def _row(self, prompt: list[int], answer: list[int]) -> TokenSample:
        tokens, labels = np.zeros(self.width, np.int64), np.full(self.width, MASKED, np.int64)
        filled = len(prompt) + len(answer)
        tokens[:filled] = prompt + answer
        labels[len(prompt) : filled] = answer
        begins = np.zeros(self.width, bool)
        begins[0] = begins[filled : filled + 1] = True
        return TokenSample(tokens, labels, begins, True, None, filled)


def _prompt_lengths(batch: Batch) -> list[int]:
    """Tokens before the first trained one of each row; 0 where none is trained."""
    trained = batch.loss_weights.numpy() > 0
    return [int(np.argmax(row)) + 1 if row.any() else 0 for row in trained]


def _prompts(batch: Batch) -> list[Prompt]:
    """Of the rows with a trained token. An answer's seed is that of its micro-batch and row, whatever the
    layout."""
    lengths = _prompt_lengths(batch)
    return [
        (batch.tokens[number, :length].tolist(), mix_seed(batch.seed, "on_policy", number))
        for number, length in enumerate(lengths)
        if length
    ]
