"""The cache of keys and values against running every text from its beginning, in every layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron.generation import Completion, Model, Sampling, complete, for_inference
from megatron.generation.complete import cached_logits, next_logits
from megatron.mpu import ParallelGroups
from megatron.tokenizer import CharLevelTokenizer
from tests.generation.runs import LAYOUTS
from tests.model.runs import MODELS
from tests.model.stages import groups_of, random_weights, small, stage_with
from tests.pool import run_ranks

PROMPTS = [[5, 3, 9, 9, 1, 2, 14], [7], [3, 3, 3, 8, 8, 8, 8, 8, 2, 10, 11, 12, 4], [6, 1]]
LENGTHS = torch.tensor([len(prompt) for prompt in PROMPTS])
POSITIONS = 32  # of tests.model.stages.SMALL
TO_COME = POSITIONS - int(LENGTHS.max())  # the longest text uses every position there is
DECODED = 5
# A tied head likes to say the last token again, and never ends.
UNTIED = {name: {**values, "no_weight_tying": True} for name, values in MODELS.items()}
SAMPLINGS = (Sampling(), Sampling(2.0, top_k=9, top_p=0.95))


class Few(CharLevelTokenizer):
    """So few tokens that the end of document comes now and then."""

    vocab_size = 10


class Found(NamedTuple):
    """logits: of `DECODED` steps; texts: for each of `SAMPLINGS`."""

    logits: list[Tensor]
    texts: list[list[tuple[list[int], bool]]]


def random_model(values: dict[str, Any], world_size: int = 1) -> Model:
    args = for_inference(small(**values).for_world(world_size))
    groups = groups_of(args, world_size) if world_size > 1 else ParallelGroups.single()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.params_dtype]
    return Model(args, groups, Few(), stage_with(args, random_weights(args), groups).to(dtype), dtype)


def padded(columns: int) -> Tensor:
    """`PROMPTS` and so many columns more."""
    tokens = pad_sequence([torch.tensor(prompt) for prompt in PROMPTS], batch_first=True)
    return torch.nn.functional.pad(tokens, (0, columns))


def texts_of(completions: list[Completion]) -> list[tuple[list[int], bool]]:
    return [(completion.tokens, completion.finished) for completion in completions]


def logits_of(model: Model) -> list[Tensor]:
    """Of steps over fixed tokens after `PROMPTS`: from a cache, or without one if the configuration says so."""
    more = torch.randint(16, (len(PROMPTS), DECODED), generator=torch.Generator().manual_seed(1))
    tokens = padded(DECODED)
    tokens.scatter_(1, LENGTHS.unsqueeze(1) + torch.arange(DECODED), more)
    if model.args.recompute:
        return [next_logits(model, tokens, LENGTHS + step) for step in range(DECODED)]
    cache = model.stage.empty_cache(len(PROMPTS), tokens.shape[1] + 3)
    first = next_logits(model, tokens, LENGTHS, cache)
    return [first, *(cached_logits(model, tokens, LENGTHS + step, cache) for step in range(1, DECODED))]


def find(values: dict[str, Any], world_size: int = 1) -> Found:
    model = random_model(values, world_size)
    runs = [complete(model, PROMPTS, how, maximum_tokens=TO_COME, seeds=range(4)) for how in SAMPLINGS]
    return Found(logits_of(model), [texts_of(run) for run in runs])


def find_all(rank: int, world_size: int, layout: dict[str, Any]) -> dict[str, Found]:
    """For the pool."""
    return {name: find({**values, **layout}, world_size) for name, values in UNTIED.items()}


@pytest.fixture(scope="module")
def recomputed() -> dict[str, Found]:
    """Without a cache, in one process."""
    found = {name: find({**values, "recompute": True}) for name, values in UNTIED.items()}
    lengths = [{len(tokens) for run in found[name].texts for tokens, _ in run} for name in UNTIED]
    assert min(map(len, lengths)) > 1 and TO_COME in set.union(*lengths), "rows must end at different times"
    assert all(len({str(run) for run in found[name].texts}) == 2 for name in UNTIED), "sampling must matter"
    return found


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "dp2"])  # which runs one process twice
def test_cache_changes_no_token_in_any_layout(name: str, recomputed: dict[str, Found]) -> None:
    ranks, layout = LAYOUTS[name]
    for found in run_ranks(find_all, ranks, layout):
        for model, (logits, texts) in found.items():
            assert texts == recomputed[model].texts, model
            for step, (own, expected) in enumerate(zip(logits, recomputed[model].logits, strict=True)):
                torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5, msg=f"{model}, step {step}")


@pytest.mark.parametrize("name", UNTIED)
def test_bf16(name: str) -> None:
    values = {**UNTIED[name], "precision": "bfloat16"}
    exact, rounded, cached = (
        logits_of(random_model({**values, **changes}))
        for changes in ({"precision": "fp32", "recompute": True}, {"recompute": True}, {})
    )
    for step in range(DECODED):
        # The cache may move a logit as far as bf16 itself does, no further.
        error = (rounded[step] - exact[step]).abs().max()
        assert (cached[step] - exact[step]).abs().max() < 1.5 * error
    cache = random_model(values).stage.empty_cache(2, 3)
    assert {layer.keys.dtype for layer in cache.layers.values()} == {torch.bfloat16}


def test_what_stands_behind_a_row_is_never_attended_to() -> None:
    """Neither padding of prompts nor what an earlier text left in the cache."""
    model = random_model(MODELS["llama"])
    tokens = padded(1)
    columns = torch.arange(tokens.shape[1])
    found = []
    for filler, dirt in ((0, 0.0), (13, 1e3)):
        text = torch.where(columns < LENGTHS.unsqueeze(1), tokens, filler)
        text.scatter_(1, LENGTHS.unsqueeze(1), 9)
        cache = model.stage.empty_cache(len(PROMPTS), POSITIONS)
        for tensor in (tensor for layer in cache.layers.values() for tensor in layer):
            tensor.fill_(dirt)
        next_logits(model, text, LENGTHS, cache)
        found.append(cached_logits(model, text, LENGTHS + 1, cache))
    assert torch.equal(*found)


def shapes(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """For the pool: of the caches that this rank of tp2 x pp2 holds."""
    model = random_model({**MODELS["llama"], **LAYOUTS["tp2 x pp2"][1]}, world_size)
    cache = model.stage.empty_cache(3, 20).first(10).keep(torch.tensor([True, False, True]))
    return [tuple(tensor.shape) for layer in cache.layers.values() for tensor in layer]


def test_a_rank_caches_its_own_layers_and_heads() -> None:
    assert run_ranks(shapes, 4) == [[(2, 1, 10, 8)] * 4] * 4  # two of four layers, one of two key-value heads


class Counted(NamedTuple):
    tokens: list[tuple[int, int]]  # rows and columns of every forward
    logits: list[int]  # positions of every forward of the head


def counted(recompute: bool) -> Counted:
    model, counts = random_model({**MODELS["llama"], "recompute": recompute}), Counted([], [])
    layers = model.stage.layers
    layers["0"].register_forward_pre_hook(lambda _, inputs: counts.tokens.append(tuple(inputs[0].shape)))
    layers["8"].register_forward_pre_hook(lambda _, inputs: counts.logits.append(inputs[0].shape[0]))
    complete(model, PROMPTS, Sampling(1.0), maximum_tokens=TO_COME, seeds=range(4))
    return counts


def test_a_step_runs_one_token_of_unfinished_rows() -> None:
    cached, whole = counted(recompute=False), counted(recompute=True)
    assert cached.tokens[0] == whole.tokens[0] == (4, 13)
    assert {columns for _, columns in cached.tokens[1:]} == {1}
    rows = [rows for rows, _ in cached.tokens]
    assert rows == sorted(rows, reverse=True) and rows[-1] < 4, "finished rows leave"
    assert rows == [rows for rows, _ in whole.tokens]
    assert max(columns for _, columns in whole.tokens) > 13
    assert set(cached.logits) == set(whole.logits) == {1}
