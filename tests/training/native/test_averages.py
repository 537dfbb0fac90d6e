"""`ema_decay`: the average is that of a loop by hand, in every layout, resumes, and is loaded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpointing import AVERAGE, MASTER, CheckpointError, OpenCheckpoint, OptimizerFiles, load_weights
from megatron.checkpointing.huggingface.logit_check import plain_args
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.generation.model import load_model
from megatron.model import layer_params, trained_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.pool import run_ranks
from tests.training.native.in_turn import TIMEOUT, assert_resumes, to_their_ends
from tests.training.runs import ADAMW, LLAMA, SGD, TABLE, begin, bit_equal, cells, config, metric_rows
from tools.ckpts import convert_neox_to_hf

Weights = dict[tuple[int, str], Tensor]  # full, by layer and name
DECAY, STEPS = 0.7, 4
RUN = {"ema_decay": DECAY, "train_iters": STEPS, "checkpoint_factor": 1, "extra_save_iters": [0], "engine": "native"}
BF16 = {"precision": "bfloat16"}
FP16 = {"precision": "fp16", "fp16": {"initial_scale_power": 32, "hysteresis": 1}, "train_iters": 24}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_parallel_size": 2}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (ranks, {**ADAMW, **keys}) for name, (ranks, keys) in TABLE.items() if "deepspeed" not in name},
    "fp16": (1, {**ADAMW, **FP16}),
    "bf16": (1, {**ADAMW, **BF16}),
    "bf16 zero2": (2, {**ADAMW, **BF16, "zero_optimization": {"stage": 2}}),
    "fused": (1, {**ADAMW, **BF16, "fused_update": True, "train_micro_batch_size_per_gpu": 8}),
    "in the forward": (2, {**ADAMW, "zero_optimization": {"stage": 3}, "overlap_optimizer_with_forward": True}),
    "in host memory": (2, {**ADAMW, **OFFLOADED}),
    "sgd": (2, SGD),
    "muon": (2, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}),
    "ep2": (2, {**ADAMW, **EXPERTS}),
    "cp2": (2, {**ADAMW, "context_parallel_size": 2}),
}
DEFAULT_CASES = ["plain", "zero3", "tp2", "pp2", "fp16"]


def values(save: Path, *parts: dict[str, Any]) -> dict[str, Any]:
    return config(LLAMA, RUN, {"save": str(save)}, *parts)


def saved_args(checkpoint: Path) -> NeoXArgs:
    return plain_args(load_checkpoint_args(checkpoint)[0]).for_inference(1)


def trained(checkpoint: Path) -> tuple[Weights, Weights]:
    """The trained weights of a checkpoint (fp32 masters of 16-bit ones), and their averages."""
    args, files = saved_args(checkpoint), OptimizerFiles(checkpoint)
    specs = layer_params(args)
    loaded = load_weights(checkpoint, args, layers=list(specs), tensor_rank=0, tensor_size=1)
    spec_at = {(layer, spec.name): spec for layer in specs for spec in specs[layer]}
    weights, averages = {}, {}
    for layer, name in sorted(trained_parameters(args)):
        state = files.read(layer, spec_at[layer, name], 0, 1)
        weights[layer, name] = state.get(MASTER, loaded[layer][name].float())
        averages[layer, name] = state[AVERAGE]
    return weights, averages


@pytest.mark.parametrize("name", cells(DEFAULT_CASES, [name for name in CASES if name not in DEFAULT_CASES]))
def test_the_average_is_that_of_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    """The loop is in fp64, over the saved weights. A step that fp16 skips leaves the average as it is."""
    ranks, keys = CASES[name]
    run = values(tmp_path, keys)
    run_ranks(to_their_ends, ranks, [run], timeout=TIMEOUT)
    old_weights, average = trained(tmp_path / "global_step0")
    torch.testing.assert_close(average, old_weights, rtol=0, atol=0)
    expected = {place: value.double() for place, value in old_weights.items()}
    for step in range(1, run["train_iters"] + 1):
        now, average = trained(tmp_path / f"global_step{step}")
        if any(not torch.equal(now[place], old_weights[place]) for place in now):
            expected = {place: DECAY * expected[place] + (1 - DECAY) * now[place].double() for place in now}
        torch.testing.assert_close({p: v.double() for p, v in average.items()}, expected, rtol=1e-5, atol=1e-6)
        old_weights = now
    assert any(not torch.equal(average[place], now[place]) for place in now)
    skipped = OpenCheckpoint(tmp_path / f"global_step{run['train_iters']}").model_state()["skipped_steps"]
    assert (0 < skipped < run["train_iters"]) == (name == "fp16")


@pytest.mark.parametrize("name", cells(["plain"], ["zero3", "bf16 zero2", "in the forward", "tp2 pp2 sp"]))
def test_it_resumes_to_the_bit(name: str, tmp_path: Path) -> None:
    ranks, keys = CASES[name]
    assert_resumes({**values(tmp_path, keys), "extra_save_iters": None}, tmp_path, ranks)
    resumed, expected = (trained(tmp_path / folder / f"global_step{STEPS}")[1] for folder in ("cut", "through"))
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, later_name", cells([("plain", "zero3")], [("zero3", "pp2"), ("tp2", "plain"), ("bf16", "bf16 zero2")])
)
def test_it_goes_on_in_another_layout(name: str, later_name: str, tmp_path: Path) -> None:
    (ranks, keys), (later_ranks, later_keys) = CASES[name], CASES[later_name]
    run_ranks(to_their_ends, ranks, [{**values(tmp_path, keys), "exit_interval": 2}], timeout=TIMEOUT)
    _, average = trained(tmp_path / "global_step2")
    run_ranks(to_their_ends, later_ranks, [{**values(tmp_path, later_keys), "load": str(tmp_path)}], timeout=TIMEOUT)
    for step in (3, 4):
        weights, actual = trained(tmp_path / f"global_step{step}")
        average = {place: value.lerp(weights[place], 1 - DECAY) for place, value in average.items()}
        torch.testing.assert_close(actual, average, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", cells(["zero2"], ["plain", "zero3", "pp2", "bf16", "in the forward"]))
def test_validation_measures_it_and_changes_nothing(name: str, tmp_path: Path) -> None:
    """The loss is that of a run which begins with the average; weights and averages stay bit for bit."""
    ranks, keys = CASES[name]
    validated = {"eval_iters": 2, "eval_interval": 2}
    runs = [values(tmp_path / "a", keys), values(tmp_path / "b", keys, validated)]
    for undisturbed, validated_weights in run_ranks(to_their_ends, ranks, runs, timeout=TIMEOUT):
        assert bit_equal(undisturbed, validated_weights)
    torch.testing.assert_close(*(trained(tmp_path / x / f"global_step{STEPS}") for x in "ab"), rtol=0, atol=0)
    rows = metric_rows(tmp_path / "b", "validation/ema/lm_loss")
    assert [row["iteration"] for row in rows] == [0, 2, 4]
    differ = [row["validation/ema/lm_loss"] != row["validation/lm_loss"] for row in rows]
    assert differ == [False, True, True]
    start_keys = {
        "load": str(tmp_path / "b"),
        "load_ema": True,
        "finetune": True,
        "ema_decay": None,
        "exit_interval": 1,
    }
    run_ranks(to_their_ends, ranks, [values(tmp_path / "c", keys, validated, start_keys)], timeout=TIMEOUT)
    begin_row = metric_rows(tmp_path / "c", "validation/lm_loss")[0]
    assert begin_row["validation/lm_loss"] == pytest.approx(rows[-1]["validation/ema/lm_loss"], rel=1e-6)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("averaged")
    run_ranks(to_their_ends, 1, [{**values(save, ADAMW), "checkpoint_factor": STEPS}], timeout=TIMEOUT)
    return save


def test_it_is_loaded_and_exported(averaged: Path, tmp_path: Path) -> None:
    """For generation, and in HuggingFace's format, whose own names and rows the last weights show."""
    checkpoint = averaged / f"global_step{STEPS}"
    weights, averages = trained(checkpoint)
    args = saved_args(checkpoint).replace(load=str(averaged), save=None)
    for load_ema, expected in ((False, weights), (True, averages)):
        keys = args.replace(load_ema=load_ema)
        stage = load_model(keys, ParallelGroups.single(), build_tokenizer(keys), logging.getLogger("test")).stage
        held = dict(stage.named_parameters())
        assert any(torch.equal(held[name], expected[0, "word_embeddings.weight"]) for name in held)
    folders = {}
    for flag, words in (("last", []), ("ema", ["--ema"])):
        convert_neox_to_hf.main(["--input_dir", str(checkpoint), "--output_dir", str(tmp_path / flag), *words])
        folders[flag] = load_file(tmp_path / flag / "model.safetensors")
        assert ("exponential moving average" in (tmp_path / flag / "README.md").read_text()) == (flag == "ema")
    rows = len(folders["ema"]["model.embed_tokens.weight"])
    for flag, expected in (("last", weights), ("ema", averages)):
        assert torch.equal(folders[flag]["model.embed_tokens.weight"], expected[0, "word_embeddings.weight"][:rows])
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(folders[flag][name], expected[3, "mlp.linear2.weight"])


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"ema_decay": 0.9, "engine": "deepspeed"}, "ema_decay"),
        ({"qk_clip_threshold": 9.0, "engine": "deepspeed"}, "qk_clip_threshold"),
        ({"ema_decay": 0.9, "lora": {"r": 2}}, "ema_decay: averages no adapters"),
        ({"ema_decay": 0.9, "compat_no_save_optim": True}, "ema_decay: is saved with the optimizer's state"),
        ({"ema_decay": 0.9, "valid_sets": {"ema": "a"}, "eval_iters": 1}, "valid_sets.ema"),
        ({"ema_decay": 0.9, "save_best": "validation/ema/lm_loss", "eval_iters": 1}, "save_best: .*averaged"),
        ({"load_ema": True}, "load_ema: needs a checkpoint"),
    ],
)
def test_what_it_cannot_do_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        begin(config(LLAMA, keys))


def test_averages_that_are_not_there_are_refused(averaged: Path, tmp_path: Path) -> None:
    keys = {"load": str(averaged), "load_ema": True}
    with pytest.raises(ConfigError, match="load_ema: takes weights alone; set finetune: true"):
        begin(config(LLAMA, ADAMW, keys))
    with pytest.raises(ConfigError, match="load_ema: is not built with lora"):
        begin(config(LLAMA, ADAMW, keys, finetune=True, lora={"r": 2}))
    last_only = config(LLAMA, ADAMW, train_iters=1, checkpoint_factor=1, save=str(tmp_path))
    run_ranks(to_their_ends, 1, [last_only], timeout=TIMEOUT)
    words = ["--input_dir", str(tmp_path), "--output_dir", str(tmp_path / "hf"), "--ema", "--dry-run"]
    with pytest.raises(SystemExit, match="has no averaged weights"):
        convert_neox_to_hf.main(words)
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        begin(config(LLAMA, ADAMW, keys, load=str(tmp_path), finetune=True))
