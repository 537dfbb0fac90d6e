"""Comparison of two answers to a prompt by a pairwise judge (`rollout.judge`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.methods.reinforcement.rewards import Completion, Scores
from megatron.methods.reinforcement.sampler import AnswerRequest
from megatron.mpu import mix_seed


def draw_swaps(seed: int, requests: Sequence[AnswerRequest]) -> list[bool]:
    """Draws for each prompt whether the judge sees its second answer first. Judges have a position bias, so
    half of the prompts are swapped. requests: two adjacent answers per prompt."""
    return [mix_seed(seed, "judge", prompt.number) % 2 == 1 for prompt, _ in requests[::2]]


def compare(
    completions: Sequence[Completion], swapped: Sequence[bool], judge: Callable[[Sequence[Completion]], Scores]
) -> Scores:
    """Returns a judge's verdicts on pairs as rewards: 1 for the better completion, 0 for the worse. Both are
    None where there is no verdict.

    completions: two adjacent ones per prompt. swapped: per prompt, whether the judge sees the second one
    first. judge: from pairs to the index (0 or 1) of the better completion. A failure has the row of the
    first completion of its pair.
    """
    pairs = []
    for left, right, swap in zip(completions[::2], completions[1::2], swapped, strict=True):
        assert isinstance(left.completion, str) and isinstance(right.completion, str)
        texts = (right.completion, left.completion) if swap else (left.completion, right.completion)
        pairs.append(replace(left, completion=texts, completion_ids=[]))
    verdicts = judge(pairs)
    parts: dict[str, list[float | None]] = {}
    for name, winners in verdicts.parts.items():
        parts[name] = []
        for winner, swap in zip(winners, swapped, strict=True):
            second_wins = None if winner is None else (winner == 1.0) != swap
            parts[name] += [None, None] if second_wins is None else [float(not second_wins), float(second_wins)]
    failures = [
        failure if failure.row is None else replace(failure, row=2 * failure.row) for failure in verdicts.failures
    ]
    return Scores(parts, failures, verdicts.seconds)
