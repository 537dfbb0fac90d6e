"""Multi-token prediction in training: layouts, resumption, checkpoints, metrics, and what is refused."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.data import Batch
from megatron.generation import SamplingParams, complete
from megatron.generation.model import load_model
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError
from megatron.tokenizer import build_tokenizer
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, assert_resumes, to_their_ends
from tests.training.native.test_schedule_layouts import SCHEDULES
from tests.training.runs import (
    ADAMW,
    LLAMA,
    NEOX,
    SP2,
    Curve,
    assert_alike,
    begin,
    cells,
    config,
    curves_of,
    metric_rows,
    output_of_run,
)
from tests.training.test_experts import MOE

STEPS = 10
MTP: dict[str, Any] = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, "engine": "native"}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {**LLAMA, **ADAMW, **DOCUMENTS, "no_weight_tying": True},
    "learned": {**NEOX, **ADAMW, "pos_emb": "learned", "mtp_num_layers": 1},  # with a tied embedding
    "experts": {**MOE, **ADAMW, **DOCUMENTS, "moe_aux_loss_scope": "step", "no_weight_tying": True},
}  # fmt: skip
PP2, CP2 = {"pipe_parallel_size": 2}, {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"model_parallel_size": 2}), "tp2 sp": (2, SP2), "pp2": (2, PP2), "tp2 pp2 sp": (4, SP2 | PP2),
    **{f"dp2 zero{stage}": (2, zero(stage)) for stage in range(4)}, "cp2": (2, CP2),
    "dp2 pp2 zero3": (4, PP2 | zero(3)), "ep2": (2, {"expert_parallel_size": 2}),
    "recompute": (1, {"checkpoint_activations": True}), "compiled": (1, {"compile": "block"}),
    "selective": (1, {"checkpoint_activations": True, "recompute_granularity": "selective"}),
    "updates in the forward": (2, zero(1) | {"overlap_optimizer_with_forward": True}),
    **{name: (2, PP2 | SCHEDULES[name]) for name in ("interleaved", "zero_bubble", "zbv", "dualpipev")},
}  # fmt: skip
ALL_LAYOUTS = {"plain": (1, {}), **LAYOUTS}
DEFAULT_CELLS = [
    ("tp2", "learned"), ("pp2", "learned"), ("tp2 pp2 sp", "untied"), ("dp2 zero1", "experts"), ("dp2 zero3", "untied"),
]  # fmt: skip
MORE_CELLS = [
    ("cp2", "experts"), ("ep2", "experts"), ("zbv", "learned"), ("zero_bubble", "untied"), ("interleaved", "experts"),
    ("dp2 pp2 zero3", "learned"), ("recompute", "untied"), ("compiled", "experts"),
    ("updates in the forward", "untied"),
]  # fmt: skip
PRODUCT = [(layout, model) for layout in LAYOUTS for model in MODELS if layout != "ep2" or model == "experts"]
PRODUCT = [cell for cell in PRODUCT if cell not in DEFAULT_CELLS + MORE_CELLS]


def model_config(model: str, *layout: dict[str, Any]) -> dict[str, Any]:
    return config(MTP, MODELS[model], {"train_micro_batch_size_per_gpu": 2}, *layout)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Curve]:
    """One process; micro-batches of 2, because the losses of experts depend on them."""
    return cache(lambda model: curves_of({model: model_config(model)}, STEPS)[model])


@pytest.mark.parametrize(("layout", "model"), cells(DEFAULT_CELLS, MORE_CELLS, PRODUCT))
def test_layouts_equal_one_process(layout: str, model: str, reference: Callable[[str], Curve]) -> None:
    ranks, keys = LAYOUTS[layout]
    assert_alike(curves_of({model: model_config(model, keys)}, STEPS, ranks), {model: reference(model)})


def test_a_weight_of_zero_changes_no_step_of_the_trunk() -> None:
    """To the bit, with AdamW and a clip that bites. Every depth has its loss in the metrics."""
    model = {**LLAMA, **ADAMW, "no_weight_tying": True}
    runs = {
        "plain": config(model),
        "zero": config(model, MTP, mtp_loss_scaling_factor=0.0),
        "half": config(model, MTP, mtp_loss_scaling_factor=0.5),
    }
    trunk, zero_weight, half_weight = (curve for curve in curves_of(runs, 3).values())
    assert zero_weight.losses == trunk.losses and zero_weight.norms == trunk.norms
    for layer, tensors in trunk.weights.items():
        assert all(torch.equal(zero_weight.weights[layer][name], tensor) for name, tensor in tensors.items())
    assert half_weight.losses[0] == trunk.losses[0] and half_weight.norms[0] != trunk.norms[0]
    assert not torch.equal(half_weight.weights[2]["mlp.linear1.weight"], trunk.weights[2]["mlp.linear1.weight"])


@pytest.mark.parametrize("name", cells(["plain"], ["tp2 pp2 sp", "dp2 zero3"]))
def test_it_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    ranks, keys = ALL_LAYOUTS[name]
    assert_resumes({**model_config("untied", keys), "train_iters": 4}, tmp_path, ranks)
    rows = metric_rows(tmp_path / "through", "train/mtp_loss/2")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["train/mtp_loss/1"] != row["train/lm_loss"] for row in rows)
    assert rows[-1]["train/mtp_loss/1"] < rows[0]["train/mtp_loss/1"]


@pytest.mark.parametrize(
    ("name", "later_name"), cells([("plain", "tp2 pp2 sp")], [("pp2", "plain"), ("tp2 sp", "dp2 zero3")])
)
def test_it_goes_on_in_another_layout(name: str, later_name: str, tmp_path: Path) -> None:
    """The resumed run has the losses of one that was not interrupted."""
    (ranks, keys), (later_ranks, later_keys) = ALL_LAYOUTS[name], ALL_LAYOUTS[later_name]
    steps = {"train_iters": 4, "checkpoint_factor": 2}
    uninterrupted, interrupted = ({**steps, "save": str(tmp_path / name)} for name in ("through", "cut"))
    runs = [
        model_config("learned", keys, uninterrupted),
        model_config("learned", keys, interrupted, {"exit_interval": 2}),
    ]
    run_ranks(to_their_ends, ranks, runs, timeout=TIMEOUT)
    resumed = model_config("learned", later_keys, interrupted, {"load": interrupted["save"]})
    run_ranks(to_their_ends, later_ranks, [resumed], timeout=TIMEOUT)
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "through"), rel=1e-5)


def test_a_frozen_trunk_stays_as_it_is() -> None:
    """`trainable` may name the blocks alone, in a pipeline too."""
    keys = {"mtp_num_layers": 1, "trainable": {"names": ["^9[.]"]}, "train_micro_batch_size_per_gpu": 2}
    run = config({**LLAMA, **ADAMW, **MTP, "no_weight_tying": True, **keys})
    start, curve = (curves_of({"frozen": run}, steps)["frozen"] for steps in (0, 2))
    assert_alike(curves_of({"frozen": {**run, **PP2}}, 2, 2), {"frozen": curve})
    pairs = [
        (layer, tensor, curve.weights[layer][n]) for layer, ts in start.weights.items() for n, tensor in ts.items()
    ]
    assert {layer for layer, old, new in pairs if not torch.equal(old, new)} == {9}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with two depths."""
    folder = tmp_path_factory.mktemp("mtp")
    keys = {"train_iters": 2, "checkpoint_factor": 2, "save": str(folder)}
    run_ranks(to_their_ends, 1, [model_config("untied", keys)], timeout=TIMEOUT)
    return folder


def test_checkpoints_with_and_without_the_blocks(saved: Path, tmp_path: Path) -> None:
    """A fresh run may leave them out, and says so; a resumed one may not. They cannot come from nothing."""
    trunk = model_config("untied", {"mtp_num_layers": None, "mtp_loss_scaling_factor": 0.1, "train_iters": 1})
    load = {"load": str(saved)}
    output = run_ranks(output_of_run, 1, {**trunk, **load, "finetune": True})[0]
    assert "2 blocks for multi-token prediction are left out" in output
    with pytest.raises(CheckpointError, match="mtp_num_layers"):
        begin({**trunk, **load})
    with pytest.raises(CheckpointError, match="mtp_num_layers"):
        begin(model_config("untied", load, {"mtp_num_layers": 1, "finetune": True}))
    run_ranks(to_their_ends, 1, [{**trunk, "checkpoint_factor": 1, "save": str(tmp_path)}], timeout=TIMEOUT)
    with pytest.raises(CheckpointError, match="no layers 9 to 10: .* remove mtp_num_layers"):
        begin(model_config("untied", {"load": str(tmp_path), "finetune": True}))


def test_generation_reads_the_trunk(saved: Path) -> None:
    args = load_checkpoint_args(saved / "global_step2")[0].replace(load=str(saved), save=None)
    model = load_model(args, ParallelGroups.single(), build_tokenizer(args), logging.getLogger("test"))
    assert model.args.mtp_num_layers is None and model.stage.layers.keys() == {"0", "2", "3", "4", "5", "7", "8"}
    prompt = list(range(12))
    tokens = torch.tensor([prompt])
    logits = model.stage(None, Batch(tokens, tokens, torch.ones_like(tokens)))
    assert isinstance(logits, torch.Tensor)
    completion = complete(model, [prompt], SamplingParams(), maximum_tokens=1, seeds=[0])[0]
    assert completion.tokens == [int(logits[-1, 0].argmax())]


@pytest.mark.parametrize("keys", [{"engine": "deepspeed"}, {"engine": "auto", "prescale_gradients": True}])
def test_engines_that_do_not_have_it_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mtp_num_layers"):
        begin(model_config("untied", keys))
