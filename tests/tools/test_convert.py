"""The conversion commands as they are typed, their memory, and the names of GPT-NeoX and of its fork."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch.utils._python_dispatch import _disable_current_modes

from huggingface import convert_hf_gptneox_to_neox
from megatron.checkpointing import find_checkpoint, load_weights, read_manifest
from megatron.checkpointing.huggingface import HFFolder, import_hf, transformers_model
from megatron.checkpointing.layout import layer_file
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.data.preprocessing.chat_tokenizer import load_chat_tokenizer
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.golden import RUNS, checkpoint
from tests.checkpointing.test_huggingface import TOKENIZER, model_folder
from tests.live_bytes import LiveBytes
from tests.tools.commands import refused, run_tool
from tools.ckpts import convert_hf_to_neox, convert_neox_to_hf

ROOT = Path(__file__).resolve().parents[2]
RUN = "neox_pp2_mp2"


def test_neox_to_hf_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 21 of the commands: --input_dir --config_file --output_dir --precision."""
    config, text = tmp_path / "run.yml", (RUNS[RUN] / f"{RUN}.yml").read_text()
    config.write_text(text.replace("GOLDEN/dataset/tokenizer.json", str(TOKENIZER)))
    words = ["--input_dir", checkpoint(RUN), "--config_file", config, "--output_dir", tmp_path / "hf"]
    run_tool(convert_neox_to_hf.main, *words, "--precision", "bf16")
    output = capsys.readouterr().out
    assert "2 tensor ranks, names GPT-NeoX's" in output and "largest logit difference" in output
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "hf" / "chat_template.jinja").exists()
    run_tool(convert_neox_to_hf.main, *words, "--no_save_tokenizer", "--architecture", "neox")
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    text = refused(convert_neox_to_hf.main, *words, "--architecture", "llama")
    assert text.startswith("convert_neox_to_hf.py: error: ") and "llama: " in text
    assert ": opt: " in refused(convert_neox_to_hf.main, *words, "--architecture", "opt")
    assert "no such directory" in refused(convert_neox_to_hf.main, "--input_dir", tmp_path / "no", *words[2:])


def test_hf_to_neox_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 22 of the commands, under both names; the fork's writes Transformer-Engine's names."""
    folder = model_folder(tmp_path / "model", "gpt_neox")
    words = ["--hf-model", str(folder), "--output-dir", str(tmp_path / "out"), "--tp", "2", "--iteration"]
    convert_hf_to_neox.main([*words, "3"])
    assert "names GPT-NeoX's" in capsys.readouterr().out
    convert_hf_gptneox_to_neox.main([*words, "4"])
    assert "names Transformer-Engine's" in capsys.readouterr().out
    convert_hf_gptneox_to_neox.main([*words, "5", "--no-transformer-engine"])
    assert (tmp_path / "out" / "latest").read_text() == "global_step5"
    states = [torch.load(find_checkpoint(tmp_path / "out", step) / layer_file(2, 0)) for step in (3, 4, 5)]
    assert "mlp.linear1.weight" in states[0] and "mlp.fc1_weight" in states[1] and "attention.qkv.weight" in states[1]
    assert states[2].keys() == states[0].keys()
    full_weights = []
    for step in (3, 4):
        path = find_checkpoint(tmp_path / "out", step)
        args = load_checkpoint_args(path)[0].replace(model_parallel_size=1)
        full_weights.append(load_weights(path, args, layers=layer_params(args), tensor_rank=0, tensor_size=1))
    for layer, tensors in full_weights[1].items():
        assert all(torch.equal(full_weights[0][layer][name], value) for name, value in tensors.items())
    assert "te_layernorm_mlp" not in read_manifest(find_checkpoint(tmp_path / "out", 4)).model  # such a run may load it
    assert "must be at least 1" in refused(convert_hf_to_neox.main, "--hf-model", folder, "--tp", "0")
    text = refused(convert_hf_to_neox.main, *words, "6", "--hf-model", "org/name")
    assert text.startswith("convert_hf_to_neox.py: error: org/name: ") and "Hub" in text
    assert "model_parallel_size: 3 " in refused(convert_hf_to_neox.main, *words, "7", "--tp", "3")
    latest = (tmp_path / "out" / "latest").read_text()
    assert "leave --revision main out" in refused(convert_hf_gptneox_to_neox.main, *words, "5", "--revision", "main")
    assert (tmp_path / "out" / "latest").read_text() == latest and not (tmp_path / "out" / "tokenizer").exists()


def test_the_tokenizer_is_saved_for_training(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", "gpt_neox", vocab_size=384)
    for file in TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    convert_hf_to_neox.main(["--hf-model", str(folder), "--output-dir", str(tmp_path / "out"), "--save-tokenizer"])
    args, _ = load_checkpoint_args(find_checkpoint(tmp_path / "out"))
    assert args.tokenizer_type == "HFTokenizer" and args.vocab_file == str(tmp_path / "out/tokenizer/tokenizer.json")
    assert (tmp_path / "out" / "tokenizer" / "chat_template.jinja").exists()


def test_the_forks_command_leaves_what_the_next_one_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 19 of the commands reads checkpoints/<model>/tokenizer; a configuration may name another after it.
    The folder is that of the experiment whose upload has the site's prefix."""
    folder = model_folder(tmp_path / "org" / "sfm-model", "gpt_neox", vocab_size=384)
    for file in TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(convert_hf_to_neox, "site_defaults", lambda parser: {"NEOX_HUB_PREFIX": "sfm"})
    monkeypatch.chdir(tmp_path)
    convert_hf_gptneox_to_neox.main(["--hf-model", "org/sfm-model"])
    out = tmp_path / "checkpoints" / "model"
    assert load_chat_tokenizer(str(out / "tokenizer")).hf.chat_template
    model_file = out / "global_step0" / "configs" / "hf_model.yml"
    assert yaml.safe_load(model_file.read_text())["vocab_file"] == str(out / "tokenizer" / "tokenizer.json")
    (tmp_path / "run.yml").write_text("vocab_file: other.json\ntrain_batch_size: 4\ntrain_iters: 1\n")
    assert NeoXArgs.from_ymls([model_file, tmp_path / "run.yml"]).vocab_file == "other.json"
    convert_hf_gptneox_to_neox.main(["--hf-model", "org/sfm-model", "--output-dir", "bare", "--no-save-tokenizer"])
    assert not (tmp_path / "bare" / "tokenizer").exists()


@pytest.mark.product
def test_the_batch_script(tmp_path: Path) -> None:
    """Row 23, with bash in the place of sbatch."""
    folder = model_folder(tmp_path / "model", "gpt_neox")
    env = {**os.environ, "PYTHON": sys.executable, "SLURM_SUBMIT_DIR": str(ROOT), "OUTPUT_DIR": str(tmp_path / "out")}
    script = ["bash", str(ROOT / "huggingface" / "convert_hf_to_neox.sbatch")]
    subprocess.run([*script, str(folder), "12"], env={**env, "TP": "2"}, check=True, capture_output=True, timeout=120)
    manifest = read_manifest(find_checkpoint(tmp_path / "out"))
    assert manifest.iteration == 12 and manifest.layout.tensor == 2
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "<hf_model> [iteration]" in done.stderr
    env["SLURM_SUBMIT_DIR"] = str(tmp_path)
    done = subprocess.run([*script, "m"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "submit it from the root of the repository" in done.stderr


def test_an_import_holds_a_few_layers_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check maps the files, by `from_pretrained`; what an export holds beside mapped files, to
    the byte: by the product."""
    load, live = transformers_model._loaded, LiveBytes()

    def mapped(*load_args: Any) -> Any:
        with _disable_current_modes():
            tensors = load(*load_args)
        live._storages |= {tensor.untyped_storage()._cdata for tensor in tensors.values()}  # they take no memory
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "safetensors" in line]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in maps]
        assert all(any(begin <= t.data_ptr() < end for begin, end in spans) for t in tensors.values())
        return tensors

    monkeypatch.setattr(transformers_model, "_loaded", mapped)
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=24, num_attention_heads=4,
                                      intermediate_size=192, max_position_embeddings=64)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="300KB")
    layer = sum(4 * param.numel() for param in model.model.layers[0].parameters())
    with live:
        import_hf(HFFolder(tmp_path / "hf"), tmp_path / "neox", save_tokenizer=False)
    assert layer < live.peak < 6 * layer


@pytest.mark.product
@pytest.mark.parametrize("experts", ["1", "16"])
def test_memory_is_that_of_layers_not_of_the_model(experts: str, tmp_path: Path) -> None:
    """0.5 GB there and back, checks included, to the byte."""
    words = ["--gb", "0.5", "--hidden", "1024", "--precision", "fp32", "--repeats", "1", "--shard-mb", "200"]
    words += ["--experts", experts, "--folder", str(tmp_path), "--json"]
    # The allocator gives large pieces back at once, so that what is measured is what is held.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, str(ROOT / "benchmarks" / "conversion.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    print(measured)
    assert measured["same"] and measured["bytes"] > 0.48e9 and measured["largest_layer"] < 70e6
    for way in ("there", "back"):
        phases = measured["rounds"][0][way]
        assert phases["convert"]["needed"] < 1.3 * measured["largest_shard"], way
        assert phases["convert"]["resident"] < 4.5 * measured["largest_layer"], way
        # `from_pretrained` maps all files, whose pages the kernel takes back when it wants them.
        assert phases["check"]["needed"] < 8 * measured["largest_layer"], way
        assert phases["check"]["resident"] < phases["check"]["needed"] + 2 * measured["bytes"], way
