"""`trainable`: what is not trained stays bit for bit, the rest trains as in torch, in every layout."""

import re
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.checkpointing.manifest import ParallelLayout
from megatron.checkpointing.resharding import reshard
from megatron.data import Batch
from megatron.model import build_stage, freeze, init_stage, layer_params, lowest_trained, trained_parameters
from megatron.model.init import initial_rows, stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.deepspeed.engine import DeepSpeedEngine
from megatron.training.metrics.flops import model_flops
from megatron.training.native.engine import NativeEngine
from megatron.training.parallelize import parallelize
from megatron.training.recompute import recompute_blocks
from tests.model import runs as small_runs
from tests.model.stages import Weights, document_batch, groups_of, random_weights, small
from tests.pool import run_ranks
from tests.training import runs
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, TABLE, Curve, config, run_to_end

STEPS, UNTIED, TIED_HEAD_CASE = 3, {"no_weight_tying": True}, "last 2 and the tied head alone"
# Model, key, and what it trains, said once more in other words. Four blocks: layers 2 to 5.
SETS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "last 2 and the tied head": (LLAMA, {"last_layers": 2, "head": True}, r"[450]\.(?!position)"),
    TIED_HEAD_CASE: (LLAMA, {"last_layers": 2, "head": True, "embedding_gradient": False}, r"[450]\.(?!position)"),
    "the head": (NEOX | UNTIED, {"head": True}, r"8\.final_linear\.weight"),
    "weights of the first block": (NEOX | UNTIED, {"names": [r"^2\..*linear\d"]}, r"2\.mlp\.linear\d"),
    "norms and biases": (NEOX, {"names": [r"mlp.*bias$", "norm"]}, r".*(mlp\.linear\d\.bias|norm\.\w+)$"),
    "last block under a table for all": (RPE, {"last_layers": 1}, r"5\.(?!attention\.rpe)"),
}


def values(name: str, layout: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    model, trainable, _ = SETS[name]
    return config(ADAMW, model, layout, trainable=trainable, train_micro_batch_size_per_gpu=2, **overrides)


def with_torch(rank: int, world_size: int) -> list[Curve]:
    """For the pool: of each set a whole model under torch's AdamW, the rest `requires_grad_(False)`."""
    return [with_torch_one(*case) for case in SETS.values()]


def with_torch_one(model: dict[str, Any], trainable: dict[str, Any], trained: str) -> Curve:
    training = runs.begin(config(ADAMW, model, train_micro_batch_size_per_gpu=8))
    stage, batches, args = training.engine.stage, batches_of(training), training.args
    weights: dict[int, dict[str, Tensor]] = {}
    for layer, name, param in stage_parameters(stage):
        weights.setdefault(layer, {})[name] = param.detach()
        param.requires_grad_(re.match(trained, f"{layer}.{name}") is not None)
    if trainable.get("embedding_gradient") is False:
        stage.layers["0"].register_forward_hook(lambda _, __, out: out.detach())
    trained_params = [p for p in stage.parameters() if p.requires_grad]
    decays = ([p for p in trained_params if p.dim() > 1], 0.1), ([p for p in trained_params if p.dim() == 1], 0.0)
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    losses, norms = [], []
    stage.train()
    for _ in range(STEPS):
        (batch,) = next(batches)
        logits = stage(None, batch).transpose(0, 1).flatten(0, 1).float()
        token_losses = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        loss = (token_losses * batch.loss_weights.flatten()).sum() / batch.loss_weights.sum()
        losses.append(float(loss))
        if args.z_loss:
            z = torch.logsumexp(logits, -1).square() * batch.loss_weights.flatten()
            loss = loss + args.z_loss * z.sum() / batch.loss_weights.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained_params, ADAMW["gradient_clipping"])))
        optimizer.step()
    return Curve(losses, norms, weights)


@pytest.fixture(scope="module")
def references() -> dict[str, Curve]:
    return dict(zip(SETS, run_ranks(with_torch, 1)[0], strict=True))


def check_frozen(name: str, curve: Curve, values: dict[str, Any], dtype: torch.dtype) -> None:
    args = NeoXArgs.from_dict({**values, "padded_vocab_size": 384})
    for layer, specs in layer_params(args).items():
        for spec in specs:
            start = torch.cat([rows for _, rows in initial_rows(spec, layer, args, torch.device("cpu"))])
            now = curve.weights[layer][spec.name]
            trained = re.match(SETS[name][2], f"{2 if spec.shared else layer}.{spec.name}") is not None
            assert now.equal(start.to(dtype)) is not trained, (name, layer, spec.name)


@pytest.mark.parametrize("layout", runs.cells(  # "tp2 pp2 sp" has what two of those have, ZeRO 3 cuts what ZeRO 2 does
    ["zero3"],
    ["tp2 pp2 sp", "zero3, deepspeed"],
    ["zero2", "zero2, deepspeed", "plain", "dp2", "tp2", "pp2", "plain, deepspeed"],
))  # fmt: skip
def test_trains_as_torch_and_leaves_the_rest(layout: str, references: dict[str, Curve]) -> None:
    ranks, keys = TABLE[layout]
    configs = {name: values(name, keys) for name in SETS}
    curves = runs.curves_of(configs, STEPS, ranks)
    for name, curve in curves.items():
        check_frozen(name, curve, configs[name], torch.float32)
    # Adam's steps of values whose gradient is rounding are of the order of its rate: one CPU's 1.6e-4.
    runs.assert_alike(curves, references, weights=5e-4)


def test_in_16_bits() -> None:
    reference: dict[str, Curve] = {}
    for ranks, layout in (TABLE[name] for name in ("zero1", "zero3", "pp2")):
        configs = {
            name: values(name, layout, precision="bfloat16") for name in (TIED_HEAD_CASE, "weights of the first block")
        }
        for name, curve in (curves := runs.curves_of(configs, STEPS, ranks)).items():
            check_frozen(name, curve, configs[name], torch.bfloat16)
        reference = reference or curves
        runs.assert_alike(curves, reference, losses=1e-3, norms=1e-2, weights=1.0)


def going_on(save: Path, layout: str, **overrides: Any) -> dict[str, Any]:
    ends = {"save": str(save), "train_iters": 3, "checkpoint_factor": 2, "precision": "bfloat16"}
    return values(TIED_HEAD_CASE, TABLE[layout][1], **ends, **overrides)


def test_goes_on_in_another_layout_and_with_what_it_trained(tmp_path: Path) -> None:
    first_run = tmp_path / "there"
    uninterrupted = run_ranks(run_to_end, 2, going_on(first_run, "pp2"))
    start = {"load": str(first_run), "iteration": 2}
    run_ranks(run_to_end, 2, going_on(tmp_path / "zero3", "zero3", **start))
    resumed = run_ranks(run_to_end, 2, going_on(tmp_path / "again", "pp2", **start))
    assert all(runs.bit_equal(a[1], b[1]) for a, b in zip(uninterrupted, resumed, strict=True)), "as if never stopped"
    args = NeoXArgs.from_dict({**going_on(first_run, "plain"), "padded_vocab_size": 384})
    resharded = reshard(first_run / "global_step2", tmp_path / "cut", args, ParallelLayout(1, 2, 1, 0, "bf16", 2))
    run_ranks(run_to_end, 1, going_on(tmp_path / "one", "plain", load=str(resharded.parent), iteration=2))
    for name in ("zero3", "one"):
        assert losses(tmp_path / name) == pytest.approx({3: losses(first_run)[3]}, rel=1e-3)
    problem = r"trainable \(program\).*: 3\.attention\.dense\.weight.* here only.*no_load_optim"
    other_set = {**start, "trainable": {"last_layers": 3, "head": True}}
    with pytest.raises(AssertionError, match=problem):
        run_ranks(run_to_end, 1, {**going_on(tmp_path / "no", "plain"), **other_set})
    with pytest.raises(AssertionError, match=r"trainable \(\w+\).*: 0\.word_embeddings\.weight.* there only"):
        run_ranks(run_to_end, 1, {**going_on(tmp_path / "no", "plain"), **other_set, "trainable": {"last_layers": 2}})


def padded_args(model: dict[str, Any], *parts: dict[str, Any], **keys: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(model, *parts, padded_vocab_size=384, **keys))


def kept_bytes(**keys: Any) -> int:
    """Returns the bytes that a forward pass keeps for its backward pass, without parameters."""
    args, groups = padded_args(LLAMA, **keys).for_world(1), ParallelGroups.single()
    stage = build_stage(args, groups)
    init_stage(stage, args, groups)
    freeze(stage_parameters(stage), args)
    recompute_blocks(stage, args)
    parameters = {param.data_ptr() for param in stage.parameters()}
    bytes_by_address: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        if value.data_ptr() not in parameters:
            bytes_by_address[value.data_ptr()] = value.untyped_storage().nbytes()
        return value

    tokens = torch.arange(64).view(2, 32)
    alive = []  # or an address could be used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda value: (alive.append(value), keep(value))[1], lambda x: x):
        stage(None, Batch(tokens, tokens, torch.ones_like(tokens))).sum().backward()
    assert all((param.grad is not None) is param.requires_grad for param in stage.parameters())
    return sum(bytes_by_address.values())


@pytest.mark.parametrize("overrides", [{}, {"checkpoint_activations": True}])
@pytest.mark.parametrize("trainable", [{"last_layers": 2}, SETS[TIED_HEAD_CASE][1]])
def test_layers_below_keep_nothing(overrides: dict[str, Any], trainable: dict[str, Any]) -> None:
    sizes = [kept_bytes(num_layers=layers, trainable=trainable, **overrides) for layers in (2, 3, 8)]
    assert sizes[0] == sizes[1] == sizes[2] > 0, "however many they are"
    assert kept_bytes(num_layers=8, **overrides) > sizes[2]
    with_lookup = kept_bytes(num_layers=8, trainable={"last_layers": 2, "head": True}, **overrides)
    assert with_lookup > sizes[2], "the embedding's own gradient goes through all blocks"


def test_flops_of_what_is_done() -> None:
    args = padded_args(LLAMA, UNTIED).for_world(1)
    full_step, half = model_flops(args), model_flops(args.replace(trainable={"last_layers": 2}))
    forward = full_step / 3
    head = 2 * args.train_batch_size * args.seq_length * args.hidden_size * 384
    assert half == pytest.approx(forward + (forward - head) / 2 * 2 + head)
    assert model_flops(args.replace(trainable={"names": ["."]})) == pytest.approx(full_step)
    assert model_flops(args.replace(trainable={"head": True})) == pytest.approx(forward + head)


@pytest.mark.parametrize(("trainable", "model", "message"), [
    ({"names": ["mlp.linear3"]}, {}, r"names.*mlp\.linear3.*mlp\.linear\d\..*2 to 5"),
    ({"names": ["("]}, {}, r"trainable\.names: \( .*regular expression"),
    ({}, {}, "trainable.*last_layers, head or names"),
    ({"last_layers": 5}, {}, "last_layers.*5 of num_layers 4"),
    ({"last_layers": 1, "embedding_gradient": False}, {}, "embedding_gradient.*tied head"),
    ({"head": True, "embedding_gradient": False}, UNTIED, "embedding_gradient.*tied head"),
    ({"names": ["^0"], "embedding_gradient": False}, {"pos_emb": "learned"}, r"position_embeddings\.weight"),
    ({"last_layer": 1}, {}, "last_layer"),
])  # fmt: skip
def test_is_refused(trainable: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained_parameters(padded_args(NEOX, model, trainable=trainable))


@pytest.mark.parametrize(("model", "trainable", "layer"), [
    (NEOX, {"last_layers": 2}, 4),
    (NEOX, {"last_layers": 2, "head": True}, 0),  # a tied head is the embedding
    (NEOX, {"last_layers": 2, "head": True, "embedding_gradient": False}, 4),
    (NEOX | UNTIED, {"head": True}, 8),
    (NEOX, {"head": True, "embedding_gradient": False}, 8),
    (RPE, {"names": ["rpe"]}, 2),
])  # fmt: skip
def test_the_lowest_trained_layer(model: dict[str, Any], trainable: dict[str, Any], layer: int) -> None:
    assert lowest_trained(padded_args(model, trainable=trainable)) == layer


def fp16_steps(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[tuple[Weights, Weights, list[bool]]]:
    """For the pool: weights before and after steps of which the first overflow, and which did."""
    layout_steps = []
    for engine_type, layout in product((DeepSpeedEngine, NativeEngine), layouts):
        scaling = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
        keys = {**small_runs.LLAMA, **small_runs.SGD, **layout, "precision": "fp16", "fp16": scaling}
        keys |= {"trainable": {"last_layers": 2}, "gradient_accumulation_steps": 1}
        args = small(**keys).for_world(world_size)
        groups = groups_of(args, world_size)
        stage = build_stage(args, groups)
        freeze(stage_parameters(stage), args)
        with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):  # by a CPU too
            engine = parallelize(stage, LANGUAGE_MODELLING, args, groups, engine_type)
        engine.set_weights(random_weights(args))
        old_weights, skipped = engine.weights(), []
        while skipped[-1:] != [False] and len(skipped) < 40:
            skipped.append(bool(engine.train_step([document_batch(args, seed=rank)], 0.1).skipped))
        layout_steps.append((old_weights, engine.weights(), skipped))
        engine.close()
    return layout_steps


@pytest.mark.more
def test_frozen_parameters_stay_what_they_are_in_fp16() -> None:
    """With a loss scale that first is far too high, by the optimizers of all ZeRO stages."""
    layouts = [{"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)]
    for size, size_layouts in ((1, [{}]), (2, layouts)):
        for old_weights, new_weights, skipped in run_ranks(fp16_steps, size, size_layouts)[0]:
            assert skipped[0] and not skipped[-1], skipped
            for layer, params in new_weights.items():
                for name, value in params.items():
                    assert torch.equal(value, old_weights[layer][name]) is (layer not in (4, 5)), (layer, name)
