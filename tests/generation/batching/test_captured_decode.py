"""Captured decode steps: what comes of requests is what it is without them. On a CPU graphs are stand-ins;
real ones: tests/gpu/test_generation_gpu.py."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.generation import Batcher, Model, Request, SamplingParams
from megatron.generation.batching import batcher as batcher_file
from megatron.generation.batching import captured_decode
from megatron.generation.batching.captured_decode import captures_decode, padded_blocks, padded_rows
from megatron.model.init import stage_parameters
from megatron.mpu import gpu_kernels
from megatron.neox_arguments import ConfigError
from tests.generation.batching.test_batcher import VALUES, VOCAB, assert_same_outcomes, outcome, outcomes, requests_of
from tests.generation.batching.test_kv_cache import chunked
from tests.generation.models import STATE_MODELS, random_model
from tests.generation.runs import answers
from tests.stand_ins.cuda_graphs import Graphs

MODELS: dict[str, dict[str, Any]] = {
    "llama": VALUES,
    "windows": {**VALUES, "sliding_window_width": 9},
    "alibi": {**VALUES, "pos_emb": "alibi"},
    "relative": {**VALUES, "pos_emb": "rpe"},
    "learned": {**VALUES, "pos_emb": "learned"},
    "dynamic": {**VALUES, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0,
                                          "original_max_position_embeddings": 128}},
    **STATE_MODELS,
}  # fmt: skip
REQUESTS = requests_of(9, seed=4)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    recorded = Graphs()
    monkeypatch.setattr(batcher_file, "captures_decode", lambda model, log: model.args.decode_cuda_graphs is True)
    monkeypatch.setattr(captured_decode, "cuda_graph", recorded)
    return recorded


def model_of(name: str, captured: bool) -> Model:
    return random_model({**MODELS[name], "decode_cuda_graphs": captured}, tokens=VOCAB)


@pytest.mark.parametrize("name", MODELS)
def test_captured_as_uncaptured(name: str, graphs: Graphs) -> None:
    """Rows of every length come and go, greedy and drawn, with penalties and log-probabilities."""
    with chunked(30):
        expected = outcomes(Batcher(model_of(name, False), maximum_rows=5), REQUESTS[:6], REQUESTS[6:])
        assert graphs.captured == 0
        assert_same_outcomes(
            outcomes(Batcher(model_of(name, True), maximum_rows=5), REQUESTS[:6], REQUESTS[6:]), expected
        )
    assert 1 < graphs.captured < 10 and graphs.launched > 4 * graphs.captured
    lengths = {len(tokens) for tokens, *_ in expected}
    assert len(lengths) > 4


def test_weights_that_are_written_in_place_are_seen(graphs: Graphs) -> None:
    """As reinforcement learning writes them, between requests of one Batcher."""
    models = {captured: model_of("llama", captured) for captured in (False, True)}
    batchers = {captured: Batcher(model, maximum_rows=4) for captured, model in models.items()}
    requests = [Request([5, 9, i + 2], SamplingParams(1.0), 12, i, stop_token_ids=()) for i in range(4)]
    initial_tokens = {captured: [outcome(events)[0] for events in answers(batcher, requests)]
                      for captured, batcher in batchers.items()}  # fmt: skip
    captured = graphs.captured
    for model in models.values():
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, _, parameter in stage_parameters(model.stage):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    updated_tokens = {captured: [outcome(events)[0] for events in answers(batcher, requests)]
                      for captured, batcher in batchers.items()}  # fmt: skip
    assert initial_tokens[False] == initial_tokens[True] != updated_tokens[True] == updated_tokens[False]
    assert graphs.captured == captured > 0


def test_graphs_are_few() -> None:
    assert [padded_rows(rows, 60) for rows in (1, 3, 5, 8, 9, 17, 57)] == [1, 4, 8, 8, 16, 24, 60]
    for blocks in range(1, 600):
        assert blocks <= padded_blocks(blocks, 600) <= max(1.25 * blocks, blocks + 7)
    assert len({padded_blocks(blocks, 600) for blocks in range(1, 601)}) < 30
    assert padded_blocks(0, 0) == 0 and padded_blocks(3, 4) == 4


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a CPU": ({}, {"gpu": False}, "GPU"),
    "no cache": ({"recompute": True}, {}, "recompute"),
    "sharded": ({}, {"lockstep": True}, "ZeRO 3"),
    "adapters of rows": ({}, {"adapter_rows": SimpleNamespace()}, "adapter"),
    "LongRoPE": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                                   "original_max_position_embeddings": 64}}, {}, "LongRoPE"),
    "experts": ({"moe_num_experts": 2, "moe_top_k": 1, "moe_router_type": "topk"}, {}, "experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, model_changes, word = REFUSED[name]
    model = on_gpu(random_model({**VALUES, **values}, tokens=VOCAB), **model_changes)
    assert not captures_decode(model)
    with pytest.raises(ConfigError, match=f"decode_cuda_graphs: true: .*{word}"):
        captures_decode(replace(model, args=model.args.replace(decode_cuda_graphs=True)))


def test_auto_waits_for_a_run_on_such_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_decode, "capability_of", lambda device: (9, 0))
    log_lines: list[str] = []
    model = on_gpu(random_model(VALUES, tokens=VOCAB))
    ran = {"decode_cuda_graphs: true": (gpu_kernels.HOPPER,)}
    for has_run in ({}, ran):
        monkeypatch.setattr(gpu_kernels, "RUN_ON", has_run)
        assert captures_decode(model, log_lines.append) == bool(has_run)
        assert captures_decode(replace(model, args=model.args.replace(decode_cuda_graphs=True)))
        assert not captures_decode(replace(model, args=model.args.replace(decode_cuda_graphs=False)))
    assert len(log_lines) == 2 and "false" in log_lines[0] and "true" in log_lines[1].split("chose")[1]


def on_gpu(model: Model, gpu: bool = True, **changes: Any) -> Model:
    """The model as if it were on a GPU; nothing of it is run."""
    groups = replace(model.groups, device=torch.device("cuda" if gpu else "cpu"))
    return replace(model, groups=groups, **changes)
