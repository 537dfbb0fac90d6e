"""`deepy.py doctor`: each trouble it is for is made here, and found."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.launch.devices import free_port
from megatron.launch.doctor import main
from megatron.launch.doctor.check import Check, table, verdict
from megatron.launch.doctor.devices import Gpu, ability_check, driver_check, gpu_checks
from megatron.launch.doctor.network import peer_check, port_check, split_address
from megatron.launch.doctor.software import Torch, compiled_checks, deepspeed_check, python_check, torch_check
from megatron.launch.doctor.storage import GIB, MIB, disk_check, open_files_check, shared_memory_check
from megatron.launch.doctor.transport import Network, interface_checks, nccl_check, transport_check
from megatron.launch.environment import LaunchError
from megatron.launch.nccl import Nccl
from tests.launch.runs import DEEPY, ROOT, environment, taken_port
from tests.launch.test_nccl import library

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def listening():
    with taken_port() as port:
        yield port


def doctor(folder: Path, *words: str, prefix: Sequence[str] = (), path: str) -> dict[str, str]:
    """Returns the failed checks of the typed command, with a folder of packages first on the path."""
    line = [*DEEPY, "doctor", "--save", str(folder), *words, "--json"]
    env = environment(PYTHONPATH=f"{path}:{ROOT}")
    done = subprocess.run([*prefix, *line], cwd=ROOT, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["state"] == "failed"
    return {check["name"]: check["found"] for check in report["checks"] if check["state"] == "failed"}


def test_a_taken_port_a_full_disk_and_a_bad_deepspeed_are_found_by_the_command(tmp_path, listening):
    """In a process of its own, whose disk is a file system of 16 KiB (where one may be mounted)."""
    bad = tmp_path / "packages/deepspeed-0.16.4.dist-info"
    bad.mkdir(parents=True)
    (bad / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.4\n")
    save = tmp_path / "save"
    save.mkdir()
    full_disk = [*NAMESPACE, "sh", "-c", f'mount -t tmpfs -o size=16k none {save} && exec "$@"', "sh"]
    mount = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    full = shutil.which("unshare") and subprocess.run(mount, capture_output=True).returncode == 0
    failed = doctor(save, "--port", str(listening), prefix=full_disk if full else [], path=f"{tmp_path}/packages")
    assert "0.16.4" in failed.pop("deepspeed") and "taken" in failed.pop(f"port {listening}")
    if full:
        assert "16.0 KiB free" in failed.pop("save")
    assert not failed


def test_a_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    failed = doctor(tmp_path, "--port", str(free_port()), path=str(tmp_path))
    assert failed.keys() == {"torch"} and "OSError: libcudart.so.13" in failed["torch"]


@pytest.mark.parametrize(("name", "file", "text", "facts"), [
    ("flash-attn", "flash_attn.py", "raise ImportError('undefined symbol: _ZN3c10')", ["symbol: _ZN3c10"]),
    pytest.param("apex", "apex/__init__.py", "", ["apex", "NVIDIA"], marks=pytest.mark.more),
])  # fmt: skip
def test_a_compiled_package_that_does_not_load_or_is_another(monkeypatch, tmp_path, name, file, text, facts):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = compiled_checks({name: "2.8.3"}.get)
    assert check.state == "failed" and all(fact in check.found for fact in facts)


def test_the_words_that_take_the_place_of_verify_setup(capsys, monkeypatch, listening, tmp_path):
    """Rows 48 and 53 of the commands, on a machine that shows no GPUs."""
    monkeypatch.setattr("megatron.launch.doctor.command.visible_gpus", lambda env: [])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    words = ["--gpus", "2,3", "--port", str(free_port()), "--peer", f"127.0.0.1:{listening}", "--model", str(tmp_path)]
    assert main([*words, "--peer", f"127.0.0.1:{free_port()}", "--json"], lambda args: None) == 1
    states = [(check["name"], check["state"]) for check in json.loads(capsys.readouterr().out)["checks"]]
    assert {("gpu 2", "failed"), ("gpu 3", "failed"), (f"peer 127.0.0.1:{listening}", "ok")} <= set(states)
    assert (f"model {tmp_path}", "ok") in states
    failed = [name.partition(":")[0] for name, state in states if state == "failed"]
    assert failed == ["gpu 2", "gpu 3", "peer 127.0.0.1"]


def test_the_site_says_where_checkpoints_go(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("NEOX_CHECKPOINT_DIR", raising=False)
    monkeypatch.setenv("PROJECTDIR", str(tmp_path))
    monkeypatch.setenv("NEOX_SITE", "isambard")
    assert main(["--port", str(free_port())], lambda args: None) == 0
    assert f"{tmp_path}/public/checkpoints/sf_model_organisms: " in capsys.readouterr().out
    monkeypatch.setenv("NEOX_SITE", "mars")
    assert main(["--port", str(free_port())], lambda args: None) == 1
    assert re.search(r"^site +failed +NEOX_SITE=mars: there is no ", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(LaunchError, match="MASTER_PORT='abc'"):
        main([], lambda args: None)


def test_table_and_verdict():
    checks = [Check("a", "ok", "fine"), Check("longer", "warning", "so", "do this"), Check("b", "failed", "no")]
    rows = ("a       ok       fine", "longer  warning  so", "                 do this", "b       failed   no")
    assert table(checks).splitlines() == [*rows, "", "1 ok, 1 warning, 1 failed"]
    assert [verdict(checks), verdict(checks[:2]), verdict(checks[:1])] == ["failed", "warning", "ok"]
    assert "\033[31mfailed \033[0m" in table(checks, colours=True)


@pytest.mark.parametrize(("version", "state", "message"), [
    ("0.19.8", "ok", "0.19.8"),
    ("0.19.2", "failed", "gradients"),
    ("0.18.5", "failed", "ZeRO-1 with bf16"),
    ("0.15.4", "failed", "older"),
    ("0.20.0", "warning", "not tested"),
    (None, "ok", "not installed"),
])  # fmt: skip
def test_deepspeed(version, state, message):
    check = deepspeed_check(version)
    assert (check.state, message in check.found) == (state, True)
    assert state == "ok" or check.advice == "pip install deepspeed==0.19.8"


def test_python_torch_and_interfaces():
    assert python_check((3, 10, 1), "/p").state == "failed" and python_check((3, 13, 0), "/p").state == "ok"
    assert torch_check(Torch("2.13.0+cu130", "13.0")).found == "2.13.0+cu130, for CUDA 13.0"
    assert torch_check(Torch("2.9.1")).state == "failed"
    assert "libcudart" in torch_check(Torch("2.13.0", problem="OSError: libcudart.so.13")).found
    assert torch_check(Torch(None)).found == "not installed"
    interfaces = ("lo", "hsn0", "hsn1")
    assert not interface_checks({"NCCL_SOCKET_IFNAME": "hsn", "GLOO_SOCKET_IFNAME": "hsn0"}, interfaces)
    assert not interface_checks({"NCCL_SOCKET_IFNAME": "^lo"}, interfaces)
    wrong = interface_checks({"NCCL_SOCKET_IFNAME": "=hsn", "GLOO_SOCKET_IFNAME": "hsn"}, interfaces)
    assert [check.name for check in wrong] == ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
    assert "lo, hsn0, hsn1" in wrong[0].found


def test_ports_and_peers(listening):
    assert port_check(free_port()).state == "ok"
    assert f"is taken by process {os.getpid()} (" in port_check(listening).found
    assert "127.0.0.1 answers" in peer_check(f"localhost:{listening}", 1).found
    assert "refuses" in peer_check(f"127.0.0.1:{free_port()}", 1).found
    assert "no address" in peer_check("no-such-machine.invalid", 1).found
    with socket.socket() as busy, socket.socket() as first_client, socket.socket() as second_client:
        busy.bind(("127.0.0.1", 0))
        busy.listen(0)
        for client in (first_client, second_client):  # fill the queue: what comes next gets no answer
            client.setblocking(False)
            client.connect_ex(busy.getsockname())
        silent = peer_check("127.0.0.1", busy.getsockname()[1], timeout_s=0.3)
    assert silent.state == "failed" and "0.3 s" in silent.found


def test_addresses():
    addresses = [split_address(text, 2) for text in ("a:1", "a", "[fe80::1]:1", "fe80::1")]
    assert addresses == [("a", 1), ("a", 2), ("fe80::1", 1), ("fe80::1", 2)]
    with pytest.raises(ValueError, match="is not a port"):
        split_address("a:b", 2)


OFI = {"libnccl-net.so": "/opt/ofi/libnccl-net.so"}
LIBFABRIC = {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "cxi"}


@pytest.mark.parametrize(("env", "network", "state", "message"), [
    ({}, Network(("lo", "eth0")), "warning", "TCP over eth0"),
    (LIBFABRIC, Network(slingshot=("cxi0",), libraries=OFI), "ok", "/opt/ofi/libnccl-net.so (NCCL_NET="),
    (LIBFABRIC, Network(slingshot=("cxi0",)), "failed", "NCCL_NET=AWS Libfabric"),
    ({}, Network(("hsn0",), slingshot=("cxi0",)), "failed", "(cxi0)"),
    ({"FI_PROVIDER": "tcp"}, Network(libraries=OFI), "warning", "over tcp"),
    ({}, Network(infiniband=("mlx5_0",)), "ok", "mlx5_0"),
    ({"NCCL_IB_DISABLE": "1"}, Network(("eth0",), ("mlx5_0",)), "warning", "mlx5_0"),
    ({"NCCL_NET": "Socket"}, Network(("eth0",), slingshot=("cxi0",), libraries=OFI), "warning", "NCCL_NET=Socket"),
    ({"NCCL_NET_PLUGIN": "spcx"}, Network(), "failed", "NCCL_NET_PLUGIN=spcx"),
])  # fmt: skip
def test_transport(env, network, state, message):
    check = transport_check(env, network, several=True)
    assert (check.state, message in check.found) == (state, True), check


def test_nccl_library(tmp_path):
    """The choice itself has a table of its own: test_nccl.py."""
    torch_nccl = Nccl((2, 28, 9), "/venv/libnccl.so.2")
    old, new = (library(tmp_path / version / "libnccl.so.2", version) for version in ("2.26.6", "2.29.2"))
    missing_library = nccl_check(torch_nccl, {"NCCL_LIBRARY": "/gone"}, ())
    assert (
        missing_library.state == "failed"
        and "NCCL_LIBRARY=/gone" in missing_library.found
        and "module" in missing_library.advice
    )
    assert "built without CUDA" in nccl_check(None, {"NCCL_LIBRARY": old}, ()).found
    assert nccl_check(torch_nccl, {}, ()).found == "2.28.9, torch's own (/venv/libnccl.so.2)"
    # A module has put it there, and torch did not take it; then: torch did, or could not even be imported.
    check = nccl_check(torch_nccl, {"LD_LIBRARY_PATH": str(Path(old).parent)}, ["/venv/libnccl.so.2"])
    assert check.state == "ok" and re.search("2.26.6 .*not used", check.found)
    check = nccl_check(torch_nccl, {"LD_PRELOAD": old}, [old])
    assert (check.state, check.advice) == ("failed", "LD_PRELOAD=/venv/libnccl.so.2 python deepy.py ...")
    assert re.match(rf"2.26.6 \({old}\) .*2.28.9", check.found)
    check = nccl_check(torch_nccl, {"NCCL_LIBRARY": new}, ["/venv/libnccl.so.2"])
    assert (check.state, check.advice) == ("warning", f"LD_PRELOAD={new} python deepy.py ...")
    assert nccl_check(torch_nccl, {"NCCL_LIBRARY": new}, [new]).state == "ok"


def gpu(name: str, model: str = "H100", free: int = 80, problem: str = "", capability=(9, 0)) -> Gpu:
    return Gpu(name, model, 80 * GIB, free * GIB, capability, problem)


def test_gpus_and_their_driver():
    (fine,) = gpu_checks([gpu("0")])
    assert (fine.state, fine.found) == ("ok", "H100, 80.0 GiB, 80.0 free")
    assert [check.name for check in gpu_checks([gpu("0"), gpu("2")], ["2", "3"])] == ["gpu 3", "gpu 2"]
    assert gpu_checks([gpu("0")], ["3"])[0].state == "failed"
    assert re.search("50.0 GiB .*nvidia-smi", gpu_checks([gpu("0", free=30)])[0].advice)
    assert "system not yet initialized" in gpu_checks([gpu("0", problem="system not yet initialized")])[0].found
    assert "A100, H100" in gpu_checks([gpu("0"), gpu("1", "A100")])[-1].found
    torch = Torch("2.13.0", "13.0", "9.13.0")
    assert ability_check([], torch) is None
    ability = ability_check([gpu("0"), gpu("1", capability=(8, 0))], torch).found
    assert ability == "capability 8.0: bf16 yes, TF32 yes, FP8 no, FP4 no; cuDNN 9.13.0"
    assert ability_check([gpu("0", capability=(7, 5))], torch).advice == "train with precision: fp16"
    assert driver_check(None, Torch("2.13.0+cpu"), 0).state == "ok"
    assert "CUDA 13.0" in driver_check("535.1", torch, 0).advice
    assert "without CUDA" in driver_check("535.1", Torch("2.13.0+cpu"), 0).found
    old = driver_check("565.57", torch, 0, serves=(12, 7))
    assert old.state == "failed" and re.search("12.7.*13.0", old.found)
    assert old.advice.startswith("pip install torch==2.11.0+cu126 --extra-index-url https://download.pytorch.org/whl/")
    assert driver_check("580.1", torch, 1, serves=(13, 0)).state == "ok"
    assert "12 or newer" in driver_check("470.1", torch, 0, serves=(11, 4)).advice


def space(free: int, files_left: int = 9) -> SimpleNamespace:
    return SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=free, f_files=10, f_favail=files_left)


def test_disks_and_limits(tmp_path, monkeypatch):
    def look(free: int, files_left: int = 9, folder: Path = tmp_path / "not/yet/made") -> Check:
        return disk_check("save", folder, GIB, "a checkpoint", lambda _: space(free, files_left))

    assert look(9 * GIB).state in ("ok", "warning") and "MiB/s" in look(9 * GIB).found
    assert "not for two" in look(GIB * 3 // 2).advice
    assert re.search("512 MiB free.* 1.0 GiB", look(GIB // 2).found)
    assert "no inodes" in look(9 * GIB, 0).found
    (tmp_path / "file").touch()
    assert "is a file" in look(9 * GIB, folder=tmp_path / "file").found
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "a probe was left behind, or a folder made"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert "quota" in look(9 * GIB).found
    assert shared_memory_check("/", lambda _: space(16 * MIB)).state == "failed"
    assert shared_memory_check("/", lambda _: space(64 * MIB)).state == "warning"
    assert shared_memory_check("/no such folder") is None
    assert open_files_check((1024, 4096)).advice == "ulimit -n 4096"
    assert open_files_check((65536, 65536)).state == "ok"
