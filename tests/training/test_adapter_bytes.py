"""Bytes of gradients and optimizer state beside adapters, counted and as in benchmarks/adapter_bytes.py."""

import gc
from typing import Any

import pytest

from benchmarks.adapter_bytes import bytes_of, counts, table
from megatron.neox_arguments import NeoXArgs
from tests.live_bytes import LiveBytes
from tests.pool import run_ranks
from tests.recipes.readme import ROOT
from tests.training.batches import batches_of
from tests.training.runs import ADAMW, LLAMA, begin, begin_each, cells, config

MODEL = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_layers": 4, "precision": "bfloat16"}
LORA: dict[str, Any] = {"r": 4, "alpha": 8}
METHODS = {"full": None, "LoRA": LORA, "QLoRA": {**LORA, "quantization": "nf4"}}
# Bytes of an element that is trained, between backward and update: weight, gradient, master, moments.
# DeepSpeed keeps the 16-bit gradient that autograd made, or an fp32 copy of it too.
BYTES_PER_TRAINED = {"native": (18.0, 18.0), "deepspeed": (16.0, 22.0)}


def values(method: str, **overrides: Any) -> dict[str, Any]:
    return config(ADAMW, MODEL, lora=METHODS[method], train_micro_batch_size_per_gpu=1, train_batch_size=2, **overrides)


def held(rank: int, world_size: int, values: dict[str, Any]) -> tuple[int, int]:
    """For the pool: bytes that are alive between backward and update of the second step; elements trained."""
    live_bytes: list[int] = []
    with LiveBytes() as live:
        training = begin(values)
        batches = batches_of(training)
        for _ in range(2):
            micro_batches = next(batches)

            def note(_: Any) -> None:
                gc.collect()
                live_bytes.append(live.now)

            training.engine.train_step(micro_batches, 1e-3, on_gradients=note)
    return live_bytes[-1], sum(p.numel() for p in training.engine.stage.parameters() if p.requires_grad)


@pytest.mark.parametrize(("method", "engine"), cells(
    [("QLoRA", "native")], [("LoRA", "deepspeed")], [("LoRA", "native"), ("QLoRA", "deepspeed")],
))  # fmt: skip
def test_what_is_trained_takes_what_its_elements_take(engine: str, method: str) -> None:
    """A frozen element takes the bytes of its weight alone."""
    low_rank, high_rank = ({**values(method, engine=engine), "lora": {**METHODS[method], "r": r}} for r in (4, 36))  # type: ignore[dict-item]
    (low_bytes, low_trained), (high_bytes, high_trained) = (
        run_ranks(held, 1, run_values)[0] for run_values in (low_rank, high_rank)
    )
    bytes_per_element = (high_bytes - low_bytes) / (high_trained - low_trained)
    low, high = BYTES_PER_TRAINED[engine]
    assert low - 0.2 <= bytes_per_element <= high + 0.2
    model_counts = counts(begin_args(low_rank), 1)
    assert model_counts.trained == low_trained
    assert low_bytes - bytes_per_element * low_trained == pytest.approx(
        2 * model_counts.frozen + model_counts.packed, rel=0.05
    )


def begin_args(values: dict[str, Any]) -> NeoXArgs:
    return NeoXArgs.from_dict(values).replace(padded_vocab_size=384)


def tensors_of(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """For the pool: bytes of what the engine keeps after a step, by part."""
    bytes_by_run = []
    for training in begin_each(configs):
        training.engine.train_step(next(batches_of(training)), 1e-3)
        bytes_by_run.append(
            {name: sum(t.nbytes for t in tensors) for name, tensors in training.engine.tensors().items()}
        )
    return bytes_by_run


@pytest.mark.parametrize("stage", cells([3], [0], [1, 2]))
def test_the_tables_rules_are_the_engines(stage: int) -> None:
    configs = [values(method, zero_optimization={"stage": stage}, engine="native") for method in METHODS]
    ranks = 1 if stage == 0 else 2
    for run_values, parts in zip(configs, run_ranks(tensors_of, ranks, configs)[0], strict=True):
        expected = bytes_of(counts(begin_args(run_values), 1), stage, ranks)
        retained_bytes = parts["weights"] + parts["optimizer states"]
        assert retained_bytes == pytest.approx(expected.held + expected.optimizer, rel=0.01)
        if stage == 0:
            assert parts["gradients"] == expected.gradients


@pytest.mark.product
def test_the_table_of_the_page() -> None:
    assert table() in (ROOT / "docs" / "post-training.md").read_text()
