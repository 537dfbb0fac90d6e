"""A step of the native engine as any rank, on fake CUDA: no wait, no more memory than derived, one graph."""

from dataclasses import replace
from typing import Any

import pytest

from tests.fake.checks import clean, compiled
from tests.fake.client import FakeCuda
from tests.fake.layouts import COMPILE, LLAMA_13B, RECOMPUTE, Case
from tests.marks import with_more

# Blocks so large and tokens so few that weights are all that counts.
LAYERS, HIDDEN, FFN, VOCAB, SEQ = 6, 512, 2048, 512, 16
SHAPE: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
                         "padded_vocab_size": VOCAB, "seq_length": SEQ, "max_position_embeddings": SEQ,
                         "train_micro_batch_size_per_gpu": 1}  # fmt: skip
DATA = 8
# ZeRO's stage, tensor ranks, micro-batches.
LAYOUTS = [(0, 1, 1), (2, 1, 1), (3, 1, 1), (1, 1, 2), (2, 8, 2), (1, 1, 1), (2, 1, 2), *((n, 8, 1) for n in range(4))]


def native(stage: int, tensor: int = 1, micro_batches: int = 1, **overrides: Any) -> Case:
    """One rank of eight data ranks, of each of `tensor` tensor ranks."""
    values = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": micro_batches, **overrides}
    if tensor > 1:
        values["model_parallel_size"] = tensor
    return Case(DATA * tensor, 3 * tensor + tensor // 2, values, native=True)


def elements(tensor: int) -> tuple[int, int]:
    block = (4 * HIDDEN**2 + 3 * HIDDEN * FFN) // tensor + 2 * HIDDEN
    return LAYERS * block + 2 * VOCAB * HIDDEN // tensor + HIDDEN, block


def derived(stage: int, tensor: int, micro_batches: int) -> tuple[int, int, int]:
    """Bytes kept between steps, those that a step has beside them at least, and how many more at most."""
    num_elements, block = elements(tensor)
    tokens = SEQ * LAYERS * (12 * HIDDEN + 6 * FFN) * 2  # activations, of one tensor rank or of more
    if stage == 0:  # bf16 weights, fp32 gradients, master weights and two moments; a block's bf16 gradients
        return 18 * num_elements, 0, 2 * block + tokens
    retained_bytes = 12 * num_elements // DATA  # fp32 master weights and two moments
    # Of a block: its weights, those of the next as they come, its bf16 gradients; fp32 ones of the one before
    # as they leave.
    buffers = (2 + 2 + 2 + 4) * block
    gradients = 4 * num_elements // DATA
    if stage == 3:
        return retained_bytes, gradients, buffers + tokens
    if micro_batches == 1:  # from backward's begin on, weights go faster than gradients come
        return retained_bytes, 2 * num_elements, buffers + tokens
    return retained_bytes, 2 * num_elements + (4 * num_elements if stage == 1 else gradients), buffers + tokens


@pytest.mark.parametrize("layout", with_more(LAYOUTS, *LAYOUTS[:2], product=LAYOUTS[3:]), ids=str)
def test_a_step(layout: tuple[int, int, int], fake_cuda: FakeCuda) -> None:
    stage, tensor, micro_batches = layout
    report = clean(fake_cuda, native(stage, tensor, micro_batches, **SHAPE))
    retained_bytes, min_extra, air = derived(stage, tensor, micro_batches)
    scalars = 64 * 1024  # steps, learning rates, marks of the watch
    assert retained_bytes <= report["kept"] <= retained_bytes + scalars
    assert sum(report["parts"].values()) <= report["kept"] <= sum(report["parts"].values()) + scalars
    assert retained_bytes + min_extra <= report["peak"] <= retained_bytes + min_extra + air + scalars, (
        report["peak"] - retained_bytes - min_extra
    ) / air
    if stage > 0:  # what is being made: a block or the rest, whole in fp32, and the values of two parameters
        num_elements, block = elements(tensor)
        values = 4 * 2 * FFN * HIDDEN
        assert (
            report["construction"]
            <= 4 * num_elements // DATA + 4 * max(block, num_elements - LAYERS * block) + 2 * values
        )


HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}  # fake tensors cannot be page-locked
HOST_RUNS: dict[str, Case] = {
    **{f"ZeRO {stage}": native(stage, 1, 2 if stage == 2 else 1, **SHAPE) for stage in (1, 2, 3)},
    "tp8": native(3, 8, **SHAPE), "one rank": Case(1, 0, {**SHAPE, "zero_optimization": {"stage": 3}}, native=True),
    "Muon": native(2, **SHAPE, optimizer={"type": "Muon", "params": {"lr": 1e-3}}),
    "fp16, Lion": native(1, **SHAPE, precision="fp16", optimizer={"type": "Lion", "params": {"lr": 1e-3}}),
    "SGD": native(1, **SHAPE, optimizer={"type": "SGD", "params": {"lr": 1e-3}}),
    "bf16 moments": native(2, **SHAPE, optimizer_state_dtype="bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", with_more(HOST_RUNS, "one rank", product=HOST_RUNS.keys() - {"one rank"}))
def test_states_in_host_memory(name: str, fake_cuda: FakeCuda) -> None:
    """Nothing is left on the device between steps, and no operation mixes devices. A step needs at most what
    it needs with states on the device, less these, and fp32 shards of two blocks on their way."""
    case = HOST_RUNS[name]
    zero = {**case.values["zero_optimization"], **HOST}
    on_host = fake_cuda.run(replace(case, values={**case.values, "zero_optimization": zero}))
    assert on_host["error"] is None, on_host["error"]
    assert on_host["kept"] < 16 * 1024
    if name in ("SGD", "bf16 moments", "one rank"):  # on the device: kernels without a fake one, and ZeRO 0
        return
    on_device = clean(fake_cuda, case)
    _, block = elements(case.values.get("model_parallel_size", 1))
    assert on_host["peak"] <= on_device["peak"] - on_device["kept"] + 2 * 4 * block // DATA + 64 * 1024


OVERLAP = {"overlap_optimizer_with_forward": True}


@pytest.mark.parametrize("layout", with_more(LAYOUTS, *LAYOUTS[1:2], product=LAYOUTS[3:]), ids=str)
def test_the_update_under_the_next_forward(layout: tuple[int, int, int], fake_cuda: FakeCuda) -> None:
    """Nothing is read before the stream that writes it is waited for, and no step takes more memory."""
    baseline, report = (clean(fake_cuda, native(*layout, **{**SHAPE, **overrides})) for overrides in ({}, OVERLAP))
    scalars = 64 * 1024
    assert report["peak"] <= baseline["peak"] + scalars
    assert (
        baseline["kept"] <= report["kept"] <= sum(report["parts"].values()) + scalars
    )  # gradients are kept until then


MISSING_WAITS = [("update of what gathers reads", 3), ("update without a wait", 0), ("update without a wait", 3),
                 ("update before gradients", 0)]  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "stage"),
    [pytest.param(*wait, marks=pytest.mark.product if i else pytest.mark.more) for i, wait in enumerate(MISSING_WAITS)],
)
def test_a_missing_wait_is_seen(mistake: str, stage: int, fake_cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="another stream"):
        clean(fake_cuda, replace(native(stage, **SHAPE, **OVERLAP), mistake=mistake))


def test_a_wait_is_seen(fake_cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="the host waits for a value"):
        clean(fake_cuda, replace(native(2), mistake="item in the loss"))


COMPILED: dict[str, Case] = {
    "ZeRO 0": native(0, **COMPILE), "ZeRO 1": native(1, **COMPILE), "ZeRO 2": native(2, **COMPILE),
    "ZeRO 3": native(3, **COMPILE), "ZeRO 3, recompute": native(3, **COMPILE, **RECOMPUTE),
    "ZeRO 0, overlapped": native(0, **COMPILE, overlap_optimizer_with_forward=True),
    "ZeRO 3, overlapped": native(3, **COMPILE, overlap_optimizer_with_forward=True),
    "ZeRO 2, tp8": native(2, 8, **COMPILE), "ZeRO 3, tp8": native(3, 8, **COMPILE),
}  # fmt: skip


@pytest.mark.parametrize("name", with_more(COMPILED, product=COMPILED.keys() - {"ZeRO 3"}))
def test_compiled_blocks_are_one_graph(name: str, fake_cuda: FakeCuda) -> None:
    """Logits have two graphs, over ranks three; with as many calls as where `fully_shard` gathers nothing."""
    case = COMPILED[name]
    report = compiled(fake_cuda, case, graphs=4 if "tp8" in name else 3)
    eager = fake_cuda.run(replace(case, values={**case.values, "zero_optimization": {"stage": 0}}))
    assert report["calls compiled"] == eager["calls compiled"] > 20


@pytest.mark.product
def test_13b_fits_80_gb(fake_cuda: FakeCuda) -> None:
    """Eight GPUs at ZeRO 2, with recomputation: weights are whole in bf16, gradients and states cut."""
    report = clean(fake_cuda, native(2, **LLAMA_13B))
    assert max(report["construction"], report["peak"]) < 80e9 * 0.9  # the rest is the context's, and fragments
    total_bytes = sum(report["parts"].values()) / 12 * DATA
    assert 12.9e9 < total_bytes < 13.1e9
    assert report["peak"] > (2 + 12 / DATA) * total_bytes
