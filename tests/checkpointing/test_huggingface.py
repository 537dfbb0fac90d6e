"""HuggingFace folders: golden checkpoints to them, there and back to the bit, files around, and refusals."""

import json
import os
import re
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpointing import CheckpointError, read_manifest, save_tensors, verify
from megatron.checkpointing.families.convert import hf_config, hf_shapes, to_hf
from megatron.checkpointing.huggingface import HFFolder, export_hf, find_hf, import_hf, is_hf
from megatron.checkpointing.huggingface.logit_check import compare_logits
from megatron.checkpointing.huggingface.weight_writer import write_weights
from megatron.checkpointing.layout import layer_file, layer_files
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.family_models import CASES, ODD, odd_model, random_model
from tests.checkpointing.golden import GOLDEN, LLAMA, NEOX, RUNS, checkpoint, fails, golden_args, write_at, written
from tests.marks import with_more
from tests.model.stages import random_weights, small

TOKENIZER = GOLDEN / "dataset" / "hf_tokenizer"
MORE_CASES = ("gpt 2", "phi 3 long", "gemma 2", "qwen 2 moe", "gpt oss", "nemotron h")


def model_folder(
    path: Path, case: str = "llama 3", dtype: torch.dtype = torch.float32, vocab_size: int | None = None, **kwargs: Any
) -> Path:
    overrides = {} if vocab_size is None else {"vocab_size": vocab_size}
    random_model(case, dtype, **overrides).save_pretrained(path, **kwargs)
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def imported(folder: Path | HFFolder, to: Path, **kwargs: Any) -> tuple[Path, NeoXArgs]:
    """The checkpoint of a folder, whose logits are those of transformers, and its arguments."""
    path, parity = import_hf(HFFolder(folder) if isinstance(folder, Path) else folder, to, **kwargs)
    assert parity.difference <= parity.bound
    return path, load_checkpoint_args(path)[0]


def there_and_back(folder: Path | HFFolder, place: Path, **kwargs: Any) -> dict[str, Tensor]:
    """Imported into `place / "ours"` and exported into `place / "back"`; the tensors there."""
    path, args = imported(folder, place / "ours", **kwargs)
    export_hf(path, args, place / "back")
    return tensors_of(place / "back")


def same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    equal_bits = (actual[name].dtype == value.dtype and actual[name].equal(value) for name, value in expected.items())
    return actual.keys() == expected.keys() and all(equal_bits)


def loaded(path: Path) -> Any:
    """By plain transformers, which must find every tensor and no other."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(path, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("run", "step"), [*((run, 3) for run in RUNS), ("neox_pp2_mp2", 0), ("llama_pp1_mp1", 0)])
def test_golden_checkpoints_become_folders_with_their_logits(run: str, step: int, tmp_path: Path) -> None:
    """Logits are those of GPT-NeoX's forward pass, with its training YAML; tensors those of its converter."""
    args, facts = load_checkpoint_args(checkpoint(run, step), [RUNS[run] / f"{run}.yml"])
    assert facts.tensor_size == (2 if run == "neox_pp2_mp2" else 1)
    assert ("no pipeline" in facts.layout) == (run == "neox_pp0_mp1")
    comparison = export_hf(checkpoint(run, step), args, tmp_path / "hf", tokenizer=False)
    base = LLAMA if run.startswith("llama") else NEOX
    tokens = torch.from_numpy(np.load(base / "fixed_input_2x65.npy").astype("int64"))[:, :-1]
    logits = loaded(tmp_path / "hf")(tokens).logits
    difference = (logits - torch.from_numpy(np.load(RUNS[run] / f"logits_step{step}.npy"))).abs().max().item()
    print(f"{run}: {difference:.2e}; {comparison}")
    assert difference <= 1e-5
    if step == 3 and (RUNS[run] / "hf_step3").exists():
        converted, exported = tensors_of(RUNS[run] / "hf_step3"), tensors_of(tmp_path / "hf")
        assert exported.keys() == converted.keys()
        for name, value in converted.items():  # sums of halved biases differ in the last bit
            torch.testing.assert_close(exported[name], value, rtol=0, atol=1e-7 if name.endswith("bias") else 0)
        expected = torch.from_numpy(np.load(RUNS[run] / "hf_logits_step3.npy"))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_broken_weights_are_named(tmp_path: Path) -> None:
    """NaN makes two models differ, so the error names the tensor and does not call the models different."""
    args = small(gpt_j_residual=False, no_weight_tying=True)
    weights = random_weights(args)
    weights[2]["mlp.linear2.bias"][3] = float("nan")
    message = r"hf: NaN or Inf .*gpt_neox\.layers\.0\.mlp\.dense_4h_to_h\.bias"
    refused(message, written(tmp_path / "c", args, weights), args, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(("case", "dtype", "kwargs"), [
    ("gpt_neox", "float32", {"tensor": 2, "pipe": 2}), ("llama 3", "bfloat16", {"naming": "te"}),
    ("gpt_neox", "float32", {"naming": "te", "tensor": 2, "pipe": 0}), ("smollm 3", "bfloat16", {"tensor": 4}),
    ("qwen 3", "bfloat16", {"pipe": 2}), ("mistral", "float32", {"iteration": 7, "pipe": 0}),
    ("mixtral", "float32", {"tensor": 4, "pipe": 2}), ("qwen 2 moe", "bfloat16", {"tensor": 2}),
])  # fmt: skip
def test_there_and_back_changes_no_bit(case: str, dtype: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """Through files, padded vocabulary and all; the checkpoint alone says how to go back."""
    folder = model_folder(tmp_path / "hf", case, getattr(torch, dtype), max_shard_size="40KB")
    vocabulary = tokenizers.models.WordLevel({"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, 90)}})
    tokenizers.Tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    path, parity = import_hf(HFFolder(folder), tmp_path / "neox", **kwargs)
    assert path.name == f"global_step{kwargs.get('iteration', 0)}" and parity.difference <= 1e-5
    assert verify(path) is not None and bool(layer_files(path)) == (kwargs.get("pipe") != 0)
    args, facts = load_checkpoint_args(path)
    assert ("Transformer-Engine" in facts.names) == ("naming" in kwargs) and args.padded_vocab_size == 128
    comparison = export_hf(path, args, tmp_path / "back", shard_bytes=30_000)
    assert comparison is not None and comparison.difference <= 1e-5
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(folder))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (folder / file).read_bytes()
    assert HFFolder(tmp_path / "back").config["vocab_size"] == 90


@pytest.mark.parametrize("case", with_more(ODD, *MORE_CASES, product=ODD.keys() - {"olmo 1", *MORE_CASES}))
def test_folders_of_every_family_come_out_as_they_went_in(case: str, tmp_path: Path) -> None:
    odd_model(case, torch.bfloat16).save_pretrained(tmp_path / "model")
    assert same_bits(there_and_back(tmp_path / "model", tmp_path), tensors_of(tmp_path / "model"))
    config, exported_config = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back"))
    differing = {name for name in config if config[name] != exported_config.get(name)}
    assert differing <= {"rope_parameters"}, {name: (config[name], exported_config.get(name)) for name in differing}


def test_what_experts_may_take_in_training_is_left_out_of_the_check(tmp_path: Path) -> None:
    checkpoint, args = imported(model_folder(tmp_path / "model", "mixtral"), tmp_path / "run")
    trained = args.replace(moe_expert_capacity_factor=0.5, moe_router_type="sinkhorn")
    comparison = export_hf(checkpoint, trained, tmp_path / "back")
    assert comparison is not None and comparison.difference < 1e-5


@pytest.mark.product
def test_the_check_passes_on_each_class_of_configurations(tmp_path: Path) -> None:
    for case in {kind: case for case, (kind, _) in CASES.items()}.values():
        imported(model_folder(tmp_path / case, case), tmp_path / "ours" / case)


@torch.no_grad()
def test_the_check_refuses_another_model(tmp_path: Path) -> None:
    """The check builds one layer at a time: its numbers are those of the full model."""
    args = small(no_weight_tying=True)
    write_weights(tmp_path, hf_shapes(args), torch.float32, to_hf(args, random_weights(args).items()))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(args)))
    comparison = compare_logits(HFFolder(tmp_path), args, random_weights(args).__getitem__, 64)
    tokens = torch.randint(0, 64, (2, comparison.length), generator=torch.Generator().manual_seed(0))
    largest = loaded(tmp_path)(tokens).logits.abs().max().item()
    assert comparison.difference < 1e-5 and comparison.largest == pytest.approx(largest, rel=1e-5)
    turned, doubled, broken = (random_weights(args) for _ in range(3))
    rows = turned[3]["attention.query_key_value.weight"]
    rows[:16] = rows[:16].roll(8, 0)
    doubled[2]["mlp.linear2.bias"] *= 2
    broken[2]["mlp.linear2.bias"][3] = torch.nan
    for keys, weights in (
        ({"bias_gelu_fusion": True}, random_weights(args)),
        ({"layernorm_epsilon": 1e-3}, random_weights(args)),
        *(({}, weights) for weights in (turned, doubled, broken)),
    ):
        with pytest.raises(CheckpointError, match="not the same model.* logit difference"):
            compare_logits(HFFolder(tmp_path), args.replace(**keys), weights.__getitem__, 64)


@pytest.mark.parametrize("case", ["mixtral", "qwen 2 moe"])
def test_one_tensor_of_all_experts_is_read_as_one_of_each(case: str, tmp_path: Path) -> None:
    """transformers 5 can leave them as they are in memory."""
    model = random_model(case, torch.bfloat16)
    for path, kwargs in ((tmp_path / "each", {}), (tmp_path / "all", {"save_original_format": False})):
        model.save_pretrained(path, max_shard_size="40KB", **kwargs)
    separate, stacked = HFFolder(tmp_path / "each"), HFFolder(tmp_path / "all")
    assert any(name.endswith("gate_up_proj") for name in tensors_of(tmp_path / "all"))
    assert stacked.shapes == dict(separate.shapes) and stacked.dtypes == separate.dtypes
    assert all(torch.equal(stacked.get(name), separate.get(name)) for name in separate.shapes)
    assert same_bits(there_and_back(stacked, tmp_path, tensor=2), tensors_of(tmp_path / "each"))


def test_what_safetensors_and_transformers_write_is_read_and_the_other_way_round(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(3, i + 1, generator=generator).bfloat16() for i in range(6)}
    write_weights(
        tmp_path, {n: tuple(t.shape) for n, t in tensors.items()}, torch.bfloat16, reversed(tensors.items()), 50
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 3 * 21 and set(index["weight_map"]) == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], value)
    assert max(p.stat().st_size for p in tmp_path.glob("*.safetensors")) < 50 + 300
    random_model("llama 3").config.save_pretrained(tmp_path / "old")
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    old = HFFolder(tmp_path / "old")
    assert all(torch.equal(old.get(name), value) for name, value in tensors.items())


def test_precision_is_the_requested_one(tmp_path: Path) -> None:
    args = golden_args("neox_pp1_mp1")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        comparison = export_hf(checkpoint("neox_pp1_mp1"), args, tmp_path / name, dtype=dtype, tokenizer=False)
        assert comparison is not None and comparison.difference <= 1e-5  # of the same rounded weights
        assert {value.dtype for value in tensors_of(tmp_path / name).values()} == {dtype}
        assert HFFolder(tmp_path / name).config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_mixed_and_too_large_numbers_are_refused(tmp_path: Path) -> None:
    args = golden_args("neox_pp1_mp1")
    path = write_at(tmp_path / "c", args, checkpoint("neox_pp1_mp1"), 1)
    state = torch.load(path / layer_file(3, 0), weights_only=True)
    state["mlp.linear1.bias"] = state["mlp.linear1.bias"].bfloat16()
    save_tensors(state, path / layer_file(3, 0))
    refused(r"bfloat16, float32.*--precision", path, args, tmp_path / "hf")
    state["mlp.linear1.bias"] = torch.full_like(state["mlp.linear1.bias"], 1e6)
    save_tensors(state, path / layer_file(3, 0))
    refused(r"layer 3: mlp.linear1.bias: .*fp16.*9.99e\+05", path, args, tmp_path / "hf", dtype=torch.float16)
    assert not list(tmp_path.glob("*hf*"))


def test_tokenizer_template_and_card(tmp_path: Path) -> None:
    run = "neox_pp1_mp1"
    for place in (TOKENIZER, TOKENIZER / "tokenizer.json"):
        args = golden_args(run, vocab_file=str(place))
        export_hf(checkpoint(run), args, tmp_path / "hf")  # the second time over the first
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
        assert len(tokenizer) == 380 and tokenizer.chat_template is not None
        config = HFFolder(tmp_path / "hf").config
        assert config["eos_token_id"] == tokenizer.eos_token_id is not None
        assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] is not None
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "| Architecture | GPTNeoXForCausalLM |" in card
    yml = (RUNS[run] / f"{run}.yml").read_text().rstrip()
    assert f"`{run}.yml`:\n\n```yml\n{yml}\n```" in card
    # A bare tokenizer.json declares nothing: its end of document is looked up.
    bare = golden_args(run, vocab_file=str(GOLDEN / "dataset" / "tokenizer.json"))
    export_hf(checkpoint(run), bare, tmp_path / "bare", pad_token_id=5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bare")
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.pad_token_id == 5
    assert HFFolder(tmp_path / "bare").config["pad_token_id"] == 5
    with pytest.raises(CheckpointError, match="--pad-token-id: 9999"):
        export_hf(checkpoint(run), bare, tmp_path / "bare", pad_token_id=9999)
    named_args = golden_args(run, vocab_file=str(TOKENIZER))
    export_hf(checkpoint(run), named_args, tmp_path / "named", vocab_is_hf=True)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "named")) == 380


def refused(message: str, *args: Any, **kwargs: Any) -> str:
    return fails(message, export_hf, *args, tokenizer=False, **kwargs)


def test_missing_and_extra_tensors_are_all_told_and_grouped(tmp_path: Path) -> None:
    args = golden_args("neox_pp1_mp1")
    path = write_at(tmp_path / "c", args, checkpoint("neox_pp1_mp1"), 1)
    for layer in (2, 3, 5):
        state = torch.load(path / layer_file(layer, 0), weights_only=True)
        del state["mlp.linear1.bias"]
        state["attention.sinks"] = torch.zeros(4)
        save_tensors(state, path / layer_file(layer, 0))
    text = refused("missing", path, args, tmp_path / "hf")
    assert re.search("2-3, 5: missing mlp.linear1.bias\n.* 2-3, 5: extra attention.sinks$", text), text
    assert not (tmp_path / "hf").exists() and not (tmp_path / ".tmp_hf").exists()


def test_an_unexpected_head(tmp_path: Path) -> None:
    """tie_word_embeddings says one thing, the files another."""
    folder = model_folder(tmp_path / "hf")
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(?s)(?=.*layers\.N\.mlp\.up_proj.* 1\)).*tie_word_embeddings.*true"):
        import_hf(HFFolder(folder), tmp_path / "neox")
    assert not (tmp_path / "neox").exists()


def test_a_tokenizer_of_another_size(tmp_path: Path) -> None:
    args = golden_args("neox_pp1_mp1", vocab_file=str(TOKENIZER))
    tokenizer_keys = {"vocab_file": str(TOKENIZER), "tokenizer_type": "HFTokenizer"}
    small_args = small(padded_vocab_size=256, no_weight_tying=True, **tokenizer_keys)
    with pytest.raises(CheckpointError, match="tokenizer.* 380 .* 256 rows"):
        export_hf(written(tmp_path / "c", small_args, random_weights(small_args)), small_args, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="tokenizer .*nowhere.*no such file.*--no_save_tokenizer"):
        export_hf(checkpoint("neox_pp1_mp1"), args.replace(vocab_file="nowhere/tokenizer.json"), tmp_path / "hf")


def test_targets_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, source = golden_args("neox_pp1_mp1"), checkpoint("neox_pp1_mp1")
    refused("/proc/nothing.* cannot be written", source, args, Path("/proc/nothing/hf"))
    (tmp_path / "file").write_text("")
    refused("is a file", source, args, tmp_path / "file")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("")
    refused("thesis.tex", source, args, tmp_path / "work")
    with pytest.raises(CheckpointError, match="cannot be written"):
        import_hf(HFFolder(model_folder(tmp_path / "model")), "/proc/nothing/neox")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 60_000))
    refused(r" 67\.\d\d MB.* 60\.00 kB ", source, args, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r" 60\.00 kB"):
        import_hf(HFFolder(tmp_path / "model"), tmp_path / "neox")
    assert not list(tmp_path.glob("*hf")) and not list((tmp_path / "neox").glob("*"))


def test_an_interrupted_conversion_is_made_again(tmp_path: Path) -> None:
    args, source = golden_args("neox_pp1_mp1"), checkpoint("neox_pp1_mp1")

    def stop(layers: Any, count: int) -> Any:
        for layer in layers:
            if layer == 4:
                raise KeyboardInterrupt
            yield layer

    export = partial(export_hf, source, args, tmp_path / "hf", tokenizer=False)
    export()
    original = (tmp_path / "hf" / "model.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        export(dtype=torch.bfloat16, progress=stop)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == original
    (tmp_path / ".tmp_hf").mkdir()  # of one that was killed
    export(dtype=torch.bfloat16)
    assert os.listdir(tmp_path) == ["hf"] and (tmp_path / "hf" / "model.safetensors").stat().st_size < len(original)
    with pytest.raises(KeyboardInterrupt):
        import_hf(HFFolder(tmp_path / "hf"), tmp_path / "neox", progress=stop)
    assert not (tmp_path / "neox").exists()
    for tensor in (1, 2):  # an import replaces an import, never a run's checkpoint
        path, _ = import_hf(HFFolder(tmp_path / "hf"), tmp_path / "neox", tensor=tensor)
    manifest = read_manifest(path)
    assert manifest is not None and manifest.layout.tensor == 2
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="global_step0.* already exists.*--iteration"):
        import_hf(HFFolder(tmp_path / "hf"), tmp_path / "neox")


def test_damaged_layers_are_found_while_others_are_written(tmp_path: Path) -> None:
    path, args = imported(model_folder(tmp_path / "hf"), tmp_path / "neox")
    export_hf(path, args, tmp_path / "back", check=False)
    for layer in (4, 8):
        content = bytearray((path / layer_file(layer, 0)).read_bytes())
        content[len(content) // 2] ^= 1
        (path / layer_file(layer, 0)).write_bytes(content)
    refused(r"layer_04-\S+ \(checksum\), layer_08-\S+ \(checksum\)", path, args, tmp_path / "back", check=False)
    assert HFFolder(tmp_path / "back").config and not (tmp_path / ".tmp_back").exists(), "the earlier one stays"
    (path / layer_file(5, 0)).unlink()
    refused("layer_05", path, args, tmp_path / "back", check=False)


def test_damaged_folders(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "hf")
    content, config = (folder / "model.safetensors").read_bytes(), json.loads((folder / "config.json").read_text())

    def refuses(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            import_hf(HFFolder(folder), tmp_path / "neox")

    (folder / "model.safetensors").write_bytes(content[:-100])
    refuses("model.safetensors: damaged, .* byte")
    (folder / "model.safetensors").write_bytes(b"\x80\x04" + content)
    refuses("model.safetensors: .*not a safetensors file")
    (folder / "model.safetensors").unlink()
    refuses("neither model.safetensors nor pytorch_model.bin")

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"model.norm.weight": Harm()}, folder / "pytorch_model.bin")
    refuses(r"pytorch_model.bin: .*(posix|os).mkdir")
    torch.save([1, 2], folder / "pytorch_model.bin")
    refuses("pytorch_model.bin: .*tensors by name")
    assert not (tmp_path / "harm").exists()
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    refuses("is quantised")
    (folder / "config.json").write_text("{")
    refuses("config.json: .*JSON")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses("incomplete: .*model-00001-of-00002.safetensors")


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "hf")
    assert is_hf("hf://org/name") and is_hf(folder) and not is_hf(tmp_path) and find_hf(folder) == folder
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        import_hf(HFFolder(folder), tmp_path / "other", save_tokenizer=True)
    for name in ("nowhere/at/all", "/nowhere", "./nowhere"):
        fails(f"{name}: no such folder.*ORG/NAME", find_hf, name)
    fails("leave --revision v1 out, or write hf://ORG/NAME", find_hf, folder, "v1")
    fails(r"org/name at revision v1: .*hf download org/name", find_hf, "hf://org/name@v1")
    requests = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        requests.append((name, revision, "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_hf("org/name", "v2") == folder and requests == [("org/name", "v2", True)]


def test_gpt_2_as_it_is_published(tmp_path: Path) -> None:
    """GPT-2's published names lack the prefix of the class with a head, and its files hold masks too."""
    odd_model("gpt 2").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    published = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32) for i in range(4)}
    save_file({**published, **masks}, path, metadata={"format": "pt"})
    exported = there_and_back(tmp_path / "model", tmp_path)
    assert {f"transformer.{name}" for name in published} == exported.keys()
    save_file({**published, "lm_head.weight": published["wte.weight"].clone()}, path, metadata={"format": "pt"})
    import_hf(HFFolder(tmp_path / "model"), tmp_path / "again")
    assert all(exported[f"transformer.{name}"].equal(value) for name, value in published.items())
