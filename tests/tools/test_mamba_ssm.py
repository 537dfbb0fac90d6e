"""mamba_ssm's format: names, shapes and fields that the package reads, weights to the bit, and refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.huggingface import HFFolder, import_hf
from megatron.checkpointing.huggingface.mamba_ssm import export_mamba_ssm, mamba_ssm_config
from tests.checkpointing.family_models import VOCAB, on_disk, random_model
from tests.checkpointing.family_runs import TOKENS
from tests.checkpointing.test_te_names import written
from tests.model.stages import random_weights, small
from tests.tools.commands import refused, run_tool
from tools.ckpts import convert_neox_to_mamba_ssm

Keys = dict[str, Any]
BASE_KEYS: Keys = {"norm": "rmsnorm", "pos_emb": "none", "rms_norm_epsilon": 1e-5}
run = partial(run_tool, convert_neox_to_mamba_ssm.main)
HEADS = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6}


def content(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return json.loads((folder / "config.json").read_text()), state


@pytest.mark.parametrize(("case", "changes", "mixer"), [
    ("mamba", {"layer_norm_epsilon": 1e-5}, {"d_state": 6, "d_conv": 3, "expand": 2, "dt_rank": 2}),
    ("mamba untied", {}, {"d_state": 16, "d_conv": 4, "expand": 3, "dt_rank": 9, "conv_bias": False}),
    ("mamba 2", {"time_step_limit": (0.3, 0.9)}, {
        "layer": "Mamba2", "d_state": 8, "d_conv": 4, "expand": 2, "headdim": 8, "ngroups": 4, "chunk_size": 5,
        "dt_limit": [0.3, 0.9]}),
    ("mamba 2 biases", {"time_step_limit": (0.0, float("inf"))}, {
        "layer": "Mamba2", "d_state": 8, "d_conv": 4, "expand": 2, "headdim": 8, "ngroups": 1, "chunk_size": 16,
        "conv_bias": False, "bias": True}),
])  # fmt: skip
def test_weights_are_those_of_transformers(case: str, changes: Keys, mixer: Keys, tmp_path: Path) -> None:
    """Through a checkpoint of two tensor ranks and two stages: transformers computes its logits from it."""
    model = random_model(case, **changes)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    import_hf(HFFolder(tmp_path / "hf"), tmp_path / "ours", tensor=2, pipe=2)
    run("--input_dir", tmp_path / "ours", "--output_dir", tmp_path / "out", "--no_save_tokenizer")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    config, state = content(tmp_path / "out")
    tied = config.pop("tie_embeddings")
    assert config == {
        "d_model": 32, "n_layer": 4, "vocab_size": VOCAB, "rms_norm": True, "residual_in_fp32": False,
        "fused_add_norm": True, "pad_vocab_size_multiple": 1, "ssm_cfg": {"conv_bias": True, "bias": False, **mixer},
    }  # fmt: skip
    hf_state = {name.replace(".embeddings.", ".embedding."): value for name, value in on_disk(model)[1].items()}
    if tied:
        hf_state["lm_head.weight"] = hf_state["backbone.embedding.weight"]
    assert tied == model.config.tie_word_embeddings and state.keys() == hf_state.keys()
    assert all(torch.equal(state[name], value) for name, value in hf_state.items())
    reloaded = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    reloaded.load_state_dict({name.replace(".embedding.", ".embeddings."): value for name, value in state.items()})
    with torch.no_grad():
        assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)


def test_as_typed_with_tokenizer_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--input_dir --config_file --output_dir --precision of GPT-NeoX's command."""
    args = small(
        **BASE_KEYS, attention_config=["mamba", "mamba"], no_weight_tying=True, make_vocab_size_divisible_by=32
    )
    weights = random_weights(args)
    path = written(tmp_path / "two", args, weights, 2)
    (tmp_path / "run.yml").write_text(json.dumps(args.user_values | {"model_parallel_size": 2}))
    words = ["--input_dir", path, "--config_file", tmp_path / "run.yml", "--output_dir", tmp_path / "out"]
    run(*words, "--no_save_tokenizer", "--precision", "bf16")
    assert "2 tensor ranks" in capsys.readouterr().out
    config, state = content(tmp_path / "out")
    assert (config["vocab_size"], config["pad_vocab_size_multiple"], config["tie_embeddings"]) == (64, 32, False)
    wide = {name.rpartition(".")[2] for name, value in state.items() if value.dtype == torch.float32}
    assert wide == {"A_log", "D"} and {value.dtype for value in state.values()} == {torch.float32, torch.bfloat16}
    assert torch.equal(state["backbone.layers.1.mixer.A_log"], weights[3]["mixer.A_log"])
    kernel = weights[3]["mixer.conv1d.weight"].bfloat16()
    assert torch.equal(state["backbone.layers.1.mixer.conv1d.weight"], kernel)
    run(*words, "--no_save_tokenizer", "--precision", "fp32")  # over the first
    _, state = content(tmp_path / "out")
    assert torch.equal(state["backbone.layers.0.mixer.in_proj.weight"], weights[2]["mixer.in_proj.weight"])
    assert torch.equal(state["backbone.norm_f.weight"], weights[5]["norm.scale"])
    problem = refused(convert_neox_to_mamba_ssm.main, *words[:-1], path, "--no_save_tokenizer")
    assert problem.startswith("convert_neox_to_mamba_ssm.py: error: ")


def test_layernorms_have_their_biases(tmp_path: Path) -> None:
    args = small(norm="layernorm", pos_emb="none", attention_config=["mamba2", "mamba2"], **HEADS)
    weights = random_weights(args)
    export_mamba_ssm(written(tmp_path / "ours", args, weights, 1), args, tmp_path / "out", tokenizer=False)
    config, state = content(tmp_path / "out")
    assert config["rms_norm"] is False and config["ssm_cfg"]["layer"] == "Mamba2" and config["tie_embeddings"]
    for layer, name in ((weights[2], "backbone.layers.0.norm"), (weights[5], "backbone.norm_f")):
        assert all(torch.equal(state[f"{name}.{kind}"], layer[f"norm.{kind}"]) for kind in ("weight", "bias"))
    begins = "backbone.layers.1.mixer."
    shapes = {name.removeprefix(begins): tuple(t.shape) for name, t in state.items() if name.startswith(begins)}
    assert shapes == {
        "dt_bias": (8,), "A_log": (8,), "D": (8,), "norm.weight": (64,), "in_proj.weight": (2 * 64 + 2 * 12 + 8, 32),
        "conv1d.weight": (64 + 2 * 12, 1, 4), "conv1d.bias": (64 + 2 * 12,), "out_proj.weight": (32, 64),
    }  # fmt: skip
    assert state["lm_head.weight"].data_ptr() == state["backbone.embedding.weight"].data_ptr()


@pytest.mark.parametrize(("changes", "reasons"), [
    ({"attention_config": ["mamba2", "attention"], **HEADS}, "blocks attention, mamba2 (attention_config)"),
    ({"attention_config": ["mamba2", "mamba"], **HEADS}, "blocks mamba, mamba2 (attention_config)"),
    ({"attention_config": ["global", "global"]}, "blocks global (attention_config)"),
    ({"mamba_use_bias_in_linears": True}, "biases of x_proj (mamba_use_bias_in_linears)"),
    ({"mamba_bcdt_norm_epsilon": 1e-6}, "norms of B, C and time steps (mamba_bcdt_norm_epsilon)"),
    ({"norm": "scalenorm", "scalenorm_epsilon": 1e-5}, "norm scalenorm"),
    ({"norm": "non_parametric_layernorm"}, "norm non_parametric_layernorm"),
    ({"rms_norm_epsilon": 1e-6}, "epsilon 1e-06 of norms, which must be 1e-05"),
    ({"zero_centered_gamma": True}, "zero-centered norm weights (zero_centered_gamma)"),
    ({"pos_emb": "sinusoidal"}, "positions sinusoidal (pos_emb)"),
    ({"embedding_multiplier": 2.0}, "embedding_multiplier 2.0"),
    ({"logit_scale": 0.5}, "logit_scale 0.5"),
    ({"attention_config": ["mamba2"] * 2, **HEADS, "mamba_num_heads": 6},
     "6 heads of 8 channels, together no multiple of hidden_size 32 (mamba_num_heads)"),
])  # fmt: skip
def test_what_the_package_cannot_say_is_refused(changes: dict[str, Any], reasons: str) -> None:
    args = small(**{**BASE_KEYS, "attention_config": ["mamba", "mamba"], **changes})
    with pytest.raises(CheckpointError) as caught:
        mamba_ssm_config(args, 64)
    assert str(caught.value) == f"the package mamba_ssm cannot express parts of this model: {reasons}"
