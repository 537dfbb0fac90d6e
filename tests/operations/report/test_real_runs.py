"""Pages of real runs: one that was killed, went on and failed, and one whose rank was killed."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.runs import DEEPY, ROOT, environment
from tests.operations.report.pages import figures, points, table, titles
from tests.training.runs import ADAMW, LLAMA, config

TROUBLE = """
import os, signal, time
from pathlib import Path
from megatron.callbacks import Callback

class Trouble(Callback):
    def on_step_start(self, run, batches):
        if run.iteration + 1 == 3:  # its gradients
            linear = [m for name, m in run.engine.stage.named_modules() if name.endswith("mlp.linear1")][-1]
            spoil = lambda module, given, out: out.register_hook(lambda gradient: gradient * float("nan")) and None
            self.hooks = [linear.register_forward_hook(spoil)]
        elif getattr(self, "hooks", None):
            self.hooks.pop().remove()

    def on_step_end(self, run, step):
        if step.iteration == 7 and not Path("killed").exists():
            while not Path("run/latest").exists():  # the save of step 5 goes on beside the steps
                time.sleep(0.01)
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step.iteration == 9 and not Path("raised").exists():
            Path("raised").touch()
            raise RuntimeError("no more <of> this")
"""


def write(folder: Path, trouble: str, **keys: Any) -> None:
    (folder / "trouble.py").write_text(trouble)
    values = config(LLAMA, ADAMW, num_layers=1, save="run", report=True, callbacks=["trouble.py:Trouble"], **keys)
    (folder / "model.yml").write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*DEEPY, str(ROOT / "train.py"), "model.yml"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that skipped step 3, was killed in step 7, went on from step 5, and failed in step 9."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "prompts.txt").write_text("Once <b>upon</b>\n")
    write(folder, TROUBLE, train_iters=12, eval_interval=5, eval_iters=1, checkpoint_factor=5, load="run", num_gpus=1,
          on_nonfinite="skip", max_restarts=1, demo_prompts="prompts.txt", maximum_tokens=4,
          peak_theoretical_tflops=1.0, split="80,10,10")  # fmt: skip
    done = train(folder)
    assert done.returncode == 1 and "RuntimeError: no more <of> this" in done.stdout + done.stderr, done.stderr
    return folder


@pytest.mark.product
def test_a_run_that_failed_has_written_its_page(failed: Path) -> None:
    page = failed / "run" / "report.html"
    assert ", ".join(titles(page)) == "Loss, Learning rate, Gradient norm, Tokens per second, Utilisation, Perplexity"
    plots = figures(page)
    assert all(len(curve["x"]) > 0 for figure in plots for curve in points(figure))
    training, validation = points(plots[0])[0], points(plots[0])[-1]
    assert training["x"].tolist() == [1, 2, 4, 5, 6, 7, 8], "of all starts, but for what was no number"
    assert validation["x"].tolist() == [0, 5]
    events = [(row[0], row[1], row[2]) for row in table(page, "events")]
    assert ("0", "start", "first start") in events
    assert ("3", "skipped", "a step was skipped: loss or gradients not finite") in events
    assert ("5", "restart", "restart 1 of deepy.py, continues after the logged iteration 5") in events
    assert any(event[:2] == ("5", "save") and event[2].startswith("global_step5, validation loss") for event in events)
    assert any(event[1] == "stop" and event[2] == "failed: RuntimeError: no more <of> this" for event in events)
    text = page.read_text()
    assert "model.yml:" in text and "max_restarts" in text and "Once &lt;b&gt;upon&lt;/b&gt;" in text
    assert "idx sha256" in text and "(not asked)" in text and "27,8" not in text
    assert "could not be used" not in text, "whatever our own files say is of its kind"


@pytest.mark.product
def test_a_resumed_run_rewrites_it_at_its_end(failed: Path) -> None:
    done = train(failed)
    assert done.returncode == 0, done.stderr
    page = failed / "run" / "report.html"
    assert f"report: {page}" in done.stdout + done.stderr
    events = [(row[0], row[1], row[2]) for row in table(page, "events")]
    assert ("12", "stop", "finished") in events and ("10", "save") in [event[:2] for event in events]
    # The restart in between is gone with its rows: it had gone on from the same save.
    starts = [event for event in events if event[1] == "restart"]
    assert starts == [("5", "restart", "started again, continues after the logged iteration 5")]
    assert "(not asked)" not in page.read_text(), "answered before and after"
    assert "could not be used" not in page.read_text()


@pytest.mark.product
@pytest.mark.ends_processes
def test_a_run_whose_rank_1_is_killed_has_its_page(tmp_path: Path) -> None:
    trouble = (
        "import os\nfrom megatron.callbacks import Callback\n\n\nclass Trouble(Callback):\n"
        "    def on_step_end(self, run, step):\n"
        "        if step.iteration == 4 and os.environ['RANK'] == '1':\n            os.kill(os.getpid(), 9)\n"
    )
    write(tmp_path, trouble, train_iters=4000, checkpoint_factor=5000, num_gpus=2, train_batch_size=4)
    done = train(tmp_path)
    assert done.returncode == 137, done.stderr
    page = tmp_path / "run" / "report.html"
    assert done.stderr.endswith(f"report: {page}\n")
    assert points(figures(page)[0])[0]["x"].tolist()[:2] == [1, 2]
    assert [row[1] for row in table(page, "events")][-1] == "stop"
