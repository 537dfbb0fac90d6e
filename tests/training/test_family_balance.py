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
from megatron.data import Batch
from megatron.generation.from_huggingface import hf_model_keys
from megatron.model import layer_params
from megatron.mpu import shard, unshard
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.setup import build_engine
from tests.checkpointing.family_models import collected, odd_model, on_disk
from tests.model.stages import Weights, groups_of
from tests.pool import run_ranks
from tests.training.runs import GOLDEN

CASES = ("mixtral", "olmoe", "qwen 2 moe", "qwen 3 moe", "gpt oss")
COEFFICIENT = 0.7
ROWS, SEQ, VOCAB, PADDED = 4, 16, 91, 96
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2": (2, {"model_parallel_size": 2, "sequence_parallel": True}),
    "dp2": (2, {}),
    "ep2 zero3": (2, {"expert_parallel_size": 2, "zero_optimization": {"stage": 3}}),
}
Model = tuple[dict[str, Any], Weights]


class Reference(NamedTuple):
    """Of transformers: the model, its loss and load-balancing loss, and the gradients of both, the second
    times COEFFICIENT, by the names of its file."""

    model: Model
    family: str
    loss: float
    balance: float
    gradients: dict[str, Tensor]


class Step(NamedTuple):
    """Of a rank: what its step found, its tensor rank, and how far a step of plain descent took its
    weights."""

    loss: float
    balance: float
    tensor_rank: int
    way: Weights


def tokens() -> Tensor:
    return torch.randint(0, 90, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))


def labels_of(rows: Tensor) -> Tensor:
    return rows.roll(-1, -1)


def reference(case: str) -> Reference:
    """Its load-balancing loss is that of a micro-batch of two rows, as everywhere here."""
    model = odd_model(case, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    config, tensors = on_disk(model)
    keys, weights = from_hf(config, {name: value.clone() for name, value in tensors.items()}.__getitem__,
                            padded_vocab_size=PADDED)  # fmt: skip
    ours = collected(weights)
    losses, balances = [], []
    for rows in tokens().split(2):
        out = model(rows)
        losses.append(torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels_of(rows).flatten()))
        balances.append(out.aux_loss)
    loss, balance = torch.stack(losses).mean(), torch.stack(balances).mean()
    (loss + model.config.router_aux_loss_coef * balance).backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.copy_(param.grad)
    gradients = on_disk(model)[1]
    return Reference((keys, ours), config["model_type"], float(loss.detach()), float(balance.detach()), gradients)


def args_of(keys: dict[str, Any], layout: dict[str, Any]) -> NeoXArgs:
    return NeoXArgs.from_dict({
        **keys, **layout, "seq_length": SEQ, "precision": "fp32", "mask_padded_vocab": VOCAB,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "weight_decay": 0.0, "gradient_clipping": 0.0,
        "train_iters": 1, "train_micro_batch_size_per_gpu": 2, "train_batch_size": ROWS,
    })  # fmt: skip


def step(rank: int, world_size: int, models: list[Model], layout: dict[str, Any]) -> list[Step]:
    """For the pool."""
    found = []
    for keys, weights in models:
        args = args_of(keys, layout).for_world(world_size)
        groups = groups_of(args, world_size)
        engine = build_engine(args, groups)
        tensor_rank, size = groups.rank("tensor"), groups.size("tensor")
        engine.set_weights({
            layer: {spec.name: shard(weights[layer][spec.name], spec, tensor_rank, size) for spec in specs}
            for layer, specs in layer_params(args).items() if layer in weights
        })  # fmt: skip
        before = {i: {n: t.clone() for n, t in held.items()} for i, held in engine.weights(master=True).items()}
        batches = [Batch(rows, labels_of(rows), torch.ones(rows.shape)) for rows in tokens().split(2)]
        result = engine.train_step(batches[groups.rank("data") :: groups.size("data")], 1.0)
        after = engine.weights(master=True)
        way = {i: {name: before[i][name] - value for name, value in held.items()} for i, held in after.items()}
        found.append(Step(float(result.loss), float(result.metrics["moe_aux_loss"]), tensor_rank, way))
        engine.close()
    return found


def whole(args: NeoXArgs, ranks: list[Step]) -> Weights:
    parts = {one.tensor_rank: one.way for one in ranks}
    return {
        layer: {spec.name: unshard([parts[rank][layer][spec.name] for rank in sorted(parts)], spec) for spec in specs}
        for layer, specs in layer_params(args).items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {case: reference(case) for case in CASES}


@pytest.mark.parametrize(
    "layout",
    [name if name in ("one process", "tp2") else pytest.param(name, marks=pytest.mark.more) for name in LAYOUTS],
)
def test_the_load_balancing_loss_is_that_of_transformers(layout: str, references: dict[str, Reference]) -> None:
    world, keys = LAYOUTS[layout]
    ranks = run_ranks(step, world, [one.model for one in references.values()], keys)
    for number, (case, one) in enumerate(references.items()):
        steps, args = [by_model[number] for by_model in ranks], args_of(one.model[0], {})
        assert (args.moe_aux_loss_coeff, args.moe_aux_loss_scope) == (COEFFICIENT, "transformers")
        for found in steps:
            assert found.loss == pytest.approx(one.loss, abs=1e-5), case
            assert found.balance == pytest.approx(one.balance, abs=1e-5), case
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
    with pytest.raises(ConfigError, match="moe_aux_loss_scope: transformers is a sum over all layers"):
        source = HFFolder(tmp_path)
        NeoXArgs.from_dict({**from_hf(source.config, source.get)[0], **keys})
