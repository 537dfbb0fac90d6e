"""The load-balancing loss of HuggingFace's families with experts is transformers', and so are the gradients
of loss and load-balancing loss together."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.checkpointing.families import from_hf, to_hf
from megatron.checkpointing.huggingface import HFFolder
from megatron.generation.from_huggingface import hf_model_keys
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import odd_model, on_disk
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.layout_runs import Run, whole
from tests.training.runs import GOLDEN
from tests.training.test_family_steps import (
    PADDED,
    VOCAB,
    Model,
    args_of,
    batch_of,
    engine_with,
    imported,
    labels_of,
    rows_of,
)

CASES = ("mixtral", "olmoe", "qwen 2 moe", "qwen 3 moe", "gpt oss")
COEFFICIENT, ROWS = 0.7, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "ep2 zero3": (2, {"expert_parallel_size": 2, "zero_optimization": {"stage": 3}}),
}
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "weight_decay": 0.0, "train_iters": 1,
    "train_micro_batch_size_per_gpu": 2, "train_batch_size": ROWS,
}  # fmt: skip


class Reference(NamedTuple):
    """Of transformers: the model, its loss and load-balancing loss, and the gradients of both, the second
    times COEFFICIENT, by the names of its file."""

    model: Model
    family: str
    loss: float
    balance: float
    gradients: dict[str, Tensor]


def reference(case: str) -> Reference:
    """Its load-balancing loss is that of a micro-batch of two rows, as everywhere here."""
    model = odd_model(case, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    family, ours = imported(model)
    losses, balances = [], []
    for rows in rows_of(ROWS).split(2):
        out = model(rows)
        losses.append(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels_of(rows).flatten()))
        balances.append(out.aux_loss)
    loss, balance = torch.stack(losses).mean(), torch.stack(balances).mean()
    (loss + model.config.router_aux_loss_coef * balance).backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.copy_(param.grad)
    return Reference(ours, family, float(loss.detach()), float(balance.detach()), on_disk(model)[1])


def step(rank: int, world_size: int, models: list[Model], layout: dict[str, Any]) -> list[Run]:
    """For the pool: what a step of each model found, and how far plain descent took its weights."""
    found = []
    for keys, weights in models:
        engine = engine_with(args_of(keys, layout, SGD).for_world(world_size), weights)
        before = {i: {n: t.clone() for n, t in held.items()} for i, held in engine.weights(master=True).items()}
        groups, batches = engine.groups, [batch_of(rows) for rows in rows_of(ROWS).split(2)]
        result = engine.train_step(batches[groups.rank("data") :: groups.size("data")], 1.0)
        after = engine.weights(master=True)
        way = {i: {name: before[i][name] - value for name, value in held.items()} for i, held in after.items()}
        balance = {"moe_aux_loss": float(result.metrics["moe_aux_loss"])}
        found.append(Run([float(result.loss)], [], [balance], groups.rank("tensor"), way))
        engine.close()
    return found


@pytest.mark.parametrize("layout", with_more(LAYOUTS, "ep2 zero3", product=["dp2"]))
def test_the_load_balancing_loss_is_that_of_transformers(layout: str) -> None:
    world, keys = LAYOUTS[layout]
    references = {case: reference(case) for case in CASES}
    ranks = run_ranks(step, world, [one.model for one in references.values()], keys)
    for (case, one), *steps in zip(references.items(), *ranks, strict=True):
        args = args_of(one.model[0], SGD)
        assert (args.moe_aux_loss_coeff, args.moe_aux_loss_scope) == (COEFFICIENT, "transformers")
        for found in steps:
            assert found.losses == pytest.approx([one.loss], abs=1e-5), case
            assert found.metrics[0]["moe_aux_loss"] == pytest.approx(one.balance, abs=1e-5), case
        gradients = dict(to_hf(args, whole(args, steps).items(), family=one.family, vocab_size=VOCAB))
        assert gradients.keys() == one.gradients.keys(), case
        for name, value in one.gradients.items():
            assert (gradients[name] - value).abs().max() < 1e-5, (case, name)
        router = next(g for name, g in one.gradients.items() if name.endswith((".gate.weight", ".router.weight")))
        assert router.abs().max() > 1e-3, case


def test_without_router_logits_there_is_no_such_loss() -> None:
    """transformers has it only where output_router_logits is true, whatever its factor is."""
    config, tensors = on_disk(odd_model("mixtral", router_aux_loss_coef=COEFFICIENT))
    args = NeoXArgs.from_dict(from_hf(config, tensors.__getitem__)[0])
    assert args.moe_aux_loss_coeff == 0.0


def test_what_trains_nothing_does_without_it_in_stages_too(tmp_path: Path) -> None:
    """A loss over all layers is refused where stages have them apart."""
    odd_model("mixtral", output_router_logits=True).save_pretrained(tmp_path)
    shutil.copy(GOLDEN / "dataset" / "hf_tokenizer" / "tokenizer.json", tmp_path)
    keys = {"pipe_parallel_size": 2, "padded_vocab_size": PADDED}
    assert NeoXArgs.from_dict({**hf_model_keys(str(tmp_path)), **keys}).pp == 2
    with pytest.raises(ConfigError, match="moe_aux_loss_scope.*transformers.*all layers"):
        source = HFFolder(tmp_path)
        NeoXArgs.from_dict({**from_hf(source.config, source.get)[0], **keys})
