"""Initial weights: the same model in every layout, with NeoX's distributions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.model import build_stage, freeze, init_stage, layer_params, materialize
from megatron.model.init import initial_rows, stage_parameters
from megatron.mpu import ParallelGroups, ParamSpec, mix_seed, shard_rows, unshard
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import Weights, groups_of, small
from tests.pool import run_ranks

WIDE: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "padded_vocab_size": 512}
CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"pos_emb": "learned", "num_layers": 4},
    "llama": {
        "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 48, "num_kv_heads": 4, "num_attention_heads": 8,
        "num_layers": 4, "no_weight_tying": True,
    },
}  # fmt: skip


def initialised(args: NeoXArgs, groups: ParallelGroups) -> Weights:
    stage = build_stage(args, groups)
    init_stage(stage, args, groups)
    weights: Weights = {}
    for full_name, param in stage.named_parameters():
        _, index, name = full_name.split(".", 2)
        weights.setdefault(int(index), {})[name] = param.detach().clone()
    return weights


def initial_value(spec: ParamSpec, layer: int, args: NeoXArgs) -> Tensor:
    return torch.cat([rows for _, rows in initial_rows(spec, layer, args, CPU)])


def on_ranks(rank: int, world_size: int, layouts: list[dict[str, object]]) -> list[tuple[int, Weights]]:
    rank_weights = []
    for layout in layouts:
        args = small(**layout)
        groups = groups_of(args, world_size)
        rank_weights.append((groups.rank("tensor"), initialised(args, groups)))
    return rank_weights


@pytest.mark.parametrize("world_size, layouts", [(2, [(1, 2), (2, 1)]), (4, [(1, 4), (2, 2), (4, 1)])])
def test_every_layout_starts_from_the_same_model(world_size: int, layouts: list[tuple[int, int]]) -> None:
    keys = [{"pipe_parallel_size": pipe, "model_parallel_size": tensor} for pipe, tensor in layouts]
    configs = [{**model, **layout} for model in MODELS.values() for layout in keys]
    ranks = run_ranks(on_ranks, world_size, configs)
    for i, values in enumerate(configs):
        args = small(**values)
        one_process = small(**{**values, "pipe_parallel_size": 0, "model_parallel_size": 1})
        full = initialised(one_process, ParallelGroups.single())
        rank_weights = [layout_weights[i] for layout_weights in ranks]
        for layer, specs in layer_params(args).items():
            for spec in specs:
                parts = {rank: weights[layer][spec.name] for rank, weights in rank_weights if layer in weights}
                assert len(parts) == args.tp
                assert torch.equal(unshard([parts[rank] for rank in sorted(parts)], spec), full[layer][spec.name])
        if not args.no_weight_tying and args.pp > 1:
            copies = {rank: w[8]["word_embeddings.weight"] for rank, w in rank_weights if 8 in w and w[8]}
            embeddings = {rank: w[0]["word_embeddings.weight"] for rank, w in rank_weights if 0 in w}
            assert copies.keys() == embeddings.keys() and len(embeddings) == args.tp
            assert all(torch.equal(copies[rank], embeddings[rank]) for rank in embeddings), "the copy of the embedding"


def test_a_stage_has_no_memory_until_it_is_materialised() -> None:
    args = small(num_layers=80, hidden_size=8192, num_attention_heads=64, padded_vocab_size=128256)
    assert all(param.is_meta for param in build_stage(args, ParallelGroups.single()).parameters())
    args = small(pos_emb="rpe")
    stage = build_stage(args, ParallelGroups.single())
    freeze(stage_parameters(stage), args.replace(trainable={"last_layers": 1}))
    frozen = [param.requires_grad for param in stage.parameters()]
    materialize(stage, torch.bfloat16)
    assert [param.requires_grad for param in stage.parameters()] == frozen and not all(frozen)
    assert {(param.device, param.dtype) for param in stage.parameters()} == {(CPU, torch.bfloat16)}
    assert stage.layers["6"].word_embeddings.weight is stage.layers["0"].word_embeddings.weight  # type: ignore[union-attr]
    names = [name for name, _ in stage.named_parameters()]
    assert names.count("layers.0.word_embeddings.weight") == 1 and not any(n.startswith("layers.6.") for n in names)
    tables = [param for _, name, param in stage_parameters(stage, copies=True) if name == "attention.rpe.weight"]
    assert len(tables) == 2 and tables[0] is tables[1]


_TORCH_INIT: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda full, generator: full.normal_(0.0, 0.03, generator=generator),
    "xavier_uniform": lambda full, generator: nn.init.xavier_uniform_(full, generator=generator),
    "xavier_normal": lambda full, generator: nn.init.xavier_normal_(full, generator=generator),
    "orthogonal": lambda full, generator: nn.init.orthogonal_(full, math.sqrt(2.0), generator=generator),
}
_CUTS: list[dict[str, Any]] = [
    {"shape": (176, 33), "axis": 0, "blocks": (112, 32, 32)},  # the last piece has 16 rows more than the others
    {"shape": (50, 24), "axis": 1, "blocks": (16, 8)},
    {"shape": (49, 3)},
    {"shape": (6, 2), "axis": 0, "blocks": (4, 2)},
]


@pytest.mark.parametrize("method", _TORCH_INIT)
def test_pieces_are_the_numbers_of_one_call(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.init._PIECE", 67 * 33)  # of which 64 rows are taken
    args = small(init_method=method, init_method_std=0.03)
    for shard in _CUTS:
        spec = ParamSpec("weight", **shard, init="input")
        generator = torch.Generator().manual_seed(mix_seed(args.seed, 3, "weight"))
        full_value = _TORCH_INIT[method](torch.empty(spec.shape), generator)
        pieces = list(initial_rows(spec, 3, args, CPU))
        assert (len(pieces) > 1) is (len(full_value) > 100 and method != "orthogonal")
        assert all(len(rows) < 2 * 64 for _, rows in pieces) or method == "orthogonal"
        for size in (1, 2):
            parts = [torch.full(spec.local_shape(size), math.nan) for _ in range(size)]
            for rank, part in enumerate(parts):
                for begin, rows in pieces:
                    for start, local in shard_rows(rows, begin, spec, rank, size):
                        part[start : start + len(local)] = local
            assert torch.equal(unshard(parts, spec), full_value), (shard, size)


def test_seed_layer_and_name_decide() -> None:
    def values(**changes: object) -> dict[tuple[int, str], Tensor]:
        args = small(**changes)
        return {
            (layer, spec.name): initial_value(spec, layer, args)
            for layer, specs in layer_params(args).items()
            for spec in specs
        }

    torch.manual_seed(99)
    initial, repeated = values(seed=1), values(seed=1)
    assert all(torch.equal(initial[key], repeated[key]) for key in initial)
    weights = {key: value for key, value in initial.items() if value.std() > 0}
    assert all(not torch.equal(value, values(seed=2)[key]) for key, value in weights.items())
    starts = [value.flatten()[0].item() for value in weights.values()]
    assert len(set(starts)) == len(starts), "two parameters share their random numbers"


DEPTH, HIDDEN, STD = 4, 128, 0.03
STDS = {"normal": STD, "scaled_normal": STD / math.sqrt(2 * DEPTH),
        "single_residual_scaled_normal": STD / math.sqrt(DEPTH), "small_init": math.sqrt(2 / (5 * HIDDEN)),
        "wang_init": 2 / DEPTH / math.sqrt(HIDDEN)}  # fmt: skip


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("method", [*STDS, "xavier_uniform", "xavier_normal", "orthogonal", "scaled_orthogonal"])
def test_init_methods_of_neox(method: str, output: bool) -> None:
    other_method = "orthogonal" if method != "orthogonal" else "normal"
    keys = ("output_layer_init_method", "init_method")
    methods = dict(zip(keys, (method, other_method) if output else (other_method, method), strict=True))
    args = small(**WIDE, init_method_std=STD, no_weight_tying=True, pos_emb="learned", **methods)
    inputs = ("word_embeddings", "position_embeddings", "attention.query_key_value", "mlp.linear1", "final_linear")
    names = [f"{name}.weight" for name in (("attention.dense", "mlp.linear2") if output else inputs)]
    checked = 0
    for layer, specs in layer_params(args).items():
        for spec in specs:
            if spec.name not in names:
                continue
            checked += 1
            value, (rows, columns) = initial_value(spec, layer, args), spec.shape
            if method.endswith("orthogonal"):
                small_side = value if rows <= columns else value.T
                gain = 2 / DEPTH if method == "scaled_orthogonal" else 2.0
                expected = gain * torch.eye(min(rows, columns))
                torch.testing.assert_close(small_side @ small_side.T, expected, rtol=1e-4, atol=1e-4)
                continue
            std = STDS.get(method, math.sqrt(2 / (rows + columns)))
            # The standard error of a standard deviation of n samples is std / sqrt(2 n).
            assert abs(value.std() / std - 1) < 5 / math.sqrt(2 * value.numel()), spec.name
            assert abs(value.mean() / std) < 5 / math.sqrt(value.numel())
            largest = value.abs().max() / std
            assert (largest <= math.sqrt(3) + 1e-5) == (method == "xavier_uniform")
    assert checked == (2 * DEPTH if output else 3 + 2 * DEPTH)


def test_norms_are_one_and_biases_zero() -> None:
    weights = initialised(small(), ParallelGroups.single())
    for tensors in weights.values():
        for name, value in tensors.items():
            if name.endswith("norm.weight"):
                assert torch.equal(value, torch.ones_like(value))
            elif name.endswith("bias"):
                assert not value.any()
            else:
                assert value.std() > 0
    assert {name for _, name, _ in stage_parameters(build_stage(small(), ParallelGroups.single()))} >= {"norm.bias"}
