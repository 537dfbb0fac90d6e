"""Decode steps as CUDA graphs beside the same steps without, on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.generation import Batcher, Model, Request, SamplingParams, for_inference
from megatron.generation.batching.captured_decode import CapturedDecode, DecodeRows
from megatron.model.init import stage_parameters
from megatron.mpu import DTYPES, ParallelGroups
from tests.generation.batching.test_batcher import outcome, requests_of
from tests.generation.models import HYBRID, POSITIONS, SmallTokenizer
from tests.generation.runs import answers
from tests.gpu.runs import WIDE, stage_on
from tests.model.runs import LLAMA
from tests.model.stages import small

pytestmark = [pytest.mark.gpu, pytest.mark.only_gpu("a CPU has no CUDA graphs; their stand-ins: tests/generation")]
WIDER: dict[str, Any] = {**LLAMA, **WIDE, "num_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDER,
    "windows": {**WIDER, "sliding_window_width": 20},
    "alibi": {**WIDER, "pos_emb": "alibi"},
    "hybrid": {**HYBRID, "max_position_embeddings": POSITIONS},
}


def model_of(name: str, device: torch.device, precision: str) -> Model:
    args = for_inference(small(**{**MODELS[name], "precision": precision}).for_world(1))
    dtype = DTYPES[args.params_dtype]
    stage = stage_on(args, device)
    stage.dtype = dtype
    return Model(args, ParallelGroups.single(device), SmallTokenizer(64), stage, dtype)


def batcher_of(model: Model, captured: bool, rows: int = 6) -> Batcher:
    return Batcher(
        replace(model, args=model.args.replace(decode_cuda_graphs=captured)), maximum_rows=rows, cache_gb=0.2
    )


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_plain_steps(name: str, device: torch.device) -> None:
    """In fp32: prompts of every length, rows that end at different times, greedy and drawn, with penalties.
    Log-probabilities may differ by what other products of padded rows round, 1e-7 of logits below 100."""
    model, requests = model_of(name, device, "fp32"), requests_of(12, seed=4)
    eager, captured = batcher_of(model, False), batcher_of(model, True)
    expected = [outcome(events) for events in answers(eager, requests[:8], requests[8:])]
    actual = [outcome(events) for events in answers(captured, requests[:8], requests[8:])]
    for text, expected_text in zip(actual, expected, strict=True):
        assert text[:3] == expected_text[:3]
        torch.testing.assert_close(text[4], expected_text[4], rtol=0, atol=1e-3)
    assert captured.captured is not None and eager.captured is None
    assert any(step.launch is not None for step in captured.captured.steps.values())
    assert len({len(text[0]) for text in expected}) > 4


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_logits_of_a_graph_are_those_of_its_first_run(name: str, precision: str, device: torch.device) -> None:
    """Bit for bit: the same kernels over the same shapes, the first time launched one by one. Of five rows,
    which are padded to eight."""
    model = model_of(name, device, precision)
    cache = model.stage.empty_cache(41, 16)
    steps = CapturedDecode(model, cache, maximum_rows=8, capacity=8)
    for layer in cache.layers.values():
        for pool in layer[:2]:
            pool.normal_(generator=torch.Generator(device).manual_seed(0))
    positions = torch.tensor([3, 17, 40, 64, 79]).numpy()
    table = (1 + torch.arange(40).view(5, 8)[:, :5]).numpy()
    slots = table[range(5), positions // 16] * 16 + positions % 16
    rows = DecodeRows(torch.arange(5).numpy(), positions, slots, table, None)
    logits = [steps.logits(rows).clone() for _ in range(3)]
    assert logits[0].isfinite().all() and logits[0].std() > 0.01
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_weights_that_are_written_in_place_are_seen(device: torch.device) -> None:
    model = model_of("llama", device, "fp32")
    requests = [Request([5, 9, i + 2], SamplingParams(1.0), 12, i, stop_token_ids=()) for i in range(4)]
    batchers = [batcher_of(model, captured) for captured in (False, True)]
    old_texts: list[list[list[int]]] = []
    new_texts: list[list[list[int]]] = []
    for texts in (old_texts, new_texts):
        texts += [[outcome(events)[0] for events in answers(batcher, requests)] for batcher in batchers]
        with torch.no_grad():
            for _, _, parameter in stage_parameters(model.stage):
                parameter.mul_(-0.7)
    assert old_texts[0] == old_texts[1] != new_texts[1] == new_texts[0]
