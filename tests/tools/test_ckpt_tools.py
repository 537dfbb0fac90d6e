"""The checkpoint commands: reshard, verify, inspect and average."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import megatron.checkpointing.resharding as resharding
from megatron.checkpointing import find_checkpoint, layer_file, list_checkpoints, load_tensors, read_manifest
from megatron.checkpointing import verify as verified
from megatron.checkpointing.huggingface import HFFolder, import_hf
from tests.checkpointing.golden import checkpoint
from tests.checkpointing.test_huggingface import model_folder, tensors_of
from tests.marks import with_more
from tests.pool import run_ranks
from tests.tools.commands import refused
from tests.training.checkpoint.test_reshard import SAVED, values
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import run_to_end
from tools.ckpts import average, convert_neox_to_hf, inspect_checkpoints, reshard, verify


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at tensor 2 x pipeline 2, saved at 3 and 6, with the logits of a fixed batch."""
    save = tmp_path_factory.mktemp("trained") / "run"
    train_values = values(save, "tp2 x pp2", "rpe", "fp32", checkpoint_validation_with_forward_pass=True)
    run_ranks(run_to_end, 4, train_values, timeout=120)
    return save


def tensors(path: Path) -> dict[str, Any]:
    file_tensors = {p.name: load_tensors(p) for kind in ("layer_*", "optim_*") for p in sorted(path.glob(kind))}
    assert file_tensors
    return file_tensors


def equal_tensors(actual: Any, expected: Any) -> bool:
    if isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(equal_tensors(actual[key], expected[key]) for key in actual)
    return torch.equal(actual, expected)


@pytest.mark.parametrize("layout", with_more(["one process", "tp4", "pp4"], "pp4", product=["tp4"]))
def test_resharded_goes_on(layout: str, trained: Path, tmp_path: Path) -> None:
    """There and back every tensor is the same bits; a run of the new layout ends as the old one did."""
    tp, pp = {"one process": (1, 1), "tp4": (4, 1), "pp4": (1, 4)}[layout]
    argv = ["--input_dir", str(trained), "--iteration", str(SAVED), "--output_dir", str(tmp_path / "there")]
    reshard.main([*argv, "--tp", str(tp), "--pp", str(pp), "--dp", "1", "--zero-stage", "0"])
    resharded = find_checkpoint(tmp_path / "there")
    written_layout = read_manifest(resharded).layout
    assert (written_layout.tensor, written_layout.pipe, len(list(resharded.glob("mp_rank_*")))) == (tp, pp, tp * pp)
    reshard.main(["--input_dir", str(resharded), "--output_dir", str(tmp_path / "back"), "--tp", "2", "--pp", "2"])
    original, back = tensors(trained / f"global_step{SAVED}"), tensors(find_checkpoint(tmp_path / "back"))
    for name, file_tensors in original.items():
        if name.startswith("optim") and "_02" not in name:
            file_tensors.pop("attention.rpe.weight", None)  # what all blocks share is in the first one's file
    assert equal_tensors(original, back)
    checked = {"load": str(tmp_path / "there"), "checkpoint_validation_with_forward_pass": True}
    run_ranks(run_to_end, tp * pp, values(tmp_path / "on", layout, "rpe", "fp32", **checked), timeout=120)
    uninterrupted, resumed = losses(trained), losses(tmp_path / "on")
    assert sorted(resumed) == [4, 5, 6] and all(
        abs(resumed[i] - uninterrupted[i]) <= 1e-5 * uninterrupted[i] for i in resumed
    )


def test_interrupted_resharding_is_made_again(trained: Path, tmp_path: Path) -> None:
    argv = ["--input_dir", str(trained), "--output_dir", str(tmp_path), "--tp", "1", "--pp", "1"]
    calls, save = itertools.count(1), resharding.save_tensors

    def killed(*args: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return save(*args)

    with mock.patch.object(resharding, "save_tensors", killed), pytest.raises(KeyboardInterrupt):
        reshard.main(argv)
    assert list_checkpoints(tmp_path) == [] and not (tmp_path / "latest").exists()
    reshard.main(argv)
    reshard.main(argv)  # finished: nothing to do
    assert [path.name for path in list_checkpoints(tmp_path)] == ["global_step6"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_one_layer_in_memory(trained: Path, tmp_path: Path) -> None:
    """Tensors are let go layer by layer: no more than one layer's files are open at a time."""
    with mock.patch.object(resharding, "load_weights", wraps=resharding.load_weights) as load:
        reshard.main(["--input_dir", str(trained), "--output_dir", str(tmp_path), "--tp", "1"])
    open_layers = [len(call.kwargs["layers"]) for call in load.call_args_list]
    assert set(open_layers) == {1} and len(open_layers) > 4


def test_what_reshard_refuses(trained: Path, tmp_path: Path) -> None:
    def reply(source: Path, tp: int) -> str:
        return refused(reshard.main, "--input_dir", source, "--output_dir", tmp_path / "out", "--tp", tp)

    text = reply(trained, 3)
    assert text.startswith("reshard.py: error:") and "3" in text
    assert "no such directory" in reply(tmp_path / "nowhere", 1)
    broken = tmp_path / "broken" / "global_step6"
    shutil.copytree(trained / "global_step6", broken)
    (broken / layer_file(3, 1)).unlink()
    assert layer_file(3, 1) in reply(broken, 1)
    reshard.main(["--input_dir", str(trained), "--output_dir", str(tmp_path / "out"), "--tp", "1"])
    assert "already exists" in reply(trained, 4)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def verify_ends(folder: Path) -> object:
    with pytest.raises(SystemExit) as exit_info:
        verify.main([str(folder)])
    return exit_info.value.code


def test_verify_names_every_damage(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_ends(copied) == 0
    output = capsys.readouterr().out
    assert output.count(": whole: iteration") == 2 and "global_step3" in output and "global_step6" in output
    flipped, truncated, deleted = (copied / "global_step6" / f"optim_layer_0{i}-model_00.pt" for i in (2, 3, 4))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    truncated.write_bytes(truncated.read_bytes()[:-7])
    deleted.unlink()
    assert verify_ends(copied) == 1
    text = capsys.readouterr().err
    assert "verify.py: error:" in text and "global_step3" not in text
    for part in (f"{flipped.name} (checksum)", f"{truncated.name} (", "bytes instead of", f"{deleted.name} (missing)"):
        assert part in text


def test_verify_compares_tensors(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that does not describe the file it has the checksum of."""
    path, name = copied / "global_step6", layer_file(7, 0)
    manifest = read_manifest(path)
    assert manifest.files[name].tensors["norm.weight"] == "float32 [32]"
    wrong = replace(manifest.files[name], tensors={**manifest.files[name].tensors, "norm.weight": "bfloat16 [32]"})
    changed = replace(manifest, files={**manifest.files, name: wrong})
    (path / "manifest.json").write_text(changed.to_json())
    assert verify_ends(copied) == 1
    assert "norm.weight is float32 [32], but the manifest lists bfloat16 [32]" in capsys.readouterr().err


def test_inspect(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_checkpoints.main(["--checkpoint-path", str(trained)])
    output = capsys.readouterr().out
    inspect_checkpoints.main([str(trained)])
    assert capsys.readouterr().out == output
    assert "layout: tensor 2, pipeline 2, data 1, ZeRO" in output and "iteration 6" in output
    raw = torch.load(trained / "global_step6" / layer_file(3, 1), weights_only=True)["mlp.linear1.weight"]
    rms, largest = raw.double().square().mean().sqrt(), raw.abs().max()
    assert f"[64, 32]         rms {rms:.3e}  largest {largest:.3e}" in output
    assert "mlp.linear1.weight/exp_avg_sq" in output


def test_inspect_compares(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """GPT-NeoX's flags: --compare A,B, --diff, --attributes, --interactive."""
    sides, spec = f"{trained / 'global_step3'},{trained / 'global_step6'}", layer_file(3, 1)
    inspect_checkpoints.main([sides, "-c", "-d", "--match", "mlp.linear1.weight"])
    output = capsys.readouterr().out
    states = [torch.load(path / spec, weights_only=True)["mlp.linear1.weight"] for path in map(Path, sides.split(","))]
    largest = (states[0].double() - states[1].double()).abs().max()
    assert f"{spec}\n" in output and f"[64, 32]  largest difference {largest:.3e}" in output and "equal" not in output
    inspect_checkpoints.main(["--compare", f"{trained / 'global_step6'},{trained / 'global_step6'}", "--diff"])
    assert capsys.readouterr().out.startswith("0 values differ in ")
    copy = tmp_path / spec
    torch.save({"a": torch.zeros(2), "n": {"step": 3, "name": "x"}}, copy)
    changed_path = tmp_path / "other.pt"
    torch.save({"a": torch.zeros(3), "n": {"step": 4, "name": "x"}, "b": torch.ones(1)}, changed_path)
    inspect_checkpoints.main(["-c", f"{copy},{changed_path}", "--attributes", "a", "n", "b"])
    lines = [text.split() for text in capsys.readouterr().out.splitlines() if text.startswith("  ")]
    assert {words[0]: " ".join(words[1:]) for words in lines} == {
        "a": "float32 [2] | float32 [3]", "n/step": "3 | 4", "n/name": "equal", "b": "only in the second",
    }  # fmt: skip
    nan, late_names = float("nan"), [f"later_{number}" for number in range(9)]
    torch.save({"w": torch.tensor([nan, 1.0, 2.0]), "same": torch.tensor([nan, 1.0]), "loss": nan}, copy)
    torch.save({"w": torch.tensor([nan, 1.0, 4.0]), "same": torch.tensor([nan, 1.0]), "loss": nan,
                **dict.fromkeys(late_names, torch.ones(1))}, changed_path)  # fmt: skip
    inspect_checkpoints.main(["-c", "-d", f"{copy},{changed_path}", "--attributes", "w", "same", "loss", *late_names])
    lines = [text.split() for text in capsys.readouterr().out.splitlines() if text.startswith("  ")]
    assert [words[0] for words in lines] == ["w", *late_names], "those of the second in its order"
    assert float(lines[0][-1]) == 2.0
    torch.save({"a": torch.zeros(2), "n": {"step": 3, "name": "x"}}, copy)
    inspected: list[Any] = []
    monkeypatch.setattr("code.interact", lambda banner, local, exitmsg: inspected.append(local["checkpoint"]))
    inspect_checkpoints.main([str(copy), "--attributes", "n/step", "-i"])
    assert "n/step" in (output := capsys.readouterr().out) and "name" not in output and inspected[0]["n"]["name"] == "x"
    assert "no value is called n/st" in refused(inspect_checkpoints.main, copy, "--attributes", "n/st")
    with pytest.raises(SystemExit):
        inspect_checkpoints.main([str(copy), "--diff"])


def test_inspect_reads_neox_and_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inspect_checkpoints.main([str(checkpoint("neox_pp2_mp2")), "--match", "layer_03-model_01"])
    output = capsys.readouterr().out
    assert "no manifest.json" in output and "attention.query_key_value.weight" in output and "layer_04" not in output

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    torch.save({"x": Evil()}, tmp_path / "mp_rank_00_model_states.pt")
    text = refused(inspect_checkpoints.main, tmp_path)
    assert "not on the allow-list" in text or "damaged" in text
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SystemExit):
        inspect_checkpoints.main([])


def test_the_mean_is_torchs(tmp_path: Path) -> None:
    """Three bf16 models in three layouts, biases under parallel residuals included."""
    originals, paths = [], []
    for i, (tensor, pipe) in enumerate([(1, 0), (1, 2), (2, 1)]):
        hf = model_folder(tmp_path / f"hf{i}", "gpt_neox", torch.bfloat16)
        generator = torch.Generator().manual_seed(i)
        tensors = tensors_of(hf).items()
        moved = {name: (t + torch.randn(t.shape, generator=generator)).bfloat16() for name, t in tensors}
        save_file(moved, hf / "model.safetensors", {"format": "pt"})
        originals.append(moved)
        paths.append(import_hf(HFFolder(hf), tmp_path / f"in{i}", iteration=i + 3, tensor=tensor, pipe=pipe)[0])
    average.main(["--output_dir", str(tmp_path / "out"), *map(str, paths)])
    average_path = find_checkpoint(tmp_path / "out")
    manifest = verified(average_path)
    assert average_path.name == "global_step5" and manifest.layout.tensor == 2
    assert not manifest.optimizer and manifest.run_id.startswith("mean of ")
    convert_neox_to_hf.main(["--input_dir", str(average_path), "--output_dir", str(tmp_path / "hf")])
    averaged = tensors_of(tmp_path / "hf")
    assert averaged.keys() == originals[0].keys()
    for name, value in averaged.items():
        expected = torch.stack([tensors[name].double() for tensors in originals]).mean(0).bfloat16()
        torch.testing.assert_close(value, expected, rtol=2**-7, atol=1e-6)
        assert value.dtype == torch.bfloat16 and (value == expected).float().mean() > 0.99

    average.main(["--output_dir", str(tmp_path / "turned"), *map(str, reversed(paths))])  # the last has no layer files
    convert_neox_to_hf.main(["--input_dir", str(tmp_path / "turned"), "--output_dir", str(tmp_path / "hf")])
    for name, value in tensors_of(tmp_path / "hf").items():
        torch.testing.assert_close(value, averaged[name], rtol=2**-7, atol=1e-6)

    assert "already exists" in refused(average.main, "--output_dir", tmp_path / "out", *paths)
    assert "two different checkpoints" in refused(average.main, "--output_dir", tmp_path / "no", paths[0], paths[0])
    llama_path = import_hf(HFFolder(model_folder(tmp_path / "llama")), tmp_path / "in9")[0]
    text = refused(average.main, "--output_dir", tmp_path / "no", llama_path, paths[0])
    assert text.startswith("average.py: error: num_attention_heads: 8 (program)")
    next(paths[2].glob("layer_02*")).write_bytes(b"")
    assert "damaged" in refused(average.main, "--output_dir", tmp_path / "no", paths[2], paths[1])
    assert not (tmp_path / "no").exists()
