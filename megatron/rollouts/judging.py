"""Two answers to a prompt before a pairwise judge (`rollout.judge`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.mpu import mix_seed
from megatron.rollouts.rewards import Completion, Scores
from megatron.rollouts.sampler import Asked


def second_first(seed: int, asked: Sequence[Asked]) -> list[bool]:
    """Of each prompt, whether the judge sees its second answer first: judges like places, and half of the
    prompts are shown either way. asked: two answers to each prompt, beside each other."""
    return [mix_seed(seed, "judge", prompt.number) % 2 == 1 for prompt, _ in asked[::2]]


def compare(
    completions: Sequence[Completion], swapped: Sequence[bool], judge: Callable[[Sequence[Completion]], Scores]
) -> Scores:
    """The verdicts on pairs of completions as rewards: 1 for the better one, 0 for the other, None for both
    where there is no verdict.

    completions: two to each prompt, beside each other. swapped: of each prompt, whether the judge sees the
    second one first. judge: from pairs to the place of the better one. A failure stands at the first
    completion of its pair.
    """
    pairs = []
    for first, second, swap in zip(completions[::2], completions[1::2], swapped, strict=True):
        assert isinstance(first.completion, str) and isinstance(second.completion, str)
        texts = (second.completion, first.completion) if swap else (first.completion, second.completion)
        pairs.append(replace(first, completion=texts, completion_ids=[]))
    found = judge(pairs)
    parts: dict[str, list[float | None]] = {}
    for name, places in found.parts.items():
        parts[name] = []
        for place, swap in zip(places, swapped, strict=True):
            second_wins = None if place is None else (place == 1.0) != swap
            parts[name] += [None, None] if second_wins is None else [float(not second_wins), float(second_wins)]
    failures = [one if one.row is None else replace(one, row=2 * one.row) for one in found.failures]
    return Scores(parts, failures, found.seconds)
