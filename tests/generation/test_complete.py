"""The loop over tokens: the same text in every layout, no token that does not exist, the end of document."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import DamagedError
from megatron.generation import Completion, Event, SamplingParams, complete, samples
from megatron.generation.model import Model
from megatron.generation.samples import GeneratedSample, Prompt, generate_samples
from megatron.generation.scoring.logprobs import score
from megatron.model.init import stage_parameters
from tests.generation.runs import GOLDEN_PROMPTS, LAYOUTS, QUIET, golden_model, sampled, written
from tests.pool import run_ranks
from tests.training.runs import NEOX, config, run_to_end

SAMPLED = {"temperature": 0.9, "top_k": 100, "top_p": 0.95}
ONE_PROCESS = LAYOUTS["one process"][1]


def rows(generated: Any) -> list[tuple]:
    """Returns every field that must not depend on the layout: all but time."""
    return [(s.context, s.text, s.length, s.finished, s.message) for s in generated]


@pytest.mark.more
def test_samples_are_the_same_in_every_layout() -> None:
    run = "llama_pp1_mp1"
    expected, reseeded = (
        run_ranks(sampled, 1, run, {**ONE_PROCESS, **SAMPLED, **seed})[0] for seed in ({}, {"seed": 1})
    )
    assert rows(expected) != rows(reseeded), "the seed must matter"
    assert len({s.text for s in expected}) == 5
    for name in ("tp2+sp", "pp2", "dp2", "tp2 x pp2"):
        ranks, layout = LAYOUTS[name]
        for everyone in run_ranks(sampled, ranks, run, {**layout, **SAMPLED}):
            assert rows(everyone) == rows(expected), name


def shared_out(rank: int, world_size: int) -> int:
    """For the pool: how many rows this rank ran."""
    ran = []

    def counting(model: Model, prompts: Any, *args: Any, **kwargs: Any) -> list[Completion]:
        ran.append(len(prompts))
        return complete(model, prompts, *args, **kwargs)

    samples.complete = counting  # type: ignore[attr-defined] # this process is the pool's throw-away fork
    sampled(rank, world_size, "neox_pp1_mp1", LAYOUTS["dp2"][1])
    return sum(ran)


def test_data_parallel_ranks_share_the_prompts() -> None:
    assert run_ranks(shared_out, 2) == [3, 2]


def reported(rank: int, world_size: int, layout: Mapping[str, Any]) -> tuple[list[GeneratedSample], list[list[float]]]:
    """For the pool: sampled texts with log-probabilities, and those that scoring finds."""
    model = golden_model("neox_pp1_mp1", {**layout, "temperature": 0.7, "maximum_tokens": 5, "return_logprobs": 2})
    generated = generate_samples(model, [Prompt("", prompt, None) for prompt in GOLDEN_PROMPTS], QUIET)
    written = [[entry["token"] for entry in sample.logprobs or ()] for sample in generated]
    return generated, [entry.logprobs for entry in score(model, list(zip(GOLDEN_PROMPTS, written, strict=True)))]


@pytest.mark.parametrize("name", ["one process", "tp2 x pp2"])
def test_log_probabilities_are_those_of_scoring(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    for generated, expected in run_ranks(reported, ranks, layout):
        for sample, logprobs in zip(generated, expected, strict=True):
            assert sample.logprobs is not None and len(sample.logprobs) == sample.length > 0
            assert [entry["logprob"] for entry in sample.logprobs] == pytest.approx(logprobs, abs=1e-5)
            assert all(
                len(entry["top"]) == 2 and entry["top"][0][1] >= entry["logprob"] - 1e-6 for entry in sample.logprobs
            )
            assert list(json.loads(sample.line()))[-1] == "logprobs"


def steered(rank: int, world_size: int, bias: Mapping[int, float]) -> tuple[list[list[int]], list[bool], list[Event]]:
    """For the pool: greedy and sampled tokens of a model whose head prefers the given vocabulary rows."""
    model = golden_model("neox_pp1_mp1", ONE_PROCESS)
    param = {f"{layer}.{name}": value for layer, name, value in stage_parameters(model.stage)}
    with torch.no_grad():
        param["7.norm.weight"].zero_()
        param["7.norm.bias"].fill_(1.0)  # so that the logits are the row sums of the head
        param["8.final_linear.weight"].zero_()
        for token, value in bias.items():
            param["8.final_linear.weight"][token] = value
    events: list[Event] = []
    done = complete(
        model, GOLDEN_PROMPTS, SamplingParams(1.0), maximum_tokens=4, seeds=range(4), on_event=events.append
    )
    return [c.tokens for c in done], [c.finished for c in done], events


def test_padding_of_the_vocabulary_is_never_sampled() -> None:
    tokens, _, events = run_ranks(steered, 1, {380: 9.0, 383: 9.0, 7: 3.0})[0]
    assert tokens == [[7] * 4] * 4
    assert Counter(event[:2] for event in events) == {(row, (7,)): 4 for row in range(4)}
    assert sorted(event.id for event in events if event.finish_reason == "length") == [0, 1, 2, 3]


def test_the_end_of_document_ends_a_row() -> None:
    tokens, finished, events = run_ranks(steered, 1, {0: 9.0})[0]  # <|endoftext|>
    assert (tokens, finished) == ([[]] * 4, [True] * 4)
    assert sorted(events) == [Event(row, (0,), finish_reason="stop") for row in range(4)]


def unstarted(rank: int, world_size: int) -> list[GeneratedSample]:
    """For the pool: a prompt whose greedy continuation is the end of the document, for transformers too."""
    return generate_samples(golden_model("llama_pp1_mp1", ONE_PROCESS), [Prompt("g", GOLDEN_PROMPTS[0], "cut")], QUIET)


def test_a_sample_that_does_not_start_says_so() -> None:
    (sample,) = run_ranks(unstarted, 1)[0]
    assert (sample.context, sample.text, sample.length, sample.finished) == ("g", None, 0, True)
    assert sample.message is not None and sample.message.startswith("cut; WARNING: text generation did not start")


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps at tp2, tied, biases summed over ranks; vocabulary padded to 440 (396 by its other keys)."""
    save = tmp_path_factory.mktemp("run")
    values = config(NEOX, model_parallel_size=2, make_vocab_size_divisible_by=44, no_weight_tying=False, train_iters=2,
                    save=str(save), checkpoint_factor=2)  # fmt: skip
    run_ranks(run_to_end, 2, {**values, "padded_vocab_size": 440})
    return values


# In bf16 tensor parallelism rounds other partial sums, stages change nothing.
@pytest.mark.parametrize(("precision", "layouts"), [("fp32", ("tp2", "pp2")), ("bfloat16", ("pp2",))])
def test_own_checkpoint_in_other_layouts(own_run: dict[str, Any], precision: str, layouts: tuple[str, ...]) -> None:
    texts = []
    for name in ("one process", *layouts):
        ranks, layout = LAYOUTS[name]
        completions_of_ranks = run_ranks(written, ranks, {**own_run, **layout, "precision": precision}, 8)
        texts += [[c.tokens for c in completions] for completions in completions_of_ranks]
    assert all(text == texts[0] for text in texts)
    assert len(texts[0][0]) == 8


def test_damaged_weights_are_named(own_run: dict[str, Any], tmp_path: Path) -> None:
    copy = shutil.copytree(Path(own_run["save"]) / "global_step2", tmp_path / "global_step2")
    layer = copy / "layer_03-model_01-model_states.pt"
    content = bytearray(layer.read_bytes())
    content[len(content) // 2] ^= 1
    layer.write_bytes(content)
    values = {**own_run, **ONE_PROCESS, "load": str(tmp_path), "iteration": 2}
    with pytest.raises(AssertionError, match=rf"{DamagedError.__name__}: .*layer_03-model_01.*\(checksum\)"):
        run_ranks(written, 1, values, 1)


@pytest.mark.parametrize(("changes", "message"), [
    ({"iteration": 7}, "iteration 7.* 2"),
    ({"num_kv_heads": 2}, r"num_kv_heads: 2 .* 4"),
    ({"tokenizer_type": "CharLevelTokenizer"}, "another tokenizer"),
    ({"padded_vocab_size": 396}, r"padded_vocab_size: 396 .* 440"),
])  # fmt: skip
def test_weights_of_another_model_are_refused(own_run: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(written, 1, {**own_run, **ONE_PROCESS, **changes}, 1)
