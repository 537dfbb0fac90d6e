"""A stopped run goes on bit for bit, from step 3 to 6; and what other tests of checkpoints share."""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron.checkpointing import Manifest, read_manifest, save_tensors
from megatron.neox_arguments import UserError
from megatron.training import train
from megatron.training.builtin_callbacks.saving import SaveCallback
from tests.model.runs import MIXED
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, begin, bit_equal, cells, config, metric_rows, run_to_end

DENSE = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "neftune_noise_alpha": 5.0}
DENSE |= {"lr_decay_style": "cosine", "warmup": 0.3, "min_lr": 1e-5, "no_weight_tying": True}
FP32, BF16, DEEPSPEED = {"precision": "fp32"}, {"precision": "bfloat16"}, {"engine": "deepspeed"}
# Its scale overflows at first, and grows between the save and the end.
FP16 = {"precision": "fp16", "fp16": {"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}}
# Mamba's blocks, packed rows, A_log and D in fp32 beside bf16.
STATES = BF16 | {
    "num_layers": 4, "attention_config": ["mamba2", "attention", "mamba", "mlp"], "mamba_head_dim": 8,
    "mamba_num_groups": 2, "mamba_state_dim": 8, "mamba_chunk_size": 8, "norm": "rmsnorm", "pos_emb": "rotary",
    "reset_attention_mask": True, "reset_position_ids": True,
}  # fmt: skip
LORA = {"r": 4, "alpha": 8, "dropout": 0.1}
DORA = {**LORA, "dora": True, "modules_to_save": ["embed_tokens"]}
MOE: dict[str, Any] = {
    "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02, "num_layers": 2,
    "moe_aux_loss_scope": "sequence", "moe_router_bias_update_rate": 0.01, "moe_router_score_function": "sigmoid",
}  # fmt: skip
EXPERTS, ADAPTERS = LLAMA | MOE | {"warmup": 0.3}, LLAMA | {"warmup": 0.3}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2}), "ep2": (2, {"expert_parallel_size": 2}),
    "ep2 zero3": (4, {"expert_parallel_size": 2, "zero_optimization": {"stage": 3}}),
    "pp2 zero3": (4, {"pipe_parallel_size": 2, "zero_optimization": {"stage": 3}}),
    "interleaved": (2, {"pipe_parallel_size": 2, "pipeline_schedule": "interleaved"}),
    "zbv": (2, {"pipe_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "ep4 zero1": (4, {"expert_parallel_size": 4, "zero_optimization": {"stage": 1}}),
}  # fmt: skip
# Layout and model. The engine is the native one, unless it is named.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("tp2", LLAMA | DENSE | FP32),
    "pp2, tied": ("pp2", NEOX | DENSE | FP32 | {"no_weight_tying": False}),
    "zero3, bf16": ("zero3", NEOX | DENSE | BF16),
    "pp2, blocks differ": ("pp2", MIXED | BF16 | {"pos_emb": "rotary"} | DEEPSPEED),
    "zero2, states": ("zero2", STATES),
    "ep2, experts": ("ep2", EXPERTS | FP32),
    "pp2, adapters and a copy": ("pp2", ADAPTERS | BF16 | {"lora": DORA}),
    # `more`
    "zero1, deepspeed": ("zero1", NEOX | DENSE | BF16 | DEEPSPEED),
    "zero3, deepspeed, states": ("zero3", STATES | DEEPSPEED),
    "tp2, states": ("tp2", STATES),
    "pp2 zero3": ("pp2 zero3", NEOX | DENSE | BF16 | {"no_weight_tying": False}),
    "interleaved, tied": ("interleaved", NEOX | DENSE | BF16 | {"no_weight_tying": False}),
    "zbv, adapters": ("zbv", ADAPTERS | BF16 | {"lora": DORA}),
    "pp2, fp16": ("pp2", NEOX | DENSE | FP16),
    "zero2, fp16": ("zero2", LLAMA | DENSE | FP16),
    "ep2 zero3, experts": ("ep2 zero3", EXPERTS | BF16),
    "zero3, adapters and all": ("zero3", ADAPTERS | BF16 | {"lora": {**LORA, "save": "both"}}),
    # `product`
    "plain": ("plain", NEOX | DENSE | FP32),
    "tp2, bf16": ("tp2", LLAMA | DENSE | BF16),
    "pp2, bf16": ("pp2", NEOX | DENSE | BF16),
    "zero1, bf16": ("zero1", NEOX | DENSE | BF16),
    "zero2": ("zero2", NEOX | DENSE | FP32),
    "tp2, deepspeed": ("tp2", LLAMA | DENSE | FP32 | DEEPSPEED),
    "zero2, deepspeed": ("zero2", NEOX | DENSE | BF16 | DEEPSPEED),
    "pp2, states": ("pp2", STATES | DEEPSPEED),
    "zero1, states": ("zero1", STATES),
    "ep4 zero1, experts": ("ep4 zero1", EXPERTS | FP32),
    "zbv": ("zbv", LLAMA | DENSE | FP32),
    "pp2, experts": ("pp2", EXPERTS | BF16),
    "tp2 pp2, blocks differ": ("tp2 pp2", MIXED | BF16 | {"pos_emb": "rotary"}),
    "plain, deepspeed": ("plain", NEOX | DENSE | FP32 | DEEPSPEED),
    "zero3, deepspeed": ("zero3", NEOX | DENSE | BF16 | DEEPSPEED),
    "tp2, blocks differ": ("tp2", MIXED | BF16 | {"pos_emb": "rotary"}),
    "tp2, deepspeed, states": ("tp2", STATES | DEEPSPEED),
    "plain, experts": ("plain", EXPERTS | BF16),
    "zero3, adapters, deepspeed": ("zero3", ADAPTERS | FP32 | DEEPSPEED | {"lora": DORA}),
    "tp2, adapters": ("tp2", ADAPTERS | FP32 | {"lora": LORA}),
    "zero1, adapters, deepspeed": ("zero1", ADAPTERS | FP32 | DEEPSPEED | {"lora": DORA}),
}
NAMES = list(RUNS)


@pytest.mark.parametrize("name", cells(NAMES[:3], NAMES[3:6], NAMES[6:]))
def test_bit_equal(name: str, tmp_path: Path) -> None:
    ranks, layout = {**LAYOUTS, **MORE_LAYOUTS}[RUNS[name][0]]
    small = {"train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 3}
    assert_goes_on(ranks, config(ADAMW, layout, small, RUNS[name][1]), tmp_path)


def assert_goes_on(ranks: int, common: dict[str, Any], tmp_path: Path) -> None:
    """A run of six steps that saves at 3, in `through`; from there another goes on, in `resumed`."""
    uninterrupted, resumed = tmp_path / "through", tmp_path / "resumed"
    full_weights = run_ranks(run_to_end, ranks, {**common, "save": str(uninterrupted)})
    as_stopped_at(3, uninterrupted, resumed)
    went_on = run_ranks(run_to_end, ranks, {**common, "save": str(resumed), "load": str(resumed)})
    step_losses = losses(uninterrupted)
    assert len(step_losses) == 6
    assert losses(resumed) == {step: loss for step, loss in step_losses.items() if step > 3}
    assert all(bit_equal(a[1], b[1]) for a, b in zip(full_weights, went_on, strict=True))


def as_stopped_at(iteration: int, run: Path, folder: Path) -> None:
    """A copy of a run's folder as if the run had ended after its save there; without its logs."""
    tags = [path.name for path in run.glob("global_step*") if path.name != f"global_step{iteration}"]
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("logs", *tags))
    (folder / "latest").write_text(f"global_step{iteration}")


def metrics(save: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return metric_rows(save, "iteration")


def losses(save: Path) -> dict[int, float]:
    """train/lm_loss by iteration; each step stands once."""
    step_losses = [(row["iteration"], row["train/lm_loss"]) for row in metrics(save) if "train/lm_loss" in row]
    assert len(step_losses) == len(dict(step_losses))
    return dict(step_losses)


def stop_after(rank: int, world_size: int, values: dict[str, Any], steps: int) -> None:
    """For the pool: the run ends without warning right after the save at `steps`."""

    class Stop(Exception):
        pass

    training, save = begin(values), SaveCallback.save

    def save_and_stop(self: SaveCallback, ephemeral: bool = False) -> None:
        save(self, ephemeral)
        if training.progress.iteration == steps:
            training.checkpointer.wait()
            raise Stop

    with mock.patch.object(SaveCallback, "save", save_and_stop), pytest.raises(Stop):
        train(training)


def refusals(rank: int, world_size: int, configs: list[dict[str, Any]], trained: bool = False) -> list[str]:
    """For the pool: why each run cannot start, or be trained; "" for one that can."""
    messages = []
    for values in configs:
        try:
            training = begin(values)
            if trained:
                train(training)
            training.engine.close()
            messages.append("")
        except UserError as problem:
            messages.append(str(problem))
    return messages


def refused(*configs: dict[str, Any], ranks: int = 1) -> list[str]:
    """The same, as the first rank says it."""
    return run_ranks(refusals, ranks, list(configs))[0]


def assert_refused(*cases: tuple[dict[str, Any], str]) -> None:
    """Each of these runs cannot start in one process; its message matches."""
    for message, (_, facts) in zip(refused(*(values for values, _ in cases)), cases, strict=True):
        assert re.search(facts, message, re.DOTALL), (facts, message)


def warnings_of(rank: int, world_size: int, values: dict[str, Any], fn: Any = run_to_end) -> list[str]:
    """For the pool: what a run warns of."""
    warnings: list[str] = []
    logging.Logger.warning = lambda self, text, *a: warnings.append(text)  # type: ignore[method-assign, assignment]
    fn(rank, world_size, values)
    return warnings


def change_file(checkpoint: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of one file, checksums and all."""
    state = torch.load(checkpoint / name, weights_only=True)  # not mapped from the file that is written
    change(state)
    record, manifest = save_tensors(state, checkpoint / name), cast(Manifest, read_manifest(checkpoint))
    (checkpoint / "manifest.json").write_text(replace(manifest, files={**manifest.files, name: record}).to_json())
