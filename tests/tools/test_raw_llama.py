"""Meta's format there and back to the bit, Meta's own order, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import read_manifest
from tests.checkpointing.test_huggingface import model_folder, tensors_of
from tests.tools import commands
from tools.ckpts import convert_neox_to_hf, convert_neox_to_raw_llama, convert_raw_llama_weights_to_neox


def words(flags: dict[str, Any]) -> list[str]:
    pairs = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
    return sum(pairs, [])


def run(command: Any, **flags: Any) -> None:
    command.main(words(flags))


def refused(command: Any, **flags: Any) -> str:
    return commands.refused(command.main, *words(flags))


def parts(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("consolidated.*.pth"))]


def equal_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        value.dtype == expected[name].dtype and torch.equal(value, expected[name]) for name, value in actual.items()
    )


@pytest.mark.parametrize(("shards", "case", "size"), [(1, "llama 2", "7B"), (2, "mistral", "mistral-7B-v0.1")])
def test_there_and_back_to_the_bit(shards: int, case: str, size: str, tmp_path: Path) -> None:
    """90 rows of vocabulary, which ours pads; GQA in Mistral; both layouts of ours."""
    hf = model_folder(tmp_path / "hf", case, torch.bfloat16)
    (hf / "tokenizer.model").write_bytes(b"pieces")
    run(convert_neox_to_raw_llama, input_dir=hf, output_dir=tmp_path / "raw" / size, num_output_shards=shards)
    split = parts(tmp_path / "raw" / size)
    assert len(split) == shards and split[0]["tok_embeddings.weight"].shape == (90, 32 // shards)
    assert split[0]["layers.3.feed_forward.w2.weight"].shape == (32, 48 // shards)
    layout = {"pipeline_parallel": True} if shards == 2 else {}
    run(convert_raw_llama_weights_to_neox, input_dir=tmp_path / "raw", model_size=size, output_dir=tmp_path / "ours",
        num_output_shards=shards, max_position_embeddings=32, **layout)  # fmt: skip
    imported = tmp_path / "ours" / "global_step0"
    assert bool(list(imported.glob("layer_*"))) == (shards == 2) and len(list(imported.glob("mp_rank_*"))) == shards
    assert read_manifest(imported).run_id == f"huggingface {tmp_path / 'raw' / size}", "what the user gave"
    run(convert_neox_to_hf, input_dir=tmp_path / "ours", output_dir=tmp_path / "back")
    assert equal_tensors(tensors_of(hf), tensors_of(tmp_path / "back"))
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == b"pieces"
    original, back = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (hf, tmp_path / "back"))
    same_keys = "model_type vocab_size rms_norm_eps rope_parameters max_position_embeddings sliding_window".split()
    assert all(original.get(key) == back.get(key) for key in same_keys)
    run(convert_neox_to_raw_llama, input_dir=tmp_path / "ours", output_dir=tmp_path / "again", num_output_shards=shards)
    assert all(equal_tensors(*pair) for pair in zip(split, parts(tmp_path / "again"), strict=True))
    assert not list(tmp_path.glob(".tmp_*"))


def rotated(x: Tensor, base: float) -> Tensor:
    """Meta's apply_rotary_emb: neighbours are the parts of a complex number. x: `[seq, heads, head_dim]`."""
    steps = 1.0 / base ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angle = torch.outer(torch.arange(len(x)).float(), steps)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)


@pytest.mark.parametrize("case", ["llama 2", "mistral full"])
def test_meta_computes_the_same_from_it(case: str, tmp_path: Path) -> None:
    """Meta's forward pass, written down here, gives the logits of transformers; GQA in Mistral."""
    hf = model_folder(tmp_path / "hf", case)
    run(convert_neox_to_raw_llama, input_dir=hf, output_dir=tmp_path / "raw")
    (w,), params = parts(tmp_path / "raw"), json.loads((tmp_path / "raw" / "params.json").read_text())
    tokens = torch.arange(3, 27) % 90

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * w[f"{name}.weight"]

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        block = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
        h = norm(x, f"layers.{layer}.attention_norm")
        q, k, v = (
            (h @ block[f"attention.w{name}.weight"].T).unflatten(1, (-1, 32 // params["n_heads"])) for name in "qkv"
        )
        q, k, v = (y.transpose(0, 1) for y in (rotated(q, params["rope_theta"]), rotated(k, params["rope_theta"]), v))
        k, v = (y.repeat_interleave(params["n_heads"] // params["n_kv_heads"], dim=0) for y in (k, v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(0, 1).flatten(1) @ block["attention.wo.weight"].T
        h = norm(x, f"layers.{layer}.ffn_norm")
        gate = torch.nn.functional.silu(h @ block["feed_forward.w1.weight"].T)
        x = x + (gate * (h @ block["feed_forward.w3.weight"].T)) @ block["feed_forward.w2.weight"].T
    logits = norm(x, "norm") @ w["output.weight"].T
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(hf).eval()(tokens[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_llama_3_and_what_is_refused(tmp_path: Path) -> None:
    """From LLaMA 3 on rows of the embedding are cut; files that do not belong together are named."""
    hf, raw = model_folder(tmp_path / "hf", "llama 2"), tmp_path / "raw"
    config = json.loads((hf / "config.json").read_text())
    config["rope_parameters"] = rope = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    (hf / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    run(convert_neox_to_raw_llama, input_dir=hf, output_dir=raw, num_output_shards=2)
    split = parts(raw)
    full = torch.cat([part["tok_embeddings.weight"] for part in split], dim=1)
    for rank, part in enumerate(split):
        torch.save({**part, "tok_embeddings.weight": full.chunk(2)[rank].clone(), "rope.freqs": torch.ones(2)},
                   raw / f"consolidated.{rank:02d}.pth")  # fmt: skip
    options = {"input_dir": raw, "model_size": "7B", "output_dir": tmp_path / "ours"}
    run(convert_raw_llama_weights_to_neox, **options)
    run(convert_neox_to_hf, input_dir=tmp_path / "ours", output_dir=tmp_path / "back")
    assert equal_tensors(tensors_of(hf), tensors_of(tmp_path / "back"))
    back = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert back.rope_parameters == rope and back.max_position_embeddings == 131072

    text = refused(convert_neox_to_raw_llama, input_dir=hf, output_dir=raw)
    assert text.startswith(f"convert_neox_to_raw_llama.py: error: {raw}: already exists")
    text = refused(convert_neox_to_raw_llama, input_dir=hf, output_dir=tmp_path / "r3", num_output_shards=3)
    assert "evenly over 3 files" in text
    for case, problem in (("llama linear", "tied embeddings"), ("llama wide", "head_dim 6"), ("qwen 3", "qwen3")):
        hf_folder = model_folder(tmp_path / case, case)
        assert problem in refused(convert_neox_to_raw_llama, input_dir=hf_folder, output_dir=tmp_path / "no")

    options |= {"output_dir": tmp_path / "no"}
    (raw / "consolidated.01.pth").rename(raw / "kept")
    assert "is a consolidated.NN.pth missing?" in refused(convert_raw_llama_weights_to_neox, **options)
    (raw / "consolidated.00.pth").rename(raw / "consolidated.01.pth")
    assert "expected consolidated.00.pth" in refused(convert_raw_llama_weights_to_neox, **options)
    (raw / "consolidated.01.pth").unlink()
    torch.save({"norm.weight": torch.ones(32)}, raw / "consolidated.00.pth")
    assert "lacks tensor layers.0.attention.wk.weight" in refused(convert_raw_llama_weights_to_neox, **options)
    (raw / "consolidated.00.pth").write_bytes(b"not a tensor file")
    assert "damaged, or not a tensor file" in refused(convert_raw_llama_weights_to_neox, **options)
    (raw / "params.json").unlink()
    assert "params.json: no such file" in refused(convert_raw_llama_weights_to_neox, **options)
    assert not (tmp_path / "no").exists()


def test_the_tokenizer_alone(tmp_path: Path) -> None:
    flags = {"input_dir": tmp_path, "model_size": "tokenizer_only", "output_dir": tmp_path / "out"}
    assert "tokenizer.model: no such file" in refused(convert_raw_llama_weights_to_neox, **flags)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    run(convert_raw_llama_weights_to_neox, **flags)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"
