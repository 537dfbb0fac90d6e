"""Training of HuggingFace's families is that of transformers' models, load-balancing loss and all."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing.families.convert import from_hf, to_hf
from megatron.checkpointing.huggingface import HFFolder
from megatron.data import Batch
from megatron.generation.from_huggingface import hf_model_keys
from megatron.model import layer_params
from megatron.mpu import shard
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine import Engine
from megatron.training.setup import build_engine
from tests.checkpointing.family_models import ODD, collected, odd_model, on_disk
from tests.checkpointing.family_runs import TOKENS, logits_by_layout
from tests.model.runs import full_weights
from tests.model.stages import Weights, groups_of
from tests.pool import run_ranks
from tests.training.layout_runs import Run
from tests.training.runs import GOLDEN, cells

STEPS, RATE, DECAY = 3, 1e-3, 0.1
EPS = 1e-4  # where gradients are rounding alone, a smaller one would make steps of them
SEQ, VOCAB, PADDED = 16, 91, 96
DEFAULT_MODELS, ALL = list(ODD)[::2], list(ODD)
TP2, PP2 = {"model_parallel_size": 2}, {"pipe_parallel_size": 2}
SP2, EP2 = {**TP2, "sequence_parallel": True}, {"expert_parallel_size": 2, "gradient_accumulation_steps": 1}
# Ranks exchange, gather or hand round heads whose values are narrower or wider than keys.
CONTEXT = [(2, {"context_parallel_size": 2, "context_parallel_type": kind}, ["deepseek 3", "deepseek 3 halves"])
           for kind in ("allgather", "ulysses", "ring")]  # fmt: skip
Model = tuple[dict[str, Any], Weights]


def rows_of(*shape: int) -> Tensor:
    return torch.randint(0, 90, (*shape, SEQ), generator=torch.Generator().manual_seed(1))


def imported(model: Any) -> tuple[str, Model]:
    """The family of a model of transformers; its keys, and its weights in our names."""
    config, tensors = on_disk(model)
    read = {name: value.clone() for name, value in tensors.items()}.__getitem__
    keys, weights = from_hf(config, read, padded_vocab_size=PADDED)
    return config["model_type"], (keys, collected(weights))


def args_of(*parts: dict[str, Any]) -> NeoXArgs:
    values = {"seq_length": SEQ, "precision": "fp32", "mask_padded_vocab": VOCAB, "gradient_clipping": 0.0}
    for part in parts:
        values |= part
    return NeoXArgs.from_dict(values)


def build_with_weights(args: NeoXArgs, weights: Weights) -> Engine:
    """The engine of this rank, with its part of the full weights."""
    groups = groups_of(args, args.world_size)
    engine = build_engine(args, groups)
    rank, size = groups.rank("tensor"), groups.size("tensor")
    engine.set_weights({
        layer: {spec.name: shard(weights[layer][spec.name], spec, rank, size) for spec in specs}
        for layer, specs in layer_params(args).items() if layer in weights
    })  # fmt: skip
    return engine


def batch_of(rows: Tensor) -> Batch:
    return Batch(rows, rows.roll(-1, -1), torch.ones(rows.shape))


@cache
def reference(case: str) -> tuple[str, Model, Tensor, list[float], dict[str, Tensor]]:
    """Results of transformers: family, model and logits before the steps, losses, weights after the steps."""
    model = odd_model(case)
    family, neox_model = imported(model)
    # These may be matrices.
    biases = {id(param) for name, param in model.named_parameters() if name.endswith(("bias", "A_log"))}
    decayed = [param for param in model.parameters() if param.dim() >= 2 and id(param) not in biases]
    decayed_ids = {id(param) for param in decayed}
    undecayed = [param for param in model.parameters() if id(param) not in decayed_ids]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    with torch.no_grad():
        logits = model(TOKENS).logits
    losses = []
    for rows in rows_of(STEPS, 2):
        loss = torch.nn.functional.cross_entropy(model(rows).logits.flatten(0, 1), rows.roll(-1, -1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return family, neox_model, logits, losses, on_disk(model)[1]


ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": EPS}}, "weight_decay": DECAY,
    "train_iters": STEPS, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
}  # fmt: skip


def steps(rank: int, world_size: int, models: list[Model], layout: dict[str, Any]) -> list[Run]:
    """For the pool: of every model."""
    model_runs = []
    for keys, weights in models:
        engine = build_with_weights(args_of(keys, layout, ADAMW).for_world(world_size), weights)
        losses = []
        for rows in rows_of(STEPS, 2):
            losses.append(float(engine.train_step([batch_of(row) for row in rows.split(1)], RATE).loss))
        model_runs.append(Run(losses, [], [], engine.groups.rank("tensor"), engine.weights(master=True)))
        engine.close()
    return model_runs


@pytest.mark.parametrize(
    ("world", "keys", "cases"),
    cells(
        [(1, {}, DEFAULT_MODELS), (2, SP2, ["deepseek 3"])],
        [(2, EP2, ["deepseek 2", "glm 4 moe lite"]), *CONTEXT],
        product=[(2, TP2, ALL), (1, {}, ALL), (2, PP2, ALL)],
    ),
)
def test_three_steps_are_those_of_transformers(world: int, keys: dict[str, Any], cases: list[str]) -> None:
    references = [reference(case) for case in cases]
    ranks = run_ranks(steps, world, [model for _, model, *_ in references], keys)
    for case, (family, model, _, losses, weights), *parts in zip(cases, references, *ranks, strict=True):
        assert parts[0].losses == pytest.approx(losses, rel=1e-5), case
        args = args_of(model[0], ADAMW)
        exported = dict(to_hf(args, full_weights(args, parts).items(), family=family, vocab_size=VOCAB))
        assert exported.keys() == weights.keys(), case
        for name, value in weights.items():
            assert torch.allclose(exported[name], value, atol=1e-5, rtol=1e-5), (case, name)
        assert max(abs(a - b) for a, b in zip(losses, losses[1:], strict=False)) > 1e-3, "steps must move it"


@pytest.mark.product
def test_logits_before_the_steps() -> None:
    references, layouts = [reference(case) for case in ALL], [(1, 1), (2, 1), (1, 2)]
    for layout, logits in logits_by_layout([model for _, model, *_ in references], layouts).items():
        for case, (_, _, expected, *_), actual in zip(ALL, references, logits, strict=True):
            assert (actual[..., :VOCAB] - expected).abs().max() < 1e-5, (case, layout)


# -- the load-balancing loss
CASES = ("mixtral", "olmoe", "qwen 2 moe", "qwen 3 moe", "gpt oss", "granite moe")
COEFFICIENT, ROWS = 0.7, 4
EP2_ZERO3 = {"expert_parallel_size": 2, "zero_optimization": {"stage": 3}}
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "weight_decay": 0.0, "train_iters": 1,
    "train_micro_batch_size_per_gpu": 2, "train_batch_size": ROWS,
}  # fmt: skip


def balanced(case: str) -> tuple[str, Model, list[float], dict[str, Tensor]]:
    """Results of transformers: family, model, loss and balancing loss by micro-batches of two, gradients."""
    model = odd_model(case, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    family, neox_model = imported(model)
    losses, balances = [], []
    for rows in rows_of(ROWS).split(2):
        out = model(rows)
        losses.append(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), rows.roll(-1, -1).flatten()))
        balances.append(out.aux_loss)
    loss, balance = torch.stack(losses).mean(), torch.stack(balances).mean()
    (loss + model.config.router_aux_loss_coef * balance).backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    return family, neox_model, [float(loss.detach()), float(balance.detach())], on_disk(model)[1]


def step(rank: int, world_size: int, models: list[Model], layout: dict[str, Any]) -> list[Run]:
    """For the pool: what a step of each model found, and how far plain descent took its weights."""
    model_runs = []
    for keys, weights in models:
        engine = build_with_weights(args_of(keys, layout, SGD).for_world(world_size), weights)
        old_weights = {i: {n: t.clone() for n, t in held.items()} for i, held in engine.weights(master=True).items()}
        groups, batches = engine.groups, [batch_of(rows) for rows in rows_of(ROWS).split(2)]
        result = engine.train_step(batches[groups.rank("data") :: groups.size("data")], 1.0)
        new_weights = engine.weights(master=True)
        updates = {
            i: {name: old_weights[i][name] - value for name, value in held.items()} for i, held in new_weights.items()
        }
        losses = [float(result.loss), float(result.metrics["moe_aux_loss"])]
        model_runs.append(Run(losses, [], [], groups.rank("tensor"), updates))
        engine.close()
    return model_runs


@pytest.mark.parametrize(
    ("world", "keys"), cells([(2, {**TP2, "sequence_parallel": True})], product=[(2, EP2_ZERO3), (1, {}), (2, {})])
)
def test_the_load_balancing_loss_is_that_of_transformers(world: int, keys: dict[str, Any]) -> None:
    references = [balanced(case) for case in CASES]
    ranks = run_ranks(step, world, [model for _, model, _, _ in references], keys)
    for (family, model, losses, gradients), *steps in zip(references, *ranks, strict=True):
        args = args_of(model[0], SGD)
        assert (args.moe_aux_loss_coeff, args.moe_aux_loss_scope) == (COEFFICIENT, "transformers")
        for run in steps:
            assert run.losses == pytest.approx(losses, abs=1e-5), family
        exported = dict(to_hf(args, full_weights(args, steps).items(), family=family, vocab_size=VOCAB))
        assert exported.keys() == gradients.keys(), family
        for name, value in gradients.items():
            assert (exported[name] - value).abs().max() < 1e-5, (family, name)
        endings = (".gate.weight", ".router.weight", ".router.layer.weight")
        router = next(g for name, g in gradients.items() if name.endswith(endings))
        assert router.abs().max() > 1e-3, family


def test_without_router_logits_there_is_no_such_loss() -> None:
    """transformers has it only where output_router_logits is true, whatever its factor is."""
    config, tensors = on_disk(odd_model("mixtral", router_aux_loss_coef=COEFFICIENT))
    assert NeoXArgs.from_dict(from_hf(config, tensors.__getitem__)[0]).moe_aux_loss_coeff == 0.0


def test_what_trains_nothing_does_without_it_in_stages_too(tmp_path: Path) -> None:
    """A loss over all layers is refused where stages have them apart."""
    odd_model("mixtral", output_router_logits=True).save_pretrained(tmp_path)
    shutil.copy(GOLDEN / "dataset" / "hf_tokenizer" / "tokenizer.json", tmp_path)
    keys = {"pipe_parallel_size": 2, "padded_vocab_size": PADDED}
    assert NeoXArgs.from_dict({**hf_model_keys(str(tmp_path)), **keys}).pp == 2
    with pytest.raises(ConfigError, match="moe_aux_loss_scope.*transformers.*all layers"):
        source = HFFolder(tmp_path)
        NeoXArgs.from_dict({**from_hf(source.config, source.get)[0], **keys})
