"""The mean of checkpoints against torch's, whatever their layouts, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpointing import find_checkpoint, verify
from megatron.checkpointing.huggingface import HFFolder, import_hf
from tests.checkpointing.test_huggingface import model_folder, tensors_of
from tools.ckpts import average, convert_neox_to_hf


def refused(*argv: object) -> str:
    with pytest.raises(SystemExit) as ended:
        average.main([str(word) for word in argv])
    assert isinstance(ended.value.code, str)
    return ended.value.code


def test_the_mean_is_torchs(tmp_path: Path) -> None:
    """Three bf16 models in three layouts, biases under parallel residuals included."""
    given, paths = [], []
    for i, (tensor, pipe) in enumerate([(1, 0), (1, 2), (2, 1)]):
        hf = model_folder(tmp_path / f"hf{i}", "gpt_neox", torch.bfloat16)
        generator = torch.Generator().manual_seed(i)
        moved = {
            name: (value + torch.randn(value.shape, generator=generator)).bfloat16()
            for name, value in tensors_of(hf).items()
        }
        save_file(moved, hf / "model.safetensors", {"format": "pt"})
        given.append(moved)
        paths.append(import_hf(HFFolder(hf), tmp_path / f"in{i}", iteration=i + 3, tensor=tensor, pipe=pipe)[0])
    average.main(["--output_dir", str(tmp_path / "out"), *map(str, paths)])
    made = find_checkpoint(tmp_path / "out")
    manifest = verify(made)
    assert made.name == "global_step5" and manifest is not None and manifest.layout.tensor == 2
    assert not manifest.optimizer and manifest.run_id.startswith("mean of ")
    convert_neox_to_hf.main(["--input_dir", str(made), "--output_dir", str(tmp_path / "hf")])
    averaged = tensors_of(tmp_path / "hf")
    assert averaged.keys() == given[0].keys()
    for name, value in averaged.items():
        wanted = torch.stack([tensors[name].double() for tensors in given]).mean(0).bfloat16()
        torch.testing.assert_close(value, wanted, rtol=2**-7, atol=1e-6)
        assert value.dtype == torch.bfloat16 and (value == wanted).float().mean() > 0.99

    average.main(["--output_dir", str(tmp_path / "turned"), *map(str, reversed(paths))])  # the last has no layer files
    convert_neox_to_hf.main(["--input_dir", str(tmp_path / "turned"), "--output_dir", str(tmp_path / "hf")])
    for name, value in tensors_of(tmp_path / "hf").items():
        torch.testing.assert_close(value, averaged[name], rtol=2**-7, atol=1e-6)

    assert "is there already" in refused("--output_dir", tmp_path / "out", *paths)
    assert "two checkpoints at least" in refused("--output_dir", tmp_path / "no", paths[0], paths[0])
    other = import_hf(HFFolder(model_folder(tmp_path / "llama")), tmp_path / "in9")[0]
    text = refused("--output_dir", tmp_path / "no", other, paths[0])
    assert text.startswith("average.py: error: num_attention_heads: 8 (program), but the model of ")
    next(paths[2].glob("layer_02*")).write_bytes(b"")
    assert "damaged" in refused("--output_dir", tmp_path / "no", paths[2], paths[1])
    assert not (tmp_path / "no").exists()
