"""The choice of the NCCL to preload: a table of versions, and how they are found."""

import sys
from pathlib import Path

import pytest

from megatron.launch.environment import LaunchError
from megatron.launch.nccl import Nccl, choose, main, own_nccl, preloaded, read_version, site_nccl

TORCH_NCCL, SITE = "/venv/nvidia/nccl/lib/libnccl.so.2", "/opt/nccl/libnccl.so.2"


def library(path: Path, version: str) -> str:
    """Writes a stand-in for libnccl: its version string stands somewhere in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF" + bytes(5000) + b"NCCL version " + version.encode() + b"+cuda12.6\0" + bytes(100))
    return str(path)


@pytest.mark.parametrize(("torch_nccl", "site", "preload", "message"), [
    # torch, the machine's module, what is preloaded
    (None, None, None, "built without CUDA"),
    (None, (2, 28, 9), None, "built without CUDA"),
    ((2, 28, 9), None, TORCH_NCCL, f"2.28.9, torch's own ({TORCH_NCCL})"),
    ((2, 28, 9), (2, 26, 6), TORCH_NCCL, "2.26.6 of this machine (/opt/nccl/libnccl.so.2) is older"),  # ncclCommShrink
    ((2, 28, 9), (2, 28, 8), TORCH_NCCL, "is not used"),
    ((2, 28, 9), (2, 9, 9), TORCH_NCCL, "is not used"),  # numbers, not letters
    ((2, 28, 9), (2, 28, 9), SITE, f"2.28.9, this machine's ({SITE})"),
    ((2, 28, 9), (2, 29, 0), SITE, "torch was built with 2.28.9"),
    ((2, 21, 5), (2, 26, 6), SITE, "2.26.6, this machine's"),  # torch 2.5 and the fork
    ((2, 28, 9), "unknown", TORCH_NCCL, "cannot be compared and is not used"),
    ("unknown", (2, 29, 0), TORCH_NCCL, "cannot be compared and is not used"),
])  # fmt: skip
def test_the_choice(torch_nccl, site, preload, message):
    versions = {"unknown": None}  # a file whose version cannot be read
    libraries = [
        version and Nccl(versions.get(version, version), file)
        for version, file in ((torch_nccl, TORCH_NCCL), (site, SITE))
    ]
    choice = choose(*libraries)
    assert (choice.preload, message in choice.description) == (preload, True), choice
    assert "error" not in choice.description  # people look for that word in the logs of jobs


def test_where_nccl_is_looked_for(tmp_path):
    assert choose(Nccl((2, 28, 9)), Nccl((2, 26, 6), SITE)).preload is None
    assert choose(Nccl((2, 28, 9)), None).description == "2.28.9, torch's own (within its libraries)"
    assert choose(Nccl((2, 28, 9)), Nccl((2, 29, 2), SITE)).preload == SITE
    named_library, first_library, second_library = (
        library(tmp_path / name / "libnccl.so.2", f"2.2{i}.0") for i, name in enumerate("abc")
    )
    path = f"/nowhere::{tmp_path}:{Path(second_library).parent}"
    assert site_nccl({}) is None and site_nccl({"LD_LIBRARY_PATH": "/nowhere"}) is None
    assert site_nccl({"LD_LIBRARY_PATH": path}) == Nccl((2, 22, 0), second_library)
    assert site_nccl({"LD_LIBRARY_PATH": path, "LD_PRELOAD": f"/x.so {first_library}"}) == Nccl(
        (2, 21, 0), first_library
    )
    assert site_nccl({"LD_LIBRARY_PATH": path, "LD_PRELOAD": first_library, "NCCL_LIBRARY": named_library}) == Nccl(
        (2, 20, 0), named_library
    )
    with pytest.raises(LaunchError, match="NCCL_LIBRARY=/gone/libnccl.so.2 is not a file"):
        site_nccl({"NCCL_LIBRARY": "/gone/libnccl.so.2"})
    assert preloaded({"LD_PRELOAD": "/a.so:/b/libnccl.so  /c.so"}) == (["/b/libnccl.so"], ["/a.so", "/c.so"])
    (tmp_path / "empty").touch()
    assert read_version(tmp_path / "empty") is None and read_version(tmp_path / "none") is None


def fake_torch(folder: Path, version: str | None) -> str:
    """A torch of which only the files are looked at: importing it would fail."""
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise ImportError('undefined symbol: ncclCommShrink')\n")
    if version is None:
        return ""
    (folder / "torch/lib/libtorch_cuda.so").touch()
    return library(folder / "nvidia/nccl/lib/libnccl.so.2", version)


@pytest.mark.parametrize("version", ["2.28.9", None], ids=["CUDA", "no CUDA"])
def test_torch_s_own_is_found_without_importing_torch(tmp_path, monkeypatch, version):
    file = fake_torch(tmp_path / "site", version)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert own_nccl() == (Nccl((2, 28, 9), file) if version else None)


def test_the_command_takes_an_older_one_out_of_ld_preload(tmp_path, monkeypatch, capsys):
    new, old = fake_torch(tmp_path / "site", "2.28.9"), library(tmp_path / "old" / "libnccl.so.2", "2.26.6")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("os.environ", {"LD_PRELOAD": f"/kept.so:{old}", "LD_LIBRARY_PATH": f"{tmp_path}/old"})
    assert main() == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"export NCCL_LIBRARY={new}", f"export LD_PRELOAD={new}:/kept.so"]
    assert all(fact in err for fact in (f"2.28.9, torch's own ({new})", f"2.26.6 of this machine ({old})", "not used"))
