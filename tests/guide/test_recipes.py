"""Every recipe of docs/development.md, done in a copy of the tree, which then trains two steps."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.guide.page import PAGE, ROOT, Block, apply, copy_tree, recipes
from tests.marks import with_more

RECIPES = recipes(PAGE.read_text(encoding="utf-8"))
Fork = Callable[[Path, str], str]
START = """
import json, runpy, sys
from pathlib import Path

def tool(*words):
    sys.argv = list(words)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, words

def train(**keys):
    from megatron.neox_arguments import NeoXArgs
    from tests.training.runs import LLAMA, config
    from train import main

    small = {"num_layers": 2, "train_iters": 2, "save": "run", "checkpoint_factor": 2}
    assert main(NeoXArgs.from_dict(config(LLAMA, small, keys))) == 0
    rows = [json.loads(line) for line in Path("run/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows][-2:] == [1, 2] and Path("run/latest").read_text() == "global_step2"
    return rows
"""
# Ends the first start of a run after its checkpoint, so that the second resumes from it.
KILLER = """
import os, signal
from pathlib import Path
from megatron.callbacks import Callback

class Killer(Callback):
    def on_step_end(self, run, step):
        note = Path(f"killed_{run.args.save}")
        if step.iteration == 3 and not note.exists() and run.groups.world_rank == 0:
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
# A part of the model, a loss, a training part; CI runs a key and processes too.
ORDINARY = {"Add a mixer", "Add a preference loss", "Add a callback"}
MARKED_MORE = {"Add a config key", "Add a launcher"}
# What shows that the run had the new part, beside having trained.
TRAIN = "rows = train(**KEYS)\n"
CHECKS = {
    "Add a config key": TRAIN + 'assert "run_note: a first try" in LOG()\n',
    "Add an activation": TRAIN
    + """
import torch
from megatron.model.mlp import ACTIVATIONS
x = torch.linspace(-3, 3, 7)
assert ACTIVATIONS["quick_gelu"](x).allclose(x / (1 + (-1.702 * x).exp()))
assert "activation ...................... quick_gelu" in LOG()
""",
    "Add an attention backend": TRAIN
    + """
import tests.model.test_backends
from megatron.model.attention.backend_choice import _backends
assert [b.name for b in _backends()][-1] == "einsum"
""",
    "Add a mixer": TRAIN
    + """
from megatron.checkpointing import load_tensors
layer = load_tensors(Path("run/global_step2/layer_03-model_00-model_states.pt"))
assert "attention.values.weight" in layer and "attention.query_key_value.weight" not in layer, layer.keys()
""",
    "Add a loss": TRAIN
    + """
import torch
from megatron.methods.language_modelling.declaration import LOSSES
assert LOSSES["focal"].load_function()(torch.tensor(0.5).log()).isclose(torch.tensor(0.5).log() * -0.25)
""",
    "Add a kind of training": TRAIN
    + """
import os, signal, subprocess
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.training.runs import LLAMA, config
assert rows[-1]["train/late_tokens"] == 2 * rows[-2]["train/late_tokens"] > 0, rows[-1]
conflicts = {"z_loss": {"z_loss": 1e-3}, "ga_dataset": {"ga_dataset": "b", "ga_mode": "interleaved"}}
for key, conflict in conflicts.items():
    try:
        NeoXArgs.from_dict(config(LLAMA, KEYS, conflict))
    except ConfigError as problem:
        assert key in str(problem) and ("late_weight" in str(problem) or "late_tokens" in str(problem)), problem
    else:
        raise AssertionError("it is accepted")
Path("killer.py").write_text(KILLER)
LAYOUTS = {
    "one": {}, "tp2": {"model_parallel_size": 2}, "pp2": {"pipe_parallel_size": 2, "engine": "deepspeed"},
    "zero3": {"zero_optimization": {"stage": 3}, "engine": "native"},
}
losses = {}
for name, layout in LAYOUTS.items():
    values = config(LLAMA, KEYS, layout, num_layers=2, train_iters=4, checkpoint_factor=2, save=name, load=name,
                    num_gpus=1 if name == "one" else 2, callbacks=["killer.py:Killer"])
    Path("keys.json").write_text(json.dumps(values))
    command = [sys.executable, "deepy.py", "train.py", "keys.json"]
    codes = [subprocess.run(command, capture_output=True).returncode for _ in range(2)]
    assert codes[0] != 0 and codes[1] == 0, (name, codes)
    rows = [json.loads(line) for line in Path(f"{name}/logs/metrics.jsonl").read_text().splitlines()]
    rows = {row["iteration"]: row for row in rows if "train/lm_loss" in row}
    losses[name] = [(rows[i]["train/lm_loss"], rows[i]["train/late_nll"]) for i in range(1, 5)]
    counts = [rows[i]["train/late_tokens"] for i in range(1, 5)]
    assert counts == [i * counts[0] for i in range(1, 5)], counts
for name in LAYOUTS:
    for (loss, late), (expected, expected_late) in zip(losses[name], losses["one"]):
        assert abs(loss - expected) < 2e-5 * expected and abs(late - expected_late) < 2e-5 * expected_late, losses
""",
    "Add a preference loss": """
from tests.methods.preferences.test_pairs_train import pairs
from tests.training import runs
for key in ("data_path", "split", "eod_mask_loss"):
    del runs.BASE[key]
rows = train(**KEYS, **pairs(Path(".")), pack_impl="best_fit", train_batch_size=4)
assert 0.9 < rows[-1]["train/lm_loss"] < 1.1, rows
""",
    "Add a model family": """
from tests.checkpointing import family_models, test_family_parity as parity
parity.CASES = family_models.CASES = {"jais": family_models.CASES["jais"]}
parity.assert_within_bound("HF -> ours", [parity.imported("jais")], [(1, 1)])
parity.assert_within_bound("ours -> HF", [parity.exported("jais", Path("exported"))], [(1, 1)])
family_models.random_model("jais", vocab_size=384).save_pretrained("jais")
keys, _ = parity.from_hf(json.loads(Path("jais/config.json").read_text()), lambda name: None)
del keys["padded_vocab_size"]
rows = train(**keys, load="jais")
""",
    "Add a dataset format": TRAIN,
    "Add an optimizer": TRAIN
    + """
from megatron.checkpointing import load_tensors
state = load_tensors(Path("run/global_step2/optim_layer_02-model_00.pt"))
assert "exp_avg_sq" in str(state)
""",
    "Add a schedule": """
rows = train(**KEYS, train_iters=2, lr_decay_iters=2)
rates = [row["train/learning_rate"] for row in rows[-2:]]
assert abs(rates[1] / rates[0] - (2 / 3) ** 0.5) < 1e-9, rates
""",
    "Add an lm-eval task": TRAIN + 'assert "eval_tasks/shipped_opposites_acc" in rows[-1], rows[-1]\n',
    "Add a callback": TRAIN + 'assert rows[-1]["validation/waited"] == 0, rows\n',
    "Add an engine": TRAIN + 'assert "engine: bare torch" in LOG()\n',
    "Add a launcher": """
import os, subprocess
os.mkdir("bin")
Path("bin/clush").write_text('#!/bin/sh\\nexec sh -c "$(echo "$4" | sed s/%rank/0/)"\\n')
os.chmod("bin/clush", 0o755)
Path("hosts").write_text("localhost slots=1\\n")
from tests.training.runs import LLAMA, config
keys = config(LLAMA, num_layers=2, train_iters=2, save="run", checkpoint_factor=2, no_ssh_check=True)
Path("a.json").write_text(json.dumps({**keys, "force_multi": True, "hostfile": "hosts", "launcher": "clush"}))
env = {**os.environ, "PATH": "bin:" + os.environ["PATH"]}
done = subprocess.run([sys.executable, "deepy.py", "train.py", "a.json"], env=env, capture_output=True, text=True)
assert done.returncode == 0, done.stdout + done.stderr
assert Path("run/latest").read_text() == "global_step2" and Path("run/logs/rank_0.log").exists()
""",
}


@pytest.fixture(scope="module")
def fork() -> Iterator[Fork]:
    """Runs code in a copy of the tree, in a process that finds the copy's packages."""
    command = [sys.executable, "-P", str(ROOT / "tests" / "guide" / "zygote.py")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
    reader: Any = server.stdout
    writer: Any = server.stdin

    def run(folder: Path, code: str) -> str:
        log = folder / "recipe.log"
        writer.write(json.dumps({"folder": str(folder), "code": code, "log": str(log)}) + "\n")
        writer.flush()
        status = int(reader.readline())
        assert status == 0, log.read_text()
        return log.read_text()

    yield run
    writer.close()
    server.wait()
    reader.close()


def commands(blocks: list[Block]) -> list[list[str]]:
    """The Python programs of the `console` blocks, as words."""
    lines = [line for block in blocks if block.language == "console" for line in block.text.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("python ")]


@pytest.mark.parametrize("title", with_more(RECIPES, *MARKED_MORE, product=set(RECIPES) - ORDINARY - MARKED_MORE))
def test_recipe(title: str, fork: Fork, tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for block in RECIPES[title]:
        apply(block, tmp_path)
    changed = [block.path for block in RECIPES[title] if block.path.endswith(".py")]
    lint = [sys.executable, "-m", "ruff", "check", "--no-cache", *changed]
    done = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True) if changed else None
    assert done is None or done.returncode == 0, done.stdout
    texts = [block.text for block in RECIPES[title] if block.language == "yaml" and not block.path]
    keys = {key: value for text in texts for key, value in yaml.safe_load(text).items()}
    code = f"{START}KEYS = {keys!r}\nLOG = lambda: Path('recipe.log').read_text()\n"
    code += f"KILLER = {KILLER!r}\n"
    code += "".join(f"tool(*{words!r})\n" for words in commands(RECIPES[title]))
    fork(tmp_path, code + CHECKS[title])
    if commands(RECIPES[title]):
        page = (tmp_path / "docs" / "configuration.md").read_text()
        assert page != (ROOT / "docs" / "configuration.md").read_text(), "the generated page has nothing new"


def test_every_recipe_is_here() -> None:
    assert RECIPES.keys() == CHECKS.keys()
