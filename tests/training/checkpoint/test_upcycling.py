"""A dense run becomes one with experts: the same first loss and bits; else it is refused."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import megatron.checkpointing.upcycling as upcycling
from megatron.checkpointing import find_checkpoint, load_checkpoint_args, load_weights, verify
from megatron.model.init import initial_weight
from megatron.model.weight_map import named_params
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import ADAMW, LLAMA, NEOX, cells, config, run_to_end
from tools.ckpts import upcycle

TP2 = {"model_parallel_size": 2}
EXPERTS: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "norm_topk_prob": True}
EXPERTS["moe_aux_loss_coeff"] = 0.01
# Dense model; the experts; ranks and keys of the run that goes on.
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "llama, tp2 cut": (LLAMA, {**EXPERTS, "moe_expert_tensor_parallel": "cut", "moe_layer_freq": [0, 1]}, 2, TP2),
    "biases, tp2": (NEOX, {**EXPERTS, "moe_intermediate_size": 128, "moe_expert_bias": True, "moe_expert_interval": 2,
                           "moe_router_bias": True, "moe_router_bias_update_rate": 0.01}, 2, TP2),
    # All experts of a token add up to 1 without being divided, and capacity that is never reached.
    "all experts, sinkhorn": (LLAMA, {"moe_num_experts": 2, "moe_top_k": 2, "moe_router_type": "sinkhorn",
                                      "moe_expert_capacity_factor": 1.0}, 1, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dense")
    bf16 = {"use_bias_in_mlp": True, "precision": "bfloat16"}
    models = {"llama": LLAMA, "neox": NEOX | TP2, "bf16": LLAMA | TP2 | bf16}
    for name, model in models.items():
        values = config(model, ADAMW, train_iters=1, checkpoint_factor=1, save=str(folder / name))
        run_ranks(run_to_end, 1 if name == "llama" else 2, values)
    return {name: folder / name for name in models}


def upcycled(tmp_path: Path, source: Path, experts: dict[str, Any], tp: int = 1, *options: str) -> Path:
    (tmp_path / "moe.yml").write_text(yaml.safe_dump(experts))
    argv = ["--input_dir", str(source), "--output_dir", str(tmp_path / "out"), "--experts", str(tmp_path / "moe.yml")]
    upcycle.main([*argv, "--tp", str(tp), *options])
    return find_checkpoint(tmp_path / "out")


def refused(source: Path, out: Path, *settings: str) -> str:
    with pytest.raises(SystemExit) as stop:
        upcycle.main(["--input_dir", str(source), "--output_dir", str(out), "--set", *settings])
    assert str(stop.value.code).startswith("upcycle.py: error: ")
    return str(stop.value.code)


@pytest.mark.parametrize("name", cells(["llama, tp2 cut", "all experts, sinkhorn"], product=["biases, tp2"]))
def test_the_first_loss_is_the_dense_models(name: str, dense: dict[str, Path], tmp_path: Path) -> None:
    model, experts, ranks, layout = CELLS[name]
    source = dense["neox" if model is NEOX else "llama"]
    path = upcycled(tmp_path, source, experts, layout.get("model_parallel_size", 1))
    manifest = verify(path)
    assert path.name == "global_step0" and manifest is not None and manifest.layout.tensor == ranks
    assert not manifest.optimizer and manifest.consumed_samples == 0 and manifest.tokenizer is not None
    common = config(model, ADAMW, {"finetune": True, "train_iters": 2, "checkpoint_factor": 2}, layout)
    run_ranks(run_to_end, ranks, {**common, "load": str(source), "save": str(tmp_path / "dense")})
    run_ranks(run_to_end, ranks, {**common, **experts, "load": str(tmp_path / "out"), "save": str(tmp_path / "moe")})
    dense_losses, moe_losses = losses(tmp_path / "dense"), losses(tmp_path / "moe")
    assert moe_losses[1] == pytest.approx(dense_losses[1], rel=1e-5)
    step = tmp_path / "moe" / "global_step2"
    args = load_checkpoint_args(step)[0]
    layer = next(block + 2 for block in range(4) if args.has_experts(block))
    trained = load_weights(step, args, layers=[layer], tensor_rank=0, tensor_size=1)
    first_expert, second_expert = trained[layer]["mlp.experts.mlp.w1"].unflatten(0, (args.moe_num_experts, -1))[:2]
    assert (first_expert - second_expert).abs().max() > 1e-4 or args.moe_num_experts == args.moe_top_k, (
        "experts go their own ways"
    )


def test_the_bits_of_the_source(dense: dict[str, Path], tmp_path: Path) -> None:
    """Experts are copies in all chosen blocks, all else is as it was, and routers are a fresh model's."""
    source = find_checkpoint(dense["bf16"])
    experts = {**EXPERTS, "moe_layer_freq": [0, 1], "moe_expert_bias": True, "moe_router_bias": True,
               "moe_router_bias_update_rate": 0.1}  # fmt: skip
    path = upcycled(tmp_path, dense["bf16"], experts, 2, "--seed", "5")
    args, old_args = load_checkpoint_args(path)[0], load_checkpoint_args(source)[0]
    assert args.seed == 5 and args.tp == 2
    full_layers = {"layers": range(args.num_layers + 4), "tensor_rank": 0, "tensor_size": 1}
    new, old = load_weights(path, args, **full_layers), load_weights(source, old_args, **full_layers)
    for layer, tensors in old.items():
        chosen = layer in (3, 5)
        for name, value in tensors.items():
            if not (chosen and name.startswith("mlp.")):
                assert torch.equal(new[layer][name], value), (layer, name)
        if not chosen:
            assert new[layer].keys() == tensors.keys()
            continue
        mlp = {name.removeprefix("mlp."): value for name, value in new[layer].items()}
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            up, gate = tensors[f"mlp.linear1.{kind}"].chunk(2)
            down = tensors[f"mlp.linear2.{kind}"]
            expected = {"w1": gate, "w3": up, "w2": down.t() if kind == "weight" else down.unsqueeze(0)}
            for name, value in expected.items():
                copies = mlp[f"experts.mlp.{name}{suffix}"].unflatten(0, (4, -1))
                assert all(torch.equal(copy, value) for copy in copies), name
        initial = initial_weight(named_params(args)[layer, "mlp.router.layer.weight"], layer, args)
        assert (
            torch.equal(mlp["router.layer.weight"], initial.to(mlp["router.layer.weight"].dtype)) and initial.std() > 0
        )
        assert mlp["router.expert_bias"].dtype == torch.float32 and not mlp["router.expert_bias"].any()
    assert not torch.equal(new[3]["mlp.router.layer.weight"], new[5]["mlp.router.layer.weight"])


GOOD = [f"{key}={str(value).lower()}" for key, value in EXPERTS.items()]


def test_what_would_begin_with_another_loss_is_refused(dense: dict[str, Path], tmp_path: Path) -> None:
    for settings, facts in (
        ("moe_num_experts=1", ["moe_num_experts: ", "1"]),
        ("norm_topk_prob=false", ["norm_topk_prob: "]),
        ("norm_topk_prob=false moe_top_k=4 moe_router_score_function=sigmoid", ["norm_topk_prob: true"]),
        ("moe_top_k=1", ["moe_top_k: "]),
        ("moe_top_k=1 moe_router_type=sinkhorn", ["moe_top_k: "]),
        ("moe_router_topk_scaling_factor=2.5", ["--set: moe_router_topk_scaling_factor: ", "2.5"]),
        ("moe_intermediate_size=24", ["--set: moe_intermediate_size: ", "24"]),
        ("moe_shared_expert_intermediate_size=16", ["moe_shared_expert_intermediate_size: "]),
        ("moe_expert_capacity_factor=1.5", ["moe_expert_capacity_factor: "]),
        ("moe_layer_freq=[0]", ["moe_layer_freq: "]),
        ("train_iters=3", ["--set: train_iters: "]),
        ("moe_top_k=9", ["moe_top_k: 9", "moe_num_experts 4", "--set"]),
    ):
        message = refused(dense["llama"], tmp_path / "out", *GOOD, *settings.split())
        assert all(fact in message for fact in facts), (settings, message)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_call_leaves_nothing_and_is_made_again(dense: dict[str, Path], tmp_path: Path) -> None:
    save_layer, layers = upcycling.save_layer, []

    def killed(folder: Path, layer: int, *args: Any) -> Any:
        layers.append(layer)
        if layer == 3:
            raise KeyboardInterrupt
        return save_layer(folder, layer, *args)

    with mock.patch.object(upcycling, "save_layer", killed), pytest.raises(KeyboardInterrupt):
        upcycled(tmp_path, dense["llama"], EXPERTS)
    assert layers == [0, 2, 3] and not (tmp_path / "out").exists()
    verify(upcycled(tmp_path, dense["llama"], EXPERTS))


def test_what_sources_are_refused(dense: dict[str, Path], tmp_path: Path) -> None:
    llama, neox, out = dense["llama"], dense["neox"], tmp_path / "out"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert "moe_expert_bias: true" in refused(neox, out, *GOOD, "moe_intermediate_size=128")
    assert "moe_intermediate_size: 128" in refused(neox, out, *GOOD, "moe_expert_bias=true")
    assert "hf_to_neox.py" in refused(tmp_path / "hf", out, *GOOD)
    upcycled(tmp_path, llama, EXPERTS)
    assert "has experts" in refused(out, tmp_path / "again", *GOOD)
    for full in (out, llama):
        message = refused(llama, full, *GOOD)
        assert str(full) in message and "checkpoints already" in message
    assert "--tp" in refused(llama, tmp_path / "other", *GOOD, "--tp", "0")
    shutil.copytree(llama, tmp_path / "copy")
    next((tmp_path / "copy").glob("*/layer_02*")).write_bytes(b"")
    assert "damaged" in refused(tmp_path / "copy", tmp_path / "other", *GOOD)
    assert not (tmp_path / "other").exists()
