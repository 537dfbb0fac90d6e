"""Transformer-Engine's names and row orders (`te_split`, `te_mlp`), unused norms, and the rotary buffer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megatron.checkpointing import CheckpointError, layer_file, load_weights, local_layer_state, save_tensors
from megatron.checkpointing.families.convert import hf_config, to_hf
from megatron.data import Batch
from megatron.model import build_stage, layer_params
from megatron.mpu import ParallelGroups, shard
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.golden import (
    assert_same,
    checkpoint,
    fails,
    full_weights,
    golden_args,
    raw_layer,
    read,
    written,
)
from tests.checkpointing.test_names import LAYERS, TE, renamed
from tests.model.stages import Weights, make_stage, random_weights, small

NATIVE: dict[str, Any] = {"te_backend": "native", "te_mha": True, "te_layernorm_mlp": True}
GATED: dict[str, Any] = {"activation": "swiglu", "intermediate_size": 48, "num_kv_heads": 2}


@torch.no_grad()
@pytest.mark.parametrize(
    "keys",
    [{}, {"gpt_j_residual": True}, NATIVE, NATIVE | GATED | {"norm": "rmsnorm", "rms_norm_epsilon": 1e-8}],
    ids=["sequential", "parallel", "Transformer-Engine", "Transformer-Engine llama"],
)
def test_files_of_two_ranks_are_what_transformers_computes(keys: dict[str, Any], tmp_path: Path) -> None:
    """Parts of a row-parallel bias under gpt_j_residual, else copies (which GPT-NeoX adds up, 0.3 off)."""
    args = small(**keys)
    weights = random_weights(args)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = make_stage(args, weights)(None, Batch(tokens, tokens, torch.ones_like(tokens))).transpose(0, 1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config(args)))
    tensors = to_hf(args, full_weights(written(tmp_path / "two", args, weights, 2), args).items())
    # A file's embed_out is this version's lm_head.
    problems = model.load_state_dict({n.replace("embed_out", "lm_head"): t for n, t in tensors}, strict=False)
    assert not problems.unexpected_keys and set(problems.missing_keys) <= {"lm_head.weight"}, problems
    model.tie_weights()
    torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=0, atol=1e-5)


def files_of(path: Path, **keys: Any) -> tuple[NeoXArgs, Weights, Path]:
    """A small model, its weights, and its files."""
    args = small(**keys)
    weights = random_weights(args)
    return args, weights, written(path / "c", args, weights)


def test_golden_weights_under_transformer_engines_names(tmp_path: Path) -> None:
    """Heads of their own keys keep NeoX's rows; read back whether these names are asked for or not."""
    run = "neox_pp2_mp2"
    golden = full_weights(checkpoint(run), golden_args(run))
    path = written(tmp_path / "te", golden_args(run, **NATIVE), golden, 2)
    for layer in LAYERS:
        for rank in (0, 1):
            expected = renamed(raw_layer(run, layer, rank), TE)
            actual = read(path, layer, rank)
            assert actual.keys() == expected.keys()
            # Summed biases are divided anew; test_weights.py holds them to their sum.
            unsummed = [name for name in actual if name not in ("attention.proj.bias", "mlp.fc2_bias")]
            assert all(torch.equal(actual[name], expected[name]) for name in unsummed)
    for args in (golden_args(run), golden_args(run, **NATIVE)):
        assert_same(full_weights(path, args), golden)


def te_split(rows: Tensor, kv_heads: int, queries: int, head_dim: int) -> list[Tensor]:
    groups = rows.view(*rows.shape[:-1], kv_heads, queries + 2, head_dim)
    parts = torch.split(groups, [queries, 1, 1], dim=-2)
    return [part.reshape(*rows.shape[:-1], -1, head_dim) for part in parts]


def te_mlp(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    normed = F.rms_norm(x, (32,), state["mlp.layer_norm_weight"], 1e-8)
    gate, up_projection = F.linear(normed, state["mlp.fc1_weight"], state["mlp.fc1_bias"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up_projection, state["mlp.fc2_weight"], state["mlp.fc2_bias"])


@pytest.mark.parametrize("size", [1, 2])
def test_grouped_queries_and_gates_have_transformer_engines_rows(size: int, tmp_path: Path) -> None:
    args = small(**NATIVE, **GATED, norm="rmsnorm")
    weights = random_weights(args)
    path = written(tmp_path / "c", args, weights, size)
    block = make_stage(args, weights).layers["2"]
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(3))
    files = [read(path, 2, rank) for rank in range(size)]
    with torch.no_grad():
        projections = block.attention._split(block.attention.query_key_value(x))  # type: ignore[union-attr,operator]
        projected = [F.linear(x, f["attention.qkv.weight"], f["attention.qkv.bias"]) for f in files]
        te_projections = [te_split(rows, 2 // size, 2, 8) for rows in projected]
        for part, rank_parts in zip(projections, zip(*te_projections, strict=True), strict=True):
            torch.testing.assert_close(part, torch.cat(rank_parts, 2))
        assert files[0].keys() == {"input_layernorm.scale", "attention.qkv.weight", "attention.qkv.bias",
                                   "attention.proj.weight", "attention.proj.bias", "mlp.layer_norm_weight",
                                   "mlp.fc1_weight", "mlp.fc1_bias", "mlp.fc2_weight", "mlp.fc2_bias"}  # fmt: skip
        if size == 1:
            normed = block.post_attention_layernorm(x)  # type: ignore[union-attr,operator]
            mlp = block.mlp.linear2(block.mlp.core(normed)[0])  # type: ignore[union-attr,operator]
            torch.testing.assert_close(mlp, te_mlp(x, files[0]))
    for changes in ({}, {"te_mha": False}, {"te_layernorm_mlp": False}):
        assert_same(full_weights(path, args.replace(**changes)), weights)
    sharded = load_weights(path, args, layers=[2], tensor_rank=1, tensor_size=2)[2]
    assert all(torch.equal(sharded[s.name], shard(weights[2][s.name], s, 1, 2)) for s in layer_params(args)[2])


@pytest.mark.parametrize("norm, names", [("te_rmsnorm", ["weight"]), ("te_layernorm", ["weight", "bias"])])
def test_norms_wrapped_as_gpt_neox_wraps_transformer_engines(norm: str, names: list[str], tmp_path: Path) -> None:
    args, weights, path = files_of(tmp_path, norm=norm)
    for layer, modules in ((2, ["input_layernorm", "post_attention_layernorm"]), (5, ["norm"])):
        norm_names = {name for name in read(path, layer) if "norm" in name}
        assert norm_names == {f"{module}.norm.{name}" for module in modules for name in names}
    for kind in (norm, norm.removeprefix("te_")):
        assert_same(full_weights(path, args.replace(norm=kind)), weights)


TIED = {"gpt_j_residual": True, "gpt_j_tied": True}
OLMO3 = {"norm_placement": "olmo3", "norm": "rmsnorm", "use_qk_layernorm": True, "use_separate_qk_norms": True}
UNUSED: list[tuple[dict[str, Any], dict[str, float]]] = [
    (TIED, {"post_attention_layernorm.weight": 1.0, "post_attention_layernorm.bias": 0.0}),
    (OLMO3, {"input_layernorm.scale": 1.0}),
]


@pytest.mark.parametrize("keys, unused", UNUSED)
def test_norms_that_gpt_neox_saves_unused(keys: dict[str, Any], unused: dict[str, float], tmp_path: Path) -> None:
    args, weights, path = files_of(tmp_path, **keys)
    block = read(path, 2)
    for name, value in unused.items():
        assert name not in weights[2]
        assert torch.equal(block[name], torch.full((32,), value))
    assert len(block) == len(weights[2]) + len(unused)
    assert_same(full_weights(path, args), weights)
    for name in unused:  # and files without them, as converters may write
        del block[name]
    save_tensors(block, path / layer_file(2, 0))
    assert_same(full_weights(path, args), weights)


def test_trained_norms_are_not_dropped(tmp_path: Path) -> None:
    _, _, path = files_of(tmp_path, gpt_j_residual=True)
    fails(r"post_attention_layernorm\.\w+ .*gpt_j_tied: false", full_weights, path, small(**TIED))


def test_biases_of_norms_that_are_not_wanted(tmp_path: Path) -> None:
    args, weights, path = files_of(tmp_path)
    fails(
        "extra input_layernorm.bias.*compat_norm_bias: true", full_weights, path, args.replace(use_bias_in_norms=False)
    )
    assert_same(full_weights(path, args.replace(use_bias_in_norms=False, compat_norm_bias=True)), weights)


@pytest.mark.parametrize("te, module", [(False, "rotary_emb"), (True, "rotary_embeddings")])
def test_rotary_buffer(te: bool, module: str, tmp_path: Path) -> None:
    keys = {"rotary_save_freqs_buffer": True, "rotary_pct": 0.5, "te_mha": te, "te_backend": "native"}
    args, weights, path = files_of(tmp_path, **keys)
    assert f"attention.{module}.inv_freq" in read(path, 2)
    torch.testing.assert_close(read(path, 2)[f"attention.{module}.inv_freq"], torch.tensor([1.0, 0.01]))
    assert not any("inv_freq" in name for layer in (0, 5) for name in read(path, layer))
    assert_same(full_weights(path, args), weights)
    low = {name: value.bfloat16() for name, value in weights[2].items()}
    state = local_layer_state(2, low, args, tensor_rank=0, tensor_size=1)
    assert state[f"attention.{module}.inv_freq"].dtype == torch.bfloat16


def test_a_norm_without_parameters_has_an_empty_file(tmp_path: Path) -> None:
    """As GPT-NeoX writes and wants it."""
    args, weights, path = files_of(tmp_path, norm="non_parametric_layernorm")
    assert read(path, 5) == {}
    assert_same(full_weights(path, args), weights)
    (path / layer_file(5, 0)).unlink()
    assert_same(full_weights(path, args), weights)
    assert not list(build_stage(args, ParallelGroups.single()).layers["5"].parameters())


def test_ranks_that_share_a_head_have_no_rows_of_transformer_engine() -> None:
    args = small(**{**GATED, "num_kv_heads": 1})
    weights, specs = random_weights(args)[2], layer_params(args)[2]
    local = {spec.name: shard(weights[spec.name], spec, 1, 2) for spec in specs}
    with pytest.raises(CheckpointError, match="whole key-value heads"):
        local_layer_state(2, local, args, tensor_rank=1, tensor_size=2, naming="te")
    assert local_layer_state(2, weights, args, tensor_rank=0, tensor_size=1, naming="te")
