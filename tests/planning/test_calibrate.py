"""A CPU measured by `deepy.py plan calibrate`, and plans on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.planning.calibrate import _Measuring, main
from megatron.planning.fake_cuda import shim
from megatron.planning.machines import Machine, machine_text, read_links, read_machine
from megatron.planning.operations import Operation

needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")


@pytest.fixture(scope="module")
def measured_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a CPU, measured in a second."""
    file = tmp_path_factory.mktemp("machine") / "mine.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.planning.calibrate._CPU_SECONDS", 0.005)
        patch.setattr("megatron.planning.calibrate._SMALL", 20)
        assert main(["--device", "cpu", "--out", str(file)]) == 0
    return file.read_text()


@pytest.fixture
def file(tmp_path: Path, measured_text: str) -> Path:
    (tmp_path / "mine.toml").write_text(measured_text)
    return tmp_path / "mine.toml"


def test_a_measured_cpu(file: Path) -> None:
    """By its file, an operation takes as long as it took."""
    gpu, reached = read_machine(file)
    assert machine_text(gpu, reached) == file.read_text()
    assert gpu.bandwidth > 0.1 and gpu.bf16 > 0 and gpu.fp32 > 0 and gpu.memory > 1
    link = read_links()["tcp"]
    machine = Machine(gpu, reached, link, link, 1)
    product = Operation("product", "", 2.0 * 512**3, 0.0, (512, 512, 512), "float32")
    assert machine.seconds(product) == pytest.approx(product.flops / gpu.fp32 / 1e12, rel=0.05)
    copied = Operation("memory", "", 0.0, 1e9)
    assert machine.seconds(copied) == pytest.approx(1 / gpu.bandwidth + reached.launch)


def test_products_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of its sheet are measured, by which products take as long as they took, in bf16 and in fp32."""
    monkeypatch.setattr("megatron.planning.calibrate._CPU_SECONDS", 0.005)
    measuring = _Measuring(torch.device("cpu"))
    measuring.gpu = measuring.gpu._replace(bf16=1.0, bandwidth=100.0)
    seconds = {torch.float32: 0.02, torch.bfloat16: 0.005}
    monkeypatch.setattr("megatron.planning.calibrate._seconds", lambda run, device: seconds[run.args[0].dtype])
    measuring.products()
    assert measuring.reached.product < 0.2
    link = read_links()["tcp"]
    machine = Machine(measuring.gpu, measuring.reached, link, link, 1)
    for dtype, expected in seconds.items():
        name = str(dtype).removeprefix("torch.")
        product = Operation("product", "", 2.0 * 512**3, 0.0, (512, 512, 512), name)
        assert machine.seconds(product) == pytest.approx(expected, rel=0.01)


@pytest.mark.more
@needs_compiler
def test_a_plan_on_it(file: Path, plan: Callable[..., tuple[int, str, str]]) -> None:
    report = json.loads(plan("--gpus", "1", "--gpu", str(file), "--json")[1])
    assert report["time"]["seconds"] > 0 and report["time"]["parts"].keys() <= {
        "products", "attention", "memory-bound", "update", "host"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("bandwidth = ", "width = ", "width"), ('link = "tcp"', 'link = "string"', "string"),
        ("launch = ", "launch = -", "launch -"), ("bandwidth = ", "bandwidth = 0.0 #", "bandwidth 0.0"),
        ("[reached]", "[reach]", "reached"), ("[gpu]", "[gpu", "line"),
    ],
)  # fmt: skip
def test_files_that_are_refused(
    old: str, new: str, fact: str, file: Path, plan: Callable[..., tuple[int, str, str]]
) -> None:
    file.write_text(file.read_text().replace(old, new, 1))
    code, out, err = plan("--gpu", str(file))
    assert code == 1 and out == "" and str(file) in err and fact in err and "calibrate" in err


def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Callable[..., tuple[int, str, str]]
) -> None:
    assert main(["--out", str(tmp_path / "mine.json")]) == 1 and ".toml" in capsys.readouterr().err
    code, _, err = plan("--gpu", "h1000")
    assert code == 1 and "h1000" in err and "h100," in err
