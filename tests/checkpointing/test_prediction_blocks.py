"""Blocks for multi-token prediction in HuggingFace's files: there and back, and as transformers has them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.convert import to_hf
from megatron.checkpointing.huggingface import HFFolder, export_hf, load_hf_weights, unwritten_blocks
from megatron.checkpointing.weights import save_layer
from megatron.data import Batch
from megatron.model import layer_params
from tests.checkpointing.family_models import VOCAB, random_model
from tests.checkpointing.test_huggingface import imported, model_folder, same_bits, tensors_of
from tests.checkpointing.test_multimodal import _DELTA, _QWEN_EXPERTS, qwen
from tests.model.stages import make_stage, random_weights
from tools.ckpts import convert_hf_to_neox, convert_neox_to_hf

DEPTH, BLOCKS = 2, 4


def folder_with_blocks(path: Path, case: str, *, copies: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A folder whose blocks after the fourth are made from blocks of a deeper model."""
    kinds = {"mlp_layer_types": ["dense"] + ["sparse"] * 5} if case == "glm 4 moe lite" else {}
    random_model(case, dtype, num_hidden_layers=BLOCKS + DEPTH, **kinds).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for block in (f"model.layers.{BLOCKS + k}." for k in range(DEPTH)):
        shapes = {"enorm": (32,), "hnorm": (32,), "eh_proj": (32, 64), "shared_head.norm": (32,)}
        for name, shape in shapes.items():
            tensors[f"{block}{name}.weight"] = (0.3 * torch.randn(shape, generator=generator) + 0.2).to(dtype)
        if copies:
            tensors[f"{block}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{block}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    changes = {"num_hidden_layers": BLOCKS, "num_nextn_predict_layers": DEPTH}
    if kinds:
        changes["mlp_layer_types"] = config["mlp_layer_types"][:BLOCKS]
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def folder_with_mtp_block(path: Path, case: str) -> Path:
    """Qwen's folder, whose last block is the block for multi-token prediction (mtp).

    case: a multimodal model if its name has an underscore; "stacked": names as in memory."""
    is_multimodal, width = "_" in case, 32
    kinds = ["linear_attention", "full_attention", "full_attention"]
    if is_multimodal:
        model = qwen(case.removesuffix(" stacked"), **{**_DELTA, "num_hidden_layers": 3, "layer_types": kinds}, **(
            _QWEN_EXPERTS if "Moe" in case else {}))  # fmt: skip
    else:
        dense = {"mlp_only_layers": [0]} if case == "qwen 3 next" else {}
        model = random_model(case, num_hidden_layers=3, layer_types=kinds, tie_word_embeddings=False, **dense)
    model.save_pretrained(path, save_original_format="stacked" not in case)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(path / "model.safetensors").items():
        tensors[re.sub(r"^model\.(language_model\.)?layers\.2\.", "mtp.layers.0.", name)] = tensor
    shapes = {"fc": (width, 2 * width), "norm": (width,)}
    shapes |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden"), (width,))
    for name, shape in shapes.items():
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (config["text_config"] if is_multimodal else config).update(num_hidden_layers=2, layer_types=kinds[:2])
    (path / "config.json").write_text(json.dumps(config))
    return path


MTP_CASES = ["qwen 3 next", "qwen 3.5", "qwen 3.5 moe", "Qwen3_5", "Qwen3_5Moe", "Qwen3_5Moe stacked"]


@pytest.mark.parametrize("case", MTP_CASES)
def test_an_mtp_block_there_and_back_changes_no_bit(case: str, tmp_path: Path) -> None:
    """Without `mtp_num_layers` it is carried along; with it, the run's block is written instead."""
    source = folder_with_mtp_block(tmp_path / "hf", case)
    path, args = imported(HFFolder(source, mtp_layers=1), tmp_path / "ours", tensor=2)
    assert args.mtp_num_layers == 1 and 7 in layer_params(args)
    export_hf(path, args, tmp_path / "back")
    expected = tensors_of(tmp_path / "back")
    if "stacked" not in case:
        assert same_bits(expected, tensors_of(source))
    assert any(name.startswith("mtp.") for name in expected) and unwritten_blocks(source, args) is None
    assert unwritten_blocks(source, args.replace(mtp_num_layers=2)) is not None
    folder = HFFolder(source)
    number = sum(name.startswith("mtp.") for name in expected)
    assert HFFolder(source, mtp_layers=1).left_out is None
    if "stacked" not in case:
        assert re.search(rf"^{number} tensors .*mtp\.fc.*unchanged.*mtp_num_layers", folder.left_out or "")
    trunk, args = imported(folder, tmp_path / "trunk")
    assert args.mtp_num_layers is None and 7 not in layer_params(args)
    carried = trunk / "huggingface" / "carried.safetensors"
    assert any(name.startswith("mtp.") for name in load_file(carried))
    (path / "huggingface").mkdir(exist_ok=True)
    save_file({**load_file(carried), "mtp.fc.weight": torch.zeros(32, 64)}, path / "huggingface" / carried.name)
    (path / "manifest.json").unlink()
    export_hf(path, args.replace(mtp_num_layers=1), tmp_path / "trained", check=False)
    assert same_bits(tensors_of(tmp_path / "trained"), expected)
    with pytest.raises(CheckpointError, match="has 1 layers for multi-token prediction .* not 2"):
        HFFolder(source, mtp_layers=2)
    tensors = {**load_file(source / "model.safetensors"), "mtp.embed_tokens.weight": torch.zeros(3)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="mtp.embed_tokens.weight"):
        HFFolder(source, mtp_layers=1)


@pytest.mark.parametrize(
    ("case", "copies", "dtype"),
    [
        ("deepseek 3", True, torch.float32), ("glm 4 moe", True, torch.bfloat16),
        ("glm 4 moe lite", False, torch.float32),
    ],
)  # fmt: skip
def test_there_and_back_changes_no_bit(case: str, copies: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits of the trunk are those of transformers, which reads the exported folder too."""
    source = folder_with_blocks(tmp_path / "hf", case, copies=copies, dtype=dtype)
    folder = HFFolder(source, mtp_layers=DEPTH)
    assert folder.left_out is None
    path, args = imported(folder, tmp_path / "ours", tensor=2)
    assert args.mtp_num_layers == DEPTH and {9, 10} <= layer_params(args).keys()
    comparison = export_hf(path, args, tmp_path / "back")
    assert comparison is not None and comparison.is_close
    expected, back = tensors_of(source), tensors_of(tmp_path / "back")
    copied = {name: tensor for name, tensor in back.items() if re.search("embed_tokens|shared_head.head", name)}
    originals = {"embed_tokens": back["model.embed_tokens.weight"], "head": back["lm_head.weight"]}
    assert all(tensor.equal(originals[name.split(".")[-2]]) for name, tensor in copied.items())
    assert len(copied) == 1 + 2 * DEPTH and same_bits(back, expected if copies else expected | copied)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTH and config["num_hidden_layers"] == BLOCKS


@pytest.mark.parametrize(("case", "depth"), [("deepseek 3", DEPTH), ("qwen 3 next", 1), ("qwen 3.5", 1)])
@torch.no_grad()
def test_transformers_computes_equal_logits(
    case: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MtpModel`, which drafts for generation, on an exported folder."""
    folder = (folder_with_blocks if depth == DEPTH else folder_with_mtp_block)(tmp_path / "hf", case)
    path, args = imported(HFFolder(folder, mtp_layers=depth), tmp_path / "ours")
    export_hf(path, args, tmp_path / "back")
    main: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", experts_implementation="eager"
    )
    monkeypatch.setattr(main, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[45]\..*", r"^mtp.*"])
    if depth == 1:  # Qwen's config.json has no such fields
        main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
        main.config.mlp_only_layers = []
    drafts: Any = MtpModel.from_pretrained(main)
    tokens = torch.arange(3, 17).view(1, -1) * 5 % VOCAB
    hidden = main.model(tokens).last_hidden_state
    expected = []
    for k in range(depth):  # of the positions whose tokens are known
        ids, positions = tokens[:, k + 1 :], torch.arange(k + 1, tokens.shape[1]).unsqueeze(0)
        hidden = drafts.forward_layer(k, hidden[:, :-1], positions, None, input_ids=ids)
        expected.append(main.lm_head(hidden)[0])
    weights = {layer: {spec.name: None for spec in specs} for layer, specs in layer_params(args).items()}
    loaded = load_hf_weights(tmp_path / "back", args, layers=weights, tensor_rank=0, tensor_size=1)
    stage = make_stage(args.replace(seq_length=tokens.shape[1]), loaded).train()
    heads: list[Any] = []
    stage(None, Batch(tokens, tokens, torch.ones_like(tokens)), lambda head: heads.append(head) or head.hidden_states)
    for logits, states in zip(expected, heads[0].further, strict=True):
        actual = heads[0].head(states)[: len(logits), 0, :VOCAB]
        assert (actual - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_blocks_are_read_on_request(tmp_path: Path) -> None:
    """From a folder, and by the command with and without the flag."""
    source = folder_with_blocks(tmp_path / "hf", "glm 4 moe")
    _, args = imported(HFFolder(source), tmp_path / "trunk")
    assert args.mtp_num_layers is None
    predicting = args.replace(mtp_num_layers=1)
    weights = load_hf_weights(source, predicting, layers=[5, 9], tensor_rank=0, tensor_size=1)
    stored = load_file(source / "model.safetensors")
    assert weights[9]["eh_proj.weight"].equal(stored["model.layers.4.eh_proj.weight"])
    assert weights[9]["attention.dense.weight"].equal(stored["model.layers.4.self_attn.o_proj.weight"])
    assert not weights[9]["attention.dense.weight"].equal(weights[5]["attention.dense.weight"])
    words = ["--hf-model", str(source), "--output-dir", str(tmp_path / "ours"), "--mtp-num-layers", "2"]
    convert_hf_to_neox.main(words)
    layers = {file.name[:8] for file in (tmp_path / "ours" / "global_step0").glob("layer_*")}
    assert {"layer_09", "layer_10"} <= layers


@pytest.mark.parametrize(("case", "config", "tensors", "message"), [
    ("deepseek 3", {"num_nextn_predict_layers": 1}, {}, "has 1 layers for multi-token prediction .* not 2"),
    ("deepseek 3", {}, {"model.layers.4.embed_tokens.weight": 1.0}, "layers.4.embed_tokens.weight differs from"),
    ("deepseek 3", {}, {"model.layers.5.shared_head.head.weight": 1.0}, "shared_head.head.weight differs from lm_head"),
])  # fmt: skip
def test_folders_without_them_are_refused(
    case: str, config: dict[str, Any], tensors: dict[str, float], message: str, tmp_path: Path
) -> None:
    source = folder_with_blocks(tmp_path / "hf", case)
    stored = load_file(source / "model.safetensors")
    changed: dict[str, Tensor] = {name: stored[name] + value for name, value in tensors.items()}
    save_file({**stored, **changed}, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, **config}))
    HFFolder(source)
    with pytest.raises(CheckpointError, match=message):
        HFFolder(source, mtp_layers=DEPTH)
    with pytest.raises(CheckpointError, match="has 0 layers for multi-token prediction"):
        HFFolder(model_folder(tmp_path / "llama"), mtp_layers=1)


def test_families_without_a_place_for_them_leave_them_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a line. The other tensors are those of a model without them."""
    path, args = imported(model_folder(tmp_path / "hf"), tmp_path / "trunk")
    predicting, stored = args.replace(mtp_num_layers=1), tensors_of(tmp_path / "hf")
    names = {name for name, _ in to_hf(predicting, random_weights(predicting).items(), family="llama")}
    assert names == stored.keys()
    for layer, params in random_weights(predicting).items():
        if layer == 9:
            save_layer(path, layer, params, predicting)
    manifest = json.loads((path / "manifest.json").read_text())
    assert unwritten_blocks(tmp_path / "hf", args) is None and manifest["model"].get("mtp_num_layers") is None
    (path / "manifest.json").unlink()
    config = path / "configs" / "hf_model.yml"
    config.write_text(config.read_text() + "mtp_num_layers: 1\n")
    words = ["--input_dir", str(path), "--output_dir", str(tmp_path / "back"), "--no-save-tokenizer"]
    convert_neox_to_hf.main(words)
    assert "1 blocks for multi-token prediction (mtp_num_layers) are left out" in capsys.readouterr().out
    assert same_bits(tensors_of(tmp_path / "back"), stored)
