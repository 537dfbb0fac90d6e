"""Three AdamW steps of every HuggingFace family equal those of transformers' model under torch's AdamW, in
sizes that nothing divides, and so do the logits before them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.checkpointing.families import from_hf, to_hf
from megatron.data import Batch
from megatron.model import build_stage, layer_params
from megatron.mpu import shard, unshard
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import build_objective
from megatron.training.engine_choice import choose_engine
from megatron.training.parallelize import parallelize
from tests.checkpointing.family_models import ODD, collected, odd_model, on_disk
from tests.checkpointing.family_runs import TOKENS, logits_by_layout
from tests.model.stages import Weights, groups_of
from tests.pool import run_ranks

STEPS, RATE, DECAY = 3, 1e-3, 0.1
EPS = 1e-4  # where gradients are rounding alone, a smaller one would make steps of them
ROWS, SEQ, VOCAB, PADDED = 2, 16, 91, 96
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


def tokens() -> Tensor:
    return torch.randint(0, 90, (STEPS, ROWS, SEQ), generator=torch.Generator().manual_seed(1))


def labels_of(rows: Tensor) -> Tensor:
    return rows.roll(-1, -1)


def reference(case: str) -> Reference:
    model = odd_model(case)
    config, tensors = on_disk(model)
    keys, weights = from_hf(config, {name: value.clone() for name, value in tensors.items()}.__getitem__,
                            padded_vocab_size=PADDED)  # fmt: skip
    ours = collected(weights)
    params = list(model.parameters())
    # These may be matrices.
    biases = {id(param) for name, param in model.named_parameters() if name.endswith(("bias", "A_log"))}
    decayed = [param for param in params if param.dim() >= 2 and id(param) not in biases]
    kept = {id(param) for param in decayed}
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": [p for p in params if id(p) not in kept], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    with torch.no_grad():
        logits = model(TOKENS).logits
    losses = []
    for rows in tokens():
        loss = torch.nn.functional.cross_entropy(model(rows).logits.flatten(0, 1), labels_of(rows).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Reference((keys, ours), config["model_type"], logits, losses, on_disk(model)[1])


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {case: reference(case) for case in ODD}


def args_of(keys: dict[str, Any], layout: dict[str, Any]) -> NeoXArgs:
    return NeoXArgs.from_dict({
        **keys, **layout, "seq_length": SEQ, "precision": "fp32", "mask_padded_vocab": VOCAB,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.95], "eps": EPS}},
        "weight_decay": DECAY, "gradient_clipping": 0.0, "train_iters": STEPS,
        "train_micro_batch_size_per_gpu": ROWS // 2, "gradient_accumulation_steps": 2,
    })  # fmt: skip


def steps(
    rank: int, world_size: int, models: list[Model], layout: dict[str, Any]
) -> list[tuple[list[float], int, Weights]]:
    """For the pool: losses, this tensor rank, and its weights after the steps, of every model."""
    found = []
    for keys, weights in models:
        args = args_of(keys, layout).for_world(world_size)
        groups = groups_of(args, world_size)
        engine = parallelize(
            build_stage(args, groups), build_objective(args), args, groups, choose_engine(args, False).load()
        )
        tensor_rank, size = groups.rank("tensor"), groups.size("tensor")
        engine.set_weights({
            layer: {spec.name: shard(weights[layer][spec.name], spec, tensor_rank, size) for spec in specs}
            for layer, specs in layer_params(args).items() if layer in weights
        })  # fmt: skip
        losses = []
        for rows in tokens():
            batches = [Batch(row, labels_of(row), torch.ones(row.shape)) for row in rows.split(ROWS // 2)]
            losses.append(float(engine.train_step(batches, RATE).loss))
        found.append((losses, tensor_rank, engine.weights(master=True)))
        engine.close()
    return found


def whole(args: NeoXArgs, ranks: list[tuple[list[float], int, Weights]]) -> Weights:
    """The parameters that ranks have parts of."""
    return {
        layer: {
            spec.name: unshard(
                [local[layer][spec.name] for _, local in sorted(
                    {rank: held for _, rank, held in ranks if spec.name in held.get(layer, {})}.items())], spec)
            for spec in specs
        }
        for layer, specs in layer_params(args).items()
    }  # fmt: skip


@pytest.mark.parametrize(
    "layout", [name if name == "one process" else pytest.param(name, marks=pytest.mark.more) for name in LAYOUTS]
)
def test_three_steps_are_those_of_transformers(layout: str, references: dict[str, Reference]) -> None:
    models = [one.model for one in references.values()]
    ranks = run_ranks(steps, 1 if layout == "one process" else 2, models, LAYOUTS[layout])
    for number, (case, one) in enumerate(references.items()):
        parts = [by_model[number] for by_model in ranks]
        losses, args = parts[0][0], args_of(one.model[0], {})
        assert losses == pytest.approx(one.losses, rel=1e-5), case
        after = dict(to_hf(args, whole(args, parts).items(), family=one.family, vocab_size=VOCAB))
        assert after.keys() == one.after.keys(), case
        for name, value in one.after.items():
            assert torch.allclose(after[name], value, atol=1e-5, rtol=1e-5), (case, name)
        assert max(abs(a - b) for a, b in zip(one.losses, one.losses[1:], strict=False)) > 1e-3, "steps must move it"


@pytest.mark.more
def test_logits_before_the_steps(references: dict[str, Reference]) -> None:
    layouts = [(1, 1), (2, 1), (1, 2)]
    for layout, logits in logits_by_layout([one.model for one in references.values()], layouts).items():
        for (case, one), ours in zip(references.items(), logits, strict=True):
            assert (ours[..., :VOCAB] - one.logits).abs().max() < 1e-5, (case, layout)
