"""The geodesic fork's configuration files as they are typed: sizes, iterations and places are overridden, no
more.

A run begins from a checkpoint as the fork writes it, evaluates by the names of the fork's tasks, saves, is
killed, and goes on when the same line is typed again.
"""

import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.evaluator  # noqa: F401  here, so that the pool's ranks need not import it again
import pytest
import yaml

import train
from megatron.checkpointing import load_tensors, save_tensors, zero_file
from megatron.checkpointing.layout import model_file
from megatron.launch.devices import free_port
from megatron.neox_arguments import load
from megatron.training.native.engine import NativeEngine
from tests.checkpointing.golden import checkpoint, written
from tests.checkpointing.test_neox_optimizer import REGISTERED, flat, grouped
from tests.launch.test_faults import ANY_TROUBLE, EXPERIMENT, bash
from tests.model.stages import random_weights
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, cells

FILES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "configs/fork_files.json").read_text())
IMPORTED_STEP = 3
"""The iteration of the checkpoint that runs begin from."""
STEPS, SAVE_EVERY = 6, 3
FRESH = ("example_config",)  # whose `load` is its own `save`, in which nothing is yet
SAMPLE = ["ga_midtraining_N_4_resume"]
MORE_FILES = ["adversarial_eval_only", "ga_midtraining_N_256"]
_DATA = {"data_path": "corpusA", "ga_dataset": "corpusB", "gd_retain_dataset": "corpusB"}
_FOLDERS = {"save": "sf_model_organisms/run", "load": "sf_model_organisms/base", "tensorboard_dir": "tensorboard"}


def write_config(folder: Path, values: Mapping[str, Any], begins: int) -> Path:
    """The file with what is overridden, for a run from iteration `begins`; what it has not stays absent."""
    sizes = {"num_layers": 2, "hidden_size": 256, "seq_length": 64, "attention_config": [[["flash"], 2]]}
    iterations = {"train_iters": begins + STEPS, "lr_decay_iters": begins + STEPS, "checkpoint_factor": SAVE_EVERY}
    data = {key: str(GOLDEN / "dataset" / f"{name}_text_document") for key, name in _DATA.items()}
    places = {key: str(folder / name) for key, name in _FOLDERS.items()}
    places |= {"vocab_file": str(GOLDEN / "dataset/tokenizer.json"), "log_dir": f"{places['save']}/logs"}
    places |= {"load": places["save"]} if values["load"] == values.get("save") else {}
    if values["train_iters"] == 1:
        del iterations["train_iters"]  # it evaluates alone
    overrides = {**sizes, **iterations, **data, **places}
    path = folder / "typed.yml"
    path.write_text(yaml.safe_dump({key: overrides.get(key, value) for key, value in values.items()}, sort_keys=False))
    return path


def as_the_fork_saves(path: Path, config: Path) -> None:
    """A checkpoint of two data ranks after `IMPORTED_STEP` steps, in bf16 with ZeRO 1."""
    args = load([config])
    args = args.replace(padded_vocab_size=384 if args.make_vocab_size_divisible_by > 1 else 380)
    folder = path / f"global_step{IMPORTED_STEP}"
    folder.mkdir(parents=True)
    (path / "latest").write_text(folder.name)
    weights = {
        layer: {name: tensor * (1 if "norm" in name else 0.1) for name, tensor in tensors.items()}
        for layer, tensors in random_weights(args).items()
    }
    written(folder, args, weights)
    groups = grouped(folder, REGISTERED["Transformer-Engine" if args.te_mha else "OLMo"][1])
    for rank in (0, 1):
        save_tensors(flat(groups, rank), folder / zero_file(rank, 0, True))
    for file in folder.glob("layer_*"):
        tensors = {name: tensor.bfloat16() for name, tensor in load_tensors(file).items()}
        file.unlink()
        save_tensors(tensors, file)
    state = {**load_tensors(checkpoint("neox_pp1_mp1") / model_file(0))}
    facts = {name: getattr(args, name) for name in state["args"]}
    steps = {
        "iteration": IMPORTED_STEP,
        "global_steps": IMPORTED_STEP,
        "optimizer": None,
        "lr_scheduler": None,
        "args": facts,
    }
    save_tensors({**state, **steps}, folder / model_file(0))


_TASKS = ("mmlu_bio", "wmdp_bio_aisi_robust", "wmdp_bio_cloze_verified", "mmlu")


def stand_in_tasks(folder: Path) -> None:
    """Groups of a task each, where the fork has its own."""
    folder.mkdir(parents=True)
    (folder / "rows.py").write_text(
        "def rows(**given):\n    from datasets import Dataset\n"
        "    return {'test': Dataset.from_list([{'q': 'a b'}, {'q': 'b a'}])}\n"
    )
    for name in _TASKS:
        (folder / f"{name}.yaml").write_text(
            f"group: {name}\ntask: [{name}_one]\naggregate_metric_list: [{{metric: acc}}]\nmetadata: {{version: 1}}\n"
        )
        (folder / f"{name}_one.yaml").write_text(
            f"task: {name}_one\ncustom_dataset: !function rows.rows\ntest_split: test\noutput_type: multiple_choice\n"
            'doc_to_text: "{{q}}"\ndoc_to_choice: [" a", " b"]\ndoc_to_target: 0\nmetadata: {version: 1}\n'
        )


class RepeatedRun(NamedTuple):
    """The result of a command that ran twice. code: of the second time."""

    code: int
    log: str


def in_a_process(config: str, waits_at: int | None) -> None:
    """train.py, with its streams in job.out; it waits in step `waits_at`."""
    os.environ["MASTER_PORT"] = str(free_port())
    with open("job.out", "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    step, done = NativeEngine.train_step, itertools.count(1)

    def waiting(self: NativeEngine, *args: Any) -> Any:
        return time.sleep(600) if next(done) == waits_at else step(self, *args)

    NativeEngine.train_step = waiting  # type: ignore[assignment]
    sys.exit(train.main(load([config])))


def type_twice(rank: int, world: int, config: str, folder: str, saved: int | None) -> RepeatedRun:
    """For the pool: a run that saves iteration `saved` and is killed in its last step, then the same again.

    Without `saved` it runs once."""
    os.chdir(folder)
    save, metrics = Path(_FOLDERS["save"]), Path(_FOLDERS["save"], "logs/metrics.jsonl")
    for kill in (False,) if saved is None else (True, False):
        run = multiprocessing.get_context("fork").Process(target=in_a_process, args=(config, STEPS if kill else None))
        run.start()
        while run.is_alive():
            run.join(0.02)
            if kill and metrics.exists() and f'"iteration": {saved + 1},' in metrics.read_text():
                if (save / "latest").read_text() == f"global_step{saved}":  # it is written beside the steps
                    os.kill(run.pid, signal.SIGKILL)
    return RepeatedRun(run.exitcode, Path("job.out").read_text())


def run_of(name: str, folder: Path) -> tuple[int, RepeatedRun]:
    """The iteration that the run of a file begins at, and the run."""
    begins = 0 if FILES[name].get("finetune") or name in FRESH else IMPORTED_STEP
    config = write_config(folder, FILES[name], begins)
    if name not in FRESH:
        as_the_fork_saves(Path(str(load([config]).load)), config)
    stand_in_tasks(folder / "lm_eval_tasks/deep_ignorance/tasks")
    saved, env = None if FILES[name]["train_iters"] == 1 else begins + SAVE_EVERY, {"WANDB_MODE": "offline"}
    return begins, run_ranks(type_twice, 1, str(config), str(folder), saved, init=False, timeout=800, env=env)[0]


# The loops over the logs of running jobs that people of the fork have; Slurm names one job here.
SACCT = 'sacct() { echo "7 RUNNING"; }'
JOBS = (
    "for job in $(sacct --format=\"JobID,State\" -n | grep RUNNING | awk '{print $1}'); do log=neox-training-$job.out;"
)
CRASH_LOOP = f"""{SACCT}; {JOBS}
  if tail -100 "$log" | grep -qi "traceback\\|exception\\|error:"; then echo "CRASHED: $job"; fi; done"""
STALE_LOOP = f"""{SACCT}; now=$(date +%s); {JOBS}
  age=$((now - $(stat -c %Y "$log"))); if [ $age -gt 600 ]; then echo "STALE: $job"; fi; done"""
PROGRESS_LOOP = f"""{SACCT}; {JOBS}
  exp=$(grep -oE 'sf_model_organisms/[^/"]+' "$log" | head -1 | sed 's/sf_model_organisms\\///')
  iter_line=$(grep "iteration.*lm_loss" "$log" | tail -1)
  iter=$(echo "$iter_line" | grep -oP 'iteration\\s+\\K[0-9]+')
  total=$(echo "$iter_line" | grep -oP 'iteration\\s+[0-9]+/\\s*\\K[0-9]+')
  loss=$(echo "$iter_line" | grep -oP 'lm_loss:\\s*\\K[0-9.E+-]+')
  echo "$job | $exp | $iter/$total | loss=$loss"; done"""
HARNESS = 'grep -E "Running evaluation harness" neox-training-7.out'


def loops_agree(folder: Path, run: RepeatedRun, last: int, evaluates: bool) -> None:
    """Checks what the loops print for the full log of a run that has ended well."""
    log = folder / "neox-training-7.out"
    log.write_text(run.log)

    def typed_here(command: str) -> str:
        return bash(f"cd {folder}; {command}", log)[1]

    loss = re.findall(r"lm_loss: (\S+) ", run.log)[-1]
    assert bash(EXPERIMENT, log) == (0, f"{_FOLDERS['save']}\n")
    if last == 1:  # else processes of the killed run may have complained
        assert bash(ANY_TROUBLE, log) == (1, "")
    assert typed_here(CRASH_LOOP) == typed_here(STALE_LOOP) == ""
    assert typed_here(PROGRESS_LOOP) == f"7 | run | {last}/{last} | loss={loss}\n"
    assert bool(typed_here(HARNESS)) is evaluates
    assert typed_here(f"cat {_FOLDERS['save']}/latest") == f"global_step{last}"
    assert f"global_step{last}\n" in typed_here(f"ls {_FOLDERS['save']}/")
    os.utime(log, (0, 0))
    assert typed_here(STALE_LOOP) == "STALE: 7\n"
    with log.open("a") as file:
        file.write("Traceback (most recent call last):\n")
    assert typed_here(CRASH_LOOP) == "CRASHED: 7\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cells(SAMPLE, MORE_FILES, sorted(FILES.keys() - {*SAMPLE, *MORE_FILES})))
def test_a_file_trains_saves_goes_on_after_a_kill_and_evaluates(name: str, tmp_path: Path) -> None:
    values, save = FILES[name], tmp_path / _FOLDERS["save"]
    begins, run = run_of(name, tmp_path)
    assert run.code == 0, run.log[-5000:]
    last = 1 if values["train_iters"] == 1 else begins + STEPS
    if "save" in values:
        loops_agree(tmp_path, run, last, "eval_tasks" in values)
        assert list((save / f"global_step{last}").glob("optim_*")), "no_save_optim is none of GPT-NeoX's"
    if last > 1:
        assert f"going on from {save}/global_step{begins + SAVE_EVERY}, iteration {begins + SAVE_EVERY}\n" in run.log
        lines = re.findall(r"iteration +(\d+)/.* lm_loss: (\S+) ", run.log)
        steps = [int(step) for step, _ in lines]
        first_repeated = begins + SAVE_EVERY + 1
        assert steps == [*range(begins + 1, first_repeated + 1), *range(first_repeated, last + 1)]
        assert len({loss for step, loss in lines if int(step) == first_repeated}) == 1
    if begins == IMPORTED_STEP:
        assert f"going on from {save}/global_step{IMPORTED_STEP}, iteration {IMPORTED_STEP}\n" in run.log
    evaluated = re.findall(r" evaluation results at iteration (\d+) (.*)", run.log)
    expected = [] if not values.get("eval_tasks") else [last] if begins else [0, last]
    assert [int(step) for step, _ in evaluated] == expected
    for _, scores in evaluated:
        assert all(f"eval_tasks/{task}_acc: " in scores for task in values["eval_tasks"])
