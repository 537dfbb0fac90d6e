"""Three AdamW steps of every HuggingFace family equal those of transformers' model under torch's AdamW, in
sizes that nothing divides, and so do the logits before them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.checkpointing.families import from_hf, to_hf
from megatron.data import Batch
from megatron.model import layer_params
from megatron.mpu import shard
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine
from megatron.training.setup import build_engine
from tests.checkpointing.family_models import ODD, collected, odd_model, on_disk
from tests.checkpointing.family_runs import TOKENS, logits_by_layout
from tests.marks import with_more
from tests.model.stages import Weights, groups_of
from tests.pool import run_ranks
from tests.training.layout_runs import Run, whole

STEPS, RATE, DECAY = 3, 1e-3, 0.1
EPS = 1e-4  # where gradients are rounding alone, a smaller one would make steps of them
SEQ, VOCAB, PADDED = 16, 91, 96
LAYOUTS = {"one process": {}, "tp2": {"model_parallel_size": 2}, "pp2": {"pipe_parallel_size": 2}}
Model = tuple[dict[str, Any], Weights]


class Reference(NamedTuple):
    """Of transformers: the model before the steps, its logits, and what came of it, by the names of its
    file."""

    model: Model
    family: str
    logits: Tensor
    losses: list[float]
    after: dict[str, Tensor]


def rows_of(*shape: int) -> Tensor:
    return torch.randint(0, 90, (*shape, SEQ), generator=torch.Generator().manual_seed(1))


def labels_of(rows: Tensor) -> Tensor:
    return rows.roll(-1, -1)


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


def engine_with(args: NeoXArgs, weights: Weights) -> Engine:
    """Of this rank, with its part of whole weights."""
    groups = groups_of(args, args.world_size)
    engine = build_engine(args, groups)
    rank, size = groups.rank("tensor"), groups.size("tensor")
    engine.set_weights({
        layer: {spec.name: shard(weights[layer][spec.name], spec, rank, size) for spec in specs}
        for layer, specs in layer_params(args).items() if layer in weights
    })  # fmt: skip
    return engine


def batch_of(rows: Tensor) -> Batch:
    return Batch(rows, labels_of(rows), torch.ones(rows.shape))


def reference(case: str) -> Reference:
    model = odd_model(case)
    family, ours = imported(model)
    # These may be matrices.
    biases = {id(param) for name, param in model.named_parameters() if name.endswith(("bias", "A_log"))}
    decayed = [param for param in model.parameters() if param.dim() >= 2 and id(param) not in biases]
    kept = {id(param) for param in decayed}
    others = [param for param in model.parameters() if id(param) not in kept]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    with torch.no_grad():
        logits = model(TOKENS).logits
    losses = []
    for rows in rows_of(STEPS, 2):
        loss = torch.nn.functional.cross_entropy(model(rows).logits.flatten(0, 1), labels_of(rows).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Reference(ours, family, logits, losses, on_disk(model)[1])


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {case: reference(case) for case in ODD}


ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": EPS}}, "weight_decay": DECAY,
    "train_iters": STEPS, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
}  # fmt: skip


def steps(rank: int, world_size: int, models: list[Model], layout: dict[str, Any]) -> list[Run]:
    """For the pool: of every model."""
    found = []
    for keys, weights in models:
        engine = engine_with(args_of(keys, layout, ADAMW).for_world(world_size), weights)
        losses = []
        for rows in rows_of(STEPS, 2):
            losses.append(float(engine.train_step([batch_of(row) for row in rows.split(1)], RATE).loss))
        found.append(Run(losses, [], [], engine.groups.rank("tensor"), engine.weights(master=True)))
        engine.close()
    return found


@pytest.mark.parametrize("layout", with_more(LAYOUTS, "tp2", product=["pp2"]))
def test_three_steps_are_those_of_transformers(layout: str, references: dict[str, Reference]) -> None:
    models = [one.model for one in references.values()]
    ranks = run_ranks(steps, 1 if layout == "one process" else 2, models, LAYOUTS[layout])
    for (case, one), *parts in zip(references.items(), *ranks, strict=True):
        assert parts[0].losses == pytest.approx(one.losses, rel=1e-5), case
        args = args_of(one.model[0], ADAMW)
        after = dict(to_hf(args, whole(args, parts).items(), family=one.family, vocab_size=VOCAB))
        assert after.keys() == one.after.keys(), case
        for name, value in one.after.items():
            assert torch.allclose(after[name], value, atol=1e-5, rtol=1e-5), (case, name)
        assert max(abs(a - b) for a, b in zip(one.losses, one.losses[1:], strict=False)) > 1e-3, "steps must move it"


@pytest.mark.product
def test_logits_before_the_steps(references: dict[str, Reference]) -> None:
    layouts = [(1, 1), (2, 1), (1, 2)]
    for layout, logits in logits_by_layout([one.model for one in references.values()], layouts).items():
        for (case, one), ours in zip(references.items(), logits, strict=True):
            assert (ours[..., :VOCAB] - one.logits).abs().max() < 1e-5, (case, layout)
