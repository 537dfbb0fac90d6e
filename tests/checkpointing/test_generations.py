"""Older generations of GPT-NeoX's names and rows of grouped queries, beside its exports and gqa_project."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpointing import CheckpointError, load_tensors, load_weights, local_layer_state, reshard, save_tensors
from megatron.checkpointing.layout import find_checkpoint, layer_file, layer_files
from megatron.checkpointing.manifest import ParallelLayout, read_manifest
from megatron.checkpointing.opening import verify
from megatron.checkpointing.parameter_names import naming_of
from megatron.checkpointing.weight_files import describe_checkpoint, describe_layout
from megatron.model.weight_map import layer_params
from megatron.mpu import shard
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.weight_names import WEIGHT_NAMINGS
from tests.checkpointing.golden import (
    RUNS,
    assert_same,
    checkpoint,
    full_weights,
    golden_args,
    raw_layer,
    read,
    written,
)
from tests.checkpointing.test_names import LAYERS, old_rows
from tests.checkpointing.test_te_names import OLMO3, TIED
from tests.model.stages import make_stage, random_weights, small
from tests.tools.commands import refused
from tools.ckpts import merge
from tools.ckpts import reshard as reshard_command

GROUPED: dict[str, Any] = {"activation": "swiglu", "intermediate_size": 48, "num_kv_heads": 2}
YML = {run: str(RUNS[run] / f"{run}.yml") for run in RUNS}


def to(tensor: int, pipe: int = 1) -> ParallelLayout:
    return ParallelLayout(pipe, 1, tensor, 0, "fp32", pipe * tensor)


def converted(run: str, save: Path, tensor: int, naming: str) -> Path:
    return reshard(checkpoint(run), save, golden_args(run), to(tensor), optimizer=False, naming=naming)


def exported(run: str, block: int) -> dict[str, Tensor]:
    """A block of what GPT-NeoX's converter made of the golden run, by its names there."""
    tensors = load_file(RUNS[run] / "hf_step3" / "model.safetensors")
    mark = f"layers.{block}."
    return {name.partition(mark)[2]: value for name, value in tensors.items() if mark in name}


def test_legacy_names_are_those_of_pythia(tmp_path: Path) -> None:
    run = "neox_pp1_mp1"
    path = converted(run, tmp_path, 1, "legacy")
    for block in range(4):
        tensors, hf_tensors = read(path, block + 2), exported(run, block)
        hf_tensors = {n: t for n, t in hf_tensors.items() if n not in ("attention.bias", "attention.masked_bias")}
        hf_tensors.pop("attention.rotary_emb.inv_freq", None)
        assert tensors.keys() == hf_tensors.keys() and "mlp.dense_h_to_4h.weight" in tensors
        assert all(torch.equal(tensors[name], value) for name, value in hf_tensors.items())
    assert "names GPT-NeoX's before mid-2024 (dense_h_to_4h)" in describe_layout(path, golden_args(run))


def test_llama_names_and_rows_are_those_of_its_converters(tmp_path: Path) -> None:
    run = "llama_pp1_mp1"
    path = converted(run, tmp_path, 1, "llama")
    for block in range(4):
        tensors, hf_tensors = read(path, block + 2), exported(run, block)
        qkv = torch.cat([hf_tensors.pop(f"self_attn.{part}_proj.weight") for part in "qkv"])
        assert torch.equal(tensors.pop("attention.query_key_value.weight"), old_rows(qkv))
        names = {
            "attention.dense.weight": "self_attn.o_proj.weight", "mlp.w1.weight": "mlp.gate_proj.weight",
            "mlp.w3.weight": "mlp.up_proj.weight", "mlp.w2.weight": "mlp.down_proj.weight",
            "input_layernorm.scale": "input_layernorm.weight",
            "post_attention_layernorm.scale": "post_attention_layernorm.weight",
        }  # fmt: skip
        assert tensors.keys() == names.keys() and set(names.values()) == hf_tensors.keys()
        assert all(torch.equal(tensors[name], hf_tensors[hf_name]) for name, hf_name in names.items())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors.values())
    assert_same(full_weights(path, golden_args(run)), full_weights(checkpoint(run), golden_args(run)))
    layout = describe_layout(path, golden_args(run))
    assert "(w1, w2, w3)" in layout and "as before #1315" in layout


@pytest.mark.parametrize(
    "run, naming",
    [("neox_pp2_mp2", "te"), ("neox_pp2_mp2", "legacy"), ("llama_pp1_mp1", "neox"), ("llama_pp1_mp1", "legacy")],
)
def test_golden_there_and_back(run: str, naming: str, tmp_path: Path) -> None:
    """Two tensor ranks under each generation's names, and back to the bit in GPT-NeoX's names."""
    args = golden_args(run)
    resharded = converted(run, tmp_path / "there", 2, naming)
    assert verify(resharded) is not None and describe_checkpoint(resharded).names == WEIGHT_NAMINGS[naming]
    assert_same(full_weights(resharded, args), full_weights(checkpoint(run), args))
    # A manifest says whose rows they are: the key is for files without one.
    assert_same(full_weights(resharded, args.replace(compat_gqa_rows="pre1315")), full_weights(checkpoint(run), args))
    back = reshard(resharded, tmp_path / "back", args, to(1), naming="neox")
    for layer in LAYERS:
        golden = raw_layer("neox_pp1_mp1" if run.startswith("neox") else run, layer)
        assert read(back, layer).keys() == golden.keys()
    assert_same(full_weights(back, args), full_weights(checkpoint(run), args))


def old_projection(x: Tensor, weight: Tensor, bias: Tensor, heads: int, kv_heads: int, width: int) -> list[Tensor]:
    """gqa_project as it was: `[seq, batch, heads, head_dim]` of queries, of keys and of values."""
    mixed, ratio = F.linear(x, weight, bias), kv_heads / heads
    mixed = mixed.reshape(*x.shape[:2], heads, int(width * (1 + 2 * ratio)))
    q, k, v = torch.split(mixed, [width, int(ratio * width), int(ratio * width)], dim=-1)
    return [q, *(part.reshape(*x.shape[:2], kv_heads, width) for part in (k, v))]


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_before_1315_compute_what_they_did(size: int, tmp_path: Path) -> None:
    """Rows that mean what the old program made of them, under today's names: the key alone tells."""
    args = small(**GROUPED, compat_gqa_rows="pre1315")
    weights = random_weights(args)
    path = written(tmp_path / "c", args, weights, size)
    read_back = full_weights(path, args)
    assert not torch.equal(read_back[2]["attention.query_key_value.weight"],
                           weights[2]["attention.query_key_value.weight"])  # fmt: skip
    block = make_stage(args, read_back).layers["2"]
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        projections = block.attention._split(block.attention.query_key_value(x))  # type: ignore[union-attr,operator]
        ranks = []
        for rank in range(size):
            file = read(path, 2, rank)
            rows = [file[f"attention.query_key_value.{kind}"] for kind in ("weight", "bias")]
            ranks.append(old_projection(x, *rows, 4 // size, 2 // size, 8))
    for part, rank_parts in zip(projections, zip(*ranks, strict=True), strict=True):
        torch.testing.assert_close(part, torch.cat(rank_parts, 2))
    local = load_weights(path, args, layers=[2], tensor_rank=1, tensor_size=2)[2]
    spec = next(spec for spec in layer_params(args)[2] if spec.name == "attention.query_key_value.weight")
    assert torch.equal(local[spec.name], shard(read_back[2][spec.name], spec, 1, 2))
    assert "rows of grouped queries as before #1315" in describe_layout(path, args)
    for rows in ("post1315", None):
        assert_same(full_weights(path, args.replace(compat_gqa_rows=rows)), weights)
    multi_head = small(num_kv_heads=4, compat_gqa_rows="pre1315")  # a key-value head for every query: always the same
    assert_same(
        full_weights(written(tmp_path / "a", multi_head, random_weights(multi_head)), multi_head),
        random_weights(multi_head),
    )


@pytest.mark.parametrize("naming", ["legacy", "llama"])
def test_older_names_have_older_rows_unless_the_key_says_other(naming: str, tmp_path: Path) -> None:
    args = small(**GROUPED)
    weights = random_weights(args)
    path = written(tmp_path / "c", args, weights, naming=naming)
    assert_same(full_weights(path, args), weights)
    assert_same(full_weights(path, args.replace(compat_gqa_rows="pre1315")), weights)
    newer_rows = full_weights(path, args.replace(compat_gqa_rows="post1315"))
    name = "attention.query_key_value.bias"
    assert torch.equal(newer_rows[2][name], read(path, 2)[name]) and not torch.equal(
        newer_rows[2][name], weights[2][name]
    )


def test_the_forks_olmo_names(tmp_path: Path) -> None:
    """As the fork's converters have them: q_norm, k_norm, two norms after, one that nothing reads."""
    args = small(**OLMO3, use_bias_in_attn_linear=False, use_bias_in_mlp=False, **GROUPED)
    weights = random_weights(args)
    path = written(tmp_path / "c", args, weights, 2)
    names = {"input_layernorm.scale", "attention.q_norm.scale", "attention.k_norm.scale",
             "attention.query_key_value.weight", "attention.dense.weight", "post_attention_layernorm.scale",
             "post_feedforward_layernorm.scale", "mlp.linear1.weight", "mlp.linear2.weight"}  # fmt: skip
    block = read(path, 2, 1)
    assert block.keys() == names
    assert block["attention.q_norm.scale"].shape == (16,) and block["attention.k_norm.scale"].shape == (8,)
    assert naming_of(names) == "of the geodesic fork's OLMo"
    assert naming_of(names | {"pre_feedforward_layernorm.scale"}) == WEIGHT_NAMINGS["neox"]  # Gemma's
    assert_same(full_weights(path, args), weights)


def test_what_has_no_such_names(tmp_path: Path) -> None:
    def write(args: NeoXArgs, naming: str) -> dict[str, Tensor]:
        return local_layer_state(2, random_weights(args)[2], args, tensor_rank=0, tensor_size=1, naming=naming)

    experts = small(activation="swiglu", moe_num_experts=2, intermediate_size=32)
    odd_heads = small(num_attention_heads=3, num_kv_heads=1, hidden_size=24)
    for args, naming, facts in (
        (small(), "llama", "llama .*gated.* gelu"), (small(**TIED), "te", "gpt_j_tied: true"),
        (experts, "legacy", "legacy .*experts.*neox"), (experts, "llama", "llama .*experts.*neox"),
        (odd_heads, "legacy", "#1315 .* 1 .* 8 .* 3 "),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=facts):
            write(args, naming)


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-NeoX's pipe 2 x tensor 2 into one rank's files, and into one file as its own without a pipeline."""
    run, args = "neox_pp2_mp2", golden_args("neox_pp2_mp2")
    words = ["--input_dir", checkpoint(run), "--config_file", YML[run], "--output_dir"]
    assert "llama" in refused(merge.main, *words, tmp_path / "no", "--no-optimizer", "--names", "llama")
    assert "/proc/nothing: cannot be written" in refused(merge.main, *words, "/proc/nothing", "--no-optimizer")
    assert not (tmp_path / "no").exists()
    merge.main([str(word) for word in (*words, tmp_path / "one", "--no-optimizer")])
    merged = find_checkpoint(tmp_path / "one")
    assert len(layer_files(merged)) == len(LAYERS) and len(list(merged.glob("mp_rank_*"))) == 1
    assert_same(full_weights(merged, args), full_weights(checkpoint(run), args))
    output = capsys.readouterr().out
    assert "layer files (pipeline), 2 tensor ranks, names GPT-NeoX's" in output and "starts at iteration 0" in output
    # With its manifest and configuration it is read without --config_file.
    merge.main(["--input_dir", str(tmp_path / "one"), "--output_dir", str(tmp_path / "alone"), "--pp", "0"])
    without_pipeline = find_checkpoint(tmp_path / "alone")
    (file,) = without_pipeline.glob("*.pt")
    module_file = torch.load(file, weights_only=True)
    golden = load_tensors(checkpoint("neox_pp0_mp1") / file.name)
    assert (
        module_file["module"].keys() == golden["module"].keys() and module_file["iteration"] == golden["iteration"] == 3
    )
    assert_same(full_weights(without_pipeline, args), full_weights(checkpoint(run), args))
    manifest = verify(without_pipeline)
    assert manifest is not None and manifest.layout == to(1) and not manifest.optimizer
    merge_words = ["--input_dir", str(without_pipeline), "--output_dir", str(tmp_path / "alone")]
    merge.main([*merge_words, "--pp", "0"])  # there already
    assert "already exists" in refused(merge.main, *merge_words)  # other files
    assert "already exists" in refused(merge.main, *merge_words, "--pp", "0", "--names", "legacy")
    merge.main(["--input_dir", str(without_pipeline), "--output_dir", str(tmp_path / "layers"), "--names", "legacy"])
    assert_same(full_weights(find_checkpoint(tmp_path / "layers"), args), full_weights(checkpoint(run), args))


def test_rows_by_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of between the new names and #1315."""
    run, args = "llama_pp1_mp1", golden_args("llama_pp1_mp1")
    old = tmp_path / "old" / "global_step3"
    old.mkdir(parents=True)
    for layer in LAYERS:
        state = raw_layer(run, layer)
        if 1 < layer < 6:
            name = "attention.query_key_value.weight"
            state[name] = old_rows(state[name])
        save_tensors(state, old / layer_file(layer, 0))
    words = ["--input_dir", old, "--config_file", YML[run], "--gqa-rows", "pre1315", "--no-optimizer"]
    reshard_command.main([str(word) for word in (*words, "--tp", "2", "--output_dir", tmp_path / "new")])
    output = capsys.readouterr().out
    assert "rows of grouped queries as before #1315" in output and "rows of grouped queries as since #1315" in output
    new = find_checkpoint(tmp_path / "new")
    assert_same(full_weights(new, args), full_weights(checkpoint(run), args))
    manifest = read_manifest(new)
    assert manifest is not None and manifest.config.get("compat_gqa_rows") is None
    text = refused(reshard_command.main, "--input_dir", new, "--output_dir", tmp_path / "no", "--gqa-rows", "pre1315")
    assert "manifest.json" in text and "rows" in text
