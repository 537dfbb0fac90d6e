"""Scores of continuations against transformers and whole texts run one by one; the work that they take."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.generation.scoring import logprobs as scoring
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, score
from megatron.generation.scoring.tree_rows import make_tree_rows, rolling_windows
from megatron.model import Model, for_inference
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import CharLevelTokenizer
from tests.checkpointing.family_models import CASES, VOCAB, ours_of, random_model
from tests.generation.runs import LAYOUTS
from tests.generation.scoring import cases
from tests.generation.scoring.cases import COLUMNS, UNTIED, assert_same, model_of, one_by_one, some_requests
from tests.marks import with_more
from tests.model.stages import make_stage
from tests.pool import run_ranks

IN_TEST = ("gpt_neox", "gpt 2", "llama dynamic", "gemma 2", "gemma 3", "phi 3 long", "ministral 3", "cohere 2",
           "mixtral")  # fmt: skip
MORE_CASES = ("mistral", "smollm 3 windows", "qwen 2 moe windows", "gpt oss", "nemotron h")
CONTEXT, CHOICES = [5, 3, 9, 9, 1, 2, 14], [[4, 4, 8], [7, 1, 6, 6], [2], [7, 9]]


@torch.no_grad()
def logits_of_transformers(model: Any, tokens: list[int], num_context: int) -> Tensor:
    return model(torch.tensor([tokens])).logits[0, num_context - 1 :]


@pytest.mark.parametrize("case", with_more(CASES, *MORE_CASES, product=CASES.keys() - {*IN_TEST, *MORE_CASES}))
def test_against_transformers(case: str) -> None:
    hf_model = random_model(case)
    keys, weights = ours_of(hf_model)
    args = for_inference(NeoXArgs.from_dict({**keys, "precision": "fp32"}).for_world(1))
    stage = make_stage(args, weights)
    neox_model = Model(args, ParallelGroups.single(), CharLevelTokenizer(), stage, torch.float32, columns=VOCAB)
    requests = some_requests(VOCAB, neox_model.positions)
    context = requests[0][0]
    requests.append((context, [int(logits_of_transformers(hf_model, context, len(context))[-1].argmax())]))
    expected = one_by_one(hf_model, requests, logits_of_transformers)
    assert expected[-1].greedy == [True]
    for batch_size in (None, 1):
        assert_same(score(neox_model, requests, batch_size=batch_size), expected)


@pytest.fixture(scope="module")
def full_text_scores() -> dict[str, list[ContinuationScore]]:
    models = {name: model_of(values) for name, values in UNTIED.items()}
    return {name: one_by_one(model, some_requests(COLUMNS, model.positions)) for name, model in models.items()}


# Inference is without sequence parallelism.
@pytest.mark.parametrize("name", with_more([x for x in LAYOUTS if x != "tp2+sp"], product=["tp2", "pp2"]))
def test_in_every_layout(name: str, full_text_scores: dict[str, list[ContinuationScore]]) -> None:
    ranks, layout = LAYOUTS[name]
    names = [model for model in UNTIED if ranks == 1 or model in ("llama", "window", "moe", "hybrid", "dynamic hybrid")]
    for scores in run_ranks(cases.scored, ranks, layout, names):
        for model, model_scores in scores.items():
            assert_same(model_scores, full_text_scores[model])


def test_bf16_takes_the_softmax_in_fp32() -> None:
    model = model_of({**UNTIED["llama"], "precision": "bfloat16"})
    logits = cases.logits_after(model, [*CONTEXT, 4, 4], len(CONTEXT))
    assert logits.dtype == torch.bfloat16
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor([[4], [4], [8]])).squeeze(1).tolist()
    assert score(model, [(CONTEXT, [4, 4, 8])])[0].logprobs == pytest.approx(expected, abs=1e-5)


def count_tokens(model: Model, requests: list[ScoreRequest], **options: Any) -> tuple[int, int]:
    """Tokens that went through the blocks, and through the head."""
    blocks, head = [], []
    layers = model.stage.layers
    hooks = [layers[str(i)].register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(inputs[0].shape[:2]))
             for i, sizes in ((0, blocks), (model.stage.specs[-1].index, head))]  # fmt: skip
    score(model, requests, **options)
    for hook in hooks:
        hook.remove()
    return sum(map(math.prod, blocks)), sum(map(math.prod, head))


def test_a_context_is_run_once() -> None:
    """Distinct contexts and continuations, each token once; none of the last, from which nothing follows."""
    model = model_of(UNTIED["llama"])
    other_context = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    requests = [(CONTEXT, choice) for choice in CHOICES] + [(other_context, choice) for choice in CHOICES]
    inputs = sum(len(choice) - 1 for choice in ([4, 4, 8], [7, 1, 6, 6]))  # [7, 9] begins as the second
    expected = len(CONTEXT) + len(other_context) + 2 * inputs
    unshared = sum(len(context) + len(choice) - 1 for context, choice in requests)
    tokens, logits = count_tokens(model, requests, batch_size=1)
    assert tokens == expected < unshared / 2
    assert logits == 2 * (1 + inputs), "the context's last token once, and each token that is run"
    # Together they are padded, to the longest row.
    assert count_tokens(model, requests) == (2 * (len(other_context) + inputs), logits)


def test_contexts_too_short_to_share() -> None:
    """A short context is run again rather than that long branches attend over each other's places."""
    texts = [list(range(i, i + 200)) for i in range(4)]
    shared = make_tree_rows([(i, (texts[0], text)) for i, text in enumerate(texts)], hidden_size=512)
    unshared = make_tree_rows([(i, ([0], text)) for i, text in enumerate(texts)], hidden_size=512)
    assert [row.branches[-1] for row in shared] != [1] * 4
    assert [row.branches[-1] for row in unshared] == [1] * 4
    assert sum(len(row.tokens) for row in unshared) == 4 * 200


def test_rows_of_models_with_states_are_one_text() -> None:
    """A continuation that is a prefix of another shares its row; single tokens take any row."""
    model = model_of(UNTIED["hybrid"])
    texts = [[4, 4, 8], [7, 1, 6, 6], [2], [7, 9], [7, 1, 6]]
    rows = make_tree_rows([(i, (CONTEXT, text)) for i, text in enumerate(texts)], hidden_size=512, branching=False)
    assert [(row.tokens, row.branched) for row in rows] == [([*CONTEXT, 7, 1, 6], False), ([*CONTEXT, 4, 4], False)]
    requests = [(CONTEXT, text) for text in texts]
    tokens, logits = count_tokens(model, requests, batch_size=1)
    assert (tokens, logits) == (2 * len(CONTEXT) + 5, 2 + 5)


def test_the_longest_are_run_first() -> None:
    model = model_of(UNTIED["llama"])
    widths: list[tuple[int, ...]] = []
    hook = model.stage.layers["0"].register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape))
    done: list[int] = []
    score(model, some_requests(COLUMNS, model.positions), batch_size=3, on_progress=done.append)
    hook.remove()
    assert max(rows for rows, _ in widths) == 3
    turns = sum(b > a for (_, a), (_, b) in pairwise(widths))
    assert turns == 1, "branched rows, then the others"
    assert done == sorted(done) and done[-1] == len(some_requests(COLUMNS, model.positions)) and len(set(done)) > 4


@pytest.mark.parametrize("name", ["llama", "learned", "window", "dynamic"])
def test_width_that_gpus_like(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with branches are filled up to a multiple of 8 there; that changes no score."""
    model = model_of(UNTIED[name])
    requests = some_requests(COLUMNS, model.positions)
    expected = score(model, requests)
    make_batch, widths = scoring._batch, set()

    def on_gpu(rows: Any, _: bool) -> Any:
        batch = make_batch(rows, True)
        if batch.branches is not None:
            widths.add(batch.tokens.shape[1])
        return batch

    monkeypatch.setattr(scoring, "_batch", on_gpu)
    assert_same(score(model, requests), expected)
    assert widths and all(width % 8 == 0 for width in widths)


def test_too_long_requests() -> None:
    model = model_of(UNTIED["llama"])  # 32 positions
    long, short = list(range(40)), (CONTEXT, CHOICES[0])
    requests = [short, (long, [7, 8]), ([1], long)]
    with pytest.raises(ConfigError, match="eval_overlong: refuse: text 1 .* 40 .* 2 .* 32"):
        score(model, requests, overlong="refuse")
    with pytest.raises(ConfigError, match="eval_overlong: truncate_left: text 2 .* 1 .* 40 "):
        score(model, requests)
    scored, truncated_score = score(model, requests[:2])
    assert_same([scored], one_by_one(model, [short]))
    assert truncated_score.truncated == 9
    assert_same([truncated_score], one_by_one(model, [(long[9:], [7, 8])]))
    scored, *skipped = score(model, requests, overlong="skip")
    assert_same([scored], one_by_one(model, [short]))
    assert [skipped_score.skipped for skipped_score in skipped] == [True, True] and skipped[0].logprobs == [
        -math.inf
    ] * 2


def test_no_requests_and_empty_ones() -> None:
    model = model_of(UNTIED["llama"])
    assert score(model, []) == []
    assert score(model, [(CONTEXT, [])]) == [ContinuationScore([], [])]
    with pytest.raises(ValueError, match="request 0 "):
        score(model, [([], [1])])
    with torch.no_grad():
        next(iter(model.stage.parameters())).fill_(math.nan)
    with pytest.raises(CheckpointError, match="NaN .*fp32"):
        score(model, [(CONTEXT, [1])])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_rolling_windows(length: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    tokens = list(range(100, 100 + length))
    windows = utils.get_rolling_token_windows(tokens, 5, max_seq_len=8, context_len=1)
    expected = [tuple(map(list, utils.make_disjoint_window(window))) for window in windows]
    assert rolling_windows(tokens, 5, 8) == expected
