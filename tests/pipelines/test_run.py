"""Whole pipelines: skipped where nothing changed, stopped by a gate, overridden, killed, begun anew."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from megatron.checkpointing import load_weights
from megatron.checkpointing.saved_config import checkpoint_args
from tests.launch.runs import PIPED_OUTPUT, alive, environment, wait_for
from tests.pipelines.small import (
    GATES,
    STAGES,
    change_yaml,
    command,
    finals,
    passed,
    pipeline,
    records,
    started,
    write_small,
    write_yaml,
)


@pytest.fixture(scope="module")
def full_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that has run to its end, one for all workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "whole.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / "whole_pipeline"
        if not (folder / "pipeline.html").is_file():
            done = pipeline("run", write_small(folder))
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder


@pytest.fixture
def copied(full_pipeline: Path, tmp_path: Path) -> Path:
    shutil.copytree(full_pipeline, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def refuse(folder: Path, maximum: float = 0.1) -> None:
    """Let the gate of sft ask for what cannot be."""
    gates = {**GATES, "sft": {"require": [{"metric": "train/lm_loss", "max": maximum}]}}
    write_yaml(folder / "gates.yml", gates)


@pytest.mark.product
def test_layout_page_and_merged_weights(full_pipeline):
    expected_names = {"checkpoints", "data", "logs", "pipeline_state.json", "pipeline.html"}
    assert {path.name for path in full_pipeline.iterdir()} >= expected_names
    for stage in ("init", "pretrain", "sft", "lora"):
        final = full_pipeline / "checkpoints" / f"{stage}_final"
        assert (
            final.is_symlink() and (final / "latest").is_file() and (full_pipeline / "logs" / f"{stage}.log").is_file()
        )
    page = (full_pipeline / "pipeline.html").read_text()
    for words in ("texts.jsonl", "CC0-1.0", "max_rise 5.0", "lora/merged"):
        assert words in page
    assert all(record["status"] in ("done", "promoted") for record in records(full_pipeline).values())
    merged = full_pipeline / "checkpoints/lora_final/global_step6"
    args = checkpoint_args(merged)
    assert args.lora is None
    layer_options = {"layers": [2], "tensor_rank": 0, "tensor_size": 1}
    tuned = load_weights(full_pipeline / "checkpoints/sft_final/global_step6", args, **layer_options)[2]
    changed = [
        name for name, t in load_weights(merged, args, **layer_options)[2].items() if not torch.equal(t, tuned[name])
    ]
    assert "attention.query_key_value.weight" in changed and "input_layernorm.scale" not in changed


def assert_all_skipped(word: str, folder: Path) -> None:
    verdicts = [line.partition(":")[2] for line in pipeline(word, folder, "--dry-run").stdout.splitlines()]
    assert verdicts == [" unchanged, would be skipped"] * 5


def test_nothing_is_done_twice_and_only_for_what_changes_weights(copied):
    times_before = {path: path.stat().st_mtime_ns for path in (copied / "checkpoints").rglob("*") if path.is_file()}
    output = passed("run", copied)
    assert all(f"pipeline: {stage}: unchanged, skipped" in output for stage in STAGES)
    assert {path: path.stat().st_mtime_ns for path in times_before} == times_before
    assert_all_skipped("run", copied)
    change_yaml(copied / "model.yml", log_interval=5, checkpoint_factor=4, num_workers=1)
    assert_all_skipped("run", copied)
    dry = pipeline("run", copied, "--dry-run", "--no-fp8", "--precision", "bfloat16", "--set", "seed=5").stdout
    lines = [line for line in dry.splitlines() if "deepy.py" in line]
    assert len(lines) == 4
    assert all("--no-fp8" in line and "precision=bfloat16 seed=5" in line for line in lines)
    assert "init: would run (changed: seed null -> 5)" in dry
    dry_run = pipeline(
        "run", copied, "--dry-run", "--no-fp8", "--precision", "fp32", "--set", "weight_decay=0.1"
    ).stdout
    assert "would run" not in dry_run, "what is the default anyway changes nothing"
    next((copied / "checkpoints/pretrain_final").glob("global_step8/layer_02*")).unlink()
    dry = pipeline("run", copied, "--dry-run").stdout
    assert "init: unchanged" in dry and "pretrain: unchanged" not in dry
    (copied / "data/raw/texts.jsonl").unlink()
    (copied / "texts.jsonl").write_text('{"text": "other words"}\n')
    assert "data: would run" in pipeline("run", copied, "--dry-run").stdout


@pytest.mark.more
def test_a_gate_stops_what_comes_after(copied):
    """Exit 3, later stages untouched, the final weights unmoved; then only what is needed is done."""
    finals_before, lora_record = finals(copied), records(copied)["lora"]
    change_yaml(copied / "sft.yml", data_seed=11)
    refuse(copied)
    done = pipeline("run", copied)
    assert done.returncode == 3, done.stderr
    assert re.search(r"sft: .*anew: data_seed 7 -> 11; .*checkpoints/sft\.1", done.stderr)
    assert "sft: gate fail" in done.stderr and "lora:" not in done.stderr
    assert finals(copied) == finals_before and records(copied)["lora"] == lora_record
    assert records(copied)["sft"]["status"] == "refused"
    verdict = json.loads((copied / records(copied)["sft"]["verdict"]).read_text())
    assert verdict["result"] == "fail" and verdict["checks"][0]["limit"] == 0.1 < verdict["checks"][0]["value"]

    second_run = pipeline("resume", copied)  # nothing mended: nothing is trained again
    assert second_run.returncode == 3 and "anew" not in second_run.stderr and "sft.2" not in second_run.stderr

    write_yaml(copied / "gates.yml", GATES)
    trained = (copied / "checkpoints/sft/global_step6/manifest.json").stat().st_mtime_ns
    output = passed("resume", copied)
    assert "pretrain: unchanged, skipped" in output and "sft: promoted" in output
    assert (copied / "checkpoints/sft/global_step6/manifest.json").stat().st_mtime_ns == trained
    assert finals(copied)["sft"] != finals_before["sft"] and finals(copied)["lora"] != finals_before["lora"]
    assert finals(copied)["pretrain"] == finals_before["pretrain"]
    assert [retired["folder"] for retired in records(copied)["sft"]["retired"]] == ["checkpoints/sft.1"]


@pytest.mark.product
def test_an_override_is_shown_for_ever(copied):
    refuse(copied)
    assert pipeline("resume", copied, "sft").returncode == 3
    assert pipeline("override", copied, "sft", "--reason", " ").returncode == 1
    refuse(copied, 0.05)  # nobody has seen it judged by this gate
    other_override = pipeline("override", copied, "sft", "--reason", "x")
    assert other_override.returncode == 1 and "gate, weights or baseline changed" in other_override.stderr
    refuse(copied)
    change_yaml(copied / "sft.yml", data_seed=8)  # nor are these the weights of this configuration
    other_override = pipeline("override", copied, "sft", "--reason", "x")
    assert other_override.returncode == 1 and "data or weights of this stage changed" in other_override.stderr
    change_yaml(copied / "sft.yml", data_seed=7)
    assert not (copied / "overrides.jsonl").exists()
    passed("override", copied, "sft", "--reason", "noise at this size")
    (line,) = (copied / "overrides.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "noise at this size" and json.loads(line)["sha256"] == finals(copied)["sft"]
    assert json.loads((copied / "checkpoints/sft_final/verdict.json").read_text())["override"]["reason"]
    passed("run", copied)  # it holds for these weights and this gate
    refuse(copied, 0.05)  # and for no other gate
    assert pipeline("run", copied).returncode == 3
    write_yaml(copied / "gates.yml", GATES)
    passed("run", copied)
    for page in (pipeline("status", copied).stdout, (copied / "pipeline.html").read_text()):
        assert "noise at this size" in page
    refused = pipeline("override", copied, "sft", "--reason", "again")
    assert refused.returncode == 1 and "status: promoted" in refused.stderr


def test_gate_judges_again_and_moves_nothing(copied):
    finals_before = finals(copied)
    os.chdir(copied)
    passed = pipeline("gate", "sft")
    assert (passed.returncode, passed.stdout.splitlines()[-1]) == (0, "sft: pass; logs/verdicts/sft-2.json")
    refuse(copied)
    assert pipeline("gate", copied, "sft").returncode == 3
    write_yaml(copied / "gates.yml", {"sft": {"require": [{"metric": "train/none", "max": 1.0}]}})
    missing = pipeline("gate", copied / "pipeline.yml", "sft")
    assert missing.returncode == 4 and "train/none" in missing.stdout
    assert finals(copied) == finals_before
    unknown = pipeline("gate", copied, "stf")
    assert unknown.returncode == 1 and "data, init, pretrain, sft, lora" in unknown.stderr
    assert "has no gate; " in pipeline("gate", copied, "lora").stderr


def test_a_baseline_that_has_moved(copied):
    """A stage whose starting weights were replaced would run again, and is judged against the new ones."""
    final = copied / "checkpoints/pretrain_final"
    rows = (final / "metrics.jsonl").read_text().replace('"train/lm_loss": ', '"train/lm_loss": -')
    (final / "metrics.jsonl").write_text(rows)
    path = final.resolve() / next(final.glob("global_step*")).name / "manifest.json"
    manifest = json.loads(path.read_text())
    name = next(name for name in manifest["files"] if name.startswith("layer_"))
    manifest["files"][name]["sha256"] = "0" * 64
    path.unlink()  # not the file of the stage, to which it is a link
    path.write_text(json.dumps(manifest))
    done = pipeline("resume", copied, "sft", "--only", "--dry-run")
    assert "would run" in done.stdout and "starts_from" in done.stdout
    requirement = {"metric": "train/lm_loss", "max_rise": 99.0}
    change_yaml(copied / "gates.yml", sft={"baseline": "pretrain", "require": [requirement]})
    verdict = pipeline("gate", copied, "sft")
    assert verdict.returncode == 0 and "(baseline -" in verdict.stdout
    verdict_file = json.loads((copied / records(copied)["sft"]["verdict"]).read_text())
    assert verdict_file["baseline"]["weights_sha256"] == finals(copied)["pretrain"]


@pytest.mark.product
def test_a_longer_run_goes_on(copied):
    change_yaml(copied / "sft.yml", train_iters=9)
    refused = pipeline("resume", copied, "sft", "--only")
    assert refused.returncode == 1 and "learning-rate schedule" in refused.stderr
    change_yaml(copied / "sft.yml", override_lr_scheduler=True)
    output = passed("resume", copied, "sft", "--only")
    assert "sft: continues the run for longer: train_iters 6 -> 9" in refused.stderr and "anew" not in output
    assert (copied / "checkpoints/sft_final/latest").read_text() == "global_step9"
    log = (copied / "logs/sft.log").read_text()
    assert "iteration        7/" in log and "iteration        1/       9" not in log


@pytest.mark.product
def test_other_texts_restart_everything(copied):
    text = json.dumps({"text": "other words " * 20}) + "\n"
    (copied / "data/raw/texts.jsonl").unlink()
    (copied / "texts.jsonl").write_text(text * 20)
    assert "preprocess_data.py" in passed("run", copied, "--to", "data")
    dry = pipeline("run", copied, "--dry-run").stdout
    assert "pretrain: would run (changed: data)" in dry and "init: unchanged" in dry


def test_a_stage_that_fails_says_where(tmp_path):
    stages = {"data": {"kind": "data", "commands": ["echo before; cat nothing_there"], "outputs": ["x"]}}
    folder = write_small(tmp_path / "p", stages, {})
    done = pipeline("run", folder)
    assert done.returncode == 1
    assert "data: ended with code 1\npipeline: data: the end of logs/data.log:\n" in done.stderr
    assert "nothing_there" in done.stderr
    assert records(folder)["data"]["status"] == "failed"
    status = pipeline("status", folder)
    assert status.returncode == 0 and re.search("failed.*code 1", status.stdout, re.S)
    assert json.loads(pipeline("status", folder, "--json").stdout)["records"]["data"]["status"] == "failed"


@pytest.mark.product
@pytest.mark.ends_processes
def test_an_edit_that_is_taken_back_costs_nothing(copied):
    """The run that was finished is the stage's again: after one that was stopped, or could not start."""
    finals_before = finals(copied)
    change_yaml(copied / "sft.yml", data_seed=12, train_batch_size="many")
    assert pipeline("resume", copied, "sft", "--only").returncode == 1  # refused before anything moves
    sft_config = yaml.safe_load((copied / "sft.yml").read_text())
    del sft_config["train_batch_size"]
    write_yaml(copied / "sft.yml", {**sft_config, "train_iters": 4000})
    first_run = started("resume", copied, "sft", "--only")
    log = copied / "logs/sft.log"
    wait_for(lambda: first_run.poll() is not None or "iteration        1/    4000" in log.read_text())
    first_run.send_signal(signal.SIGTERM)
    _, output = first_run.communicate(timeout=200)
    assert first_run.returncode == 143 and records(copied)["sft"]["status"] == "stopped", output
    assert "needs the stage sft, which is stopped" in pipeline("resume", copied, "lora").stderr
    change_yaml(copied / "sft.yml", data_seed=7, train_iters=6)
    output = passed("resume", copied, "sft")
    assert "sft: uses checkpoints/sft.1 again" in output and "lora: unchanged" in output
    assert finals(copied) == finals_before

    change_yaml(copied / "sft.yml", train_iters=9)
    assert pipeline("resume", copied, "sft", "--only").returncode == 1  # the learning rate's end is not said
    change_yaml(copied / "sft.yml", train_iters=6)
    assert "sft: uses the earlier, shorter run again" in passed("resume", copied, "sft")
    assert finals(copied) == finals_before


@pytest.mark.product
def test_damaged_and_missing_weights(copied):
    """Files that are gone are seen, and what is whole elsewhere is taken."""
    finals_before = finals(copied)
    next((copied / "checkpoints/pretrain_final").glob("global_step8/layer_02*")).unlink()
    assert finals(copied)["pretrain"] is None
    assert "pretrain: promoted" in passed("run", copied, "--to", "pretrain") and finals(copied) == finals_before
    shutil.rmtree(copied / "checkpoints/sft")  # pruned: the promoted weights are the same
    change_yaml(copied / "gates.yml", sft={"require": [{"metric": "train/lm_loss", "max": 8.0}]})
    assert "sft: promoted" in passed("resume", copied, "sft", "--only") and not (copied / "checkpoints/sft").exists()
    assert finals(copied) == finals_before
    (copied / "checkpoints/init_final/latest").unlink()
    passed("run", copied)
    assert finals(copied) == finals_before


@pytest.mark.product
def test_options_belong_to_stages(copied):
    passed("run", copied, "--only", "lora", "--set", "data_seed=9")
    assert_all_skipped("resume", copied)
    assert "would run" not in pipeline("resume", copied, "--dry-run", "--set", "log_interval=2").stdout
    assert "lora: would run (changed: data_seed 9 -> 8" in pipeline("run", copied, "--dry-run").stdout


@pytest.mark.ends_processes
def test_two_at_once_and_a_stop(tmp_path):
    """A second pipeline is refused with the first one's process; SIGTERM ends all of the first."""
    note = "for i in 1 2 3; do sleep 300 & echo $! >> notes; wait; done; echo over"
    folder = write_small(tmp_path / "p", {"data": {"kind": "data", "commands": [note], "outputs": ["x"]}}, {})
    first_run, notes = started("run", folder), folder / "notes"
    wait_for(lambda: first_run.poll() is not None or (notes.is_file() and notes.read_text().endswith("\n")))
    second_run = pipeline("run", folder)
    assert second_run.returncode == 1 and f"process {first_run.pid}" in second_run.stderr
    first_run.send_signal(signal.SIGTERM)
    _, output = first_run.communicate(timeout=200)
    assert first_run.returncode == 143 and "data: stopped" in output
    assert records(folder)["data"]["status"] == "stopped"
    pids = [int(pid) for pid in notes.read_text().split()]
    assert len(pids) == 1
    wait_for(lambda: not alive(pids[0]))


def kill(folder: Path, seconds: float, with_all: bool) -> str | None:
    """The stage in which a pipeline was killed, with_all: and what it started; None: it had ended."""
    process = subprocess.Popen(command("run", folder), env=environment(), start_new_session=True, **PIPED_OUTPUT)
    try:
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output
        return None
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        for pid in descendants(process.pid, folder) if with_all else []:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    state = records(folder) if (folder / "pipeline_state.json").is_file() else {}
    return next((name for name, record in state.items() if record["status"] == "running"), "between stages")


def descendants(pid: int, folder: Path) -> list[int]:
    """Processes that work in the pipeline's folder, but the pipeline itself."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != pid and Path(os.readlink(entry / "cwd")) == folder.resolve():
                pids.append(int(entry.name))
    return pids


def compare(tmp_path: Path, kills: int, seed: int, longest_s: float = 5.0) -> list[str]:
    """Kill pipelines so often and compare them with one that nobody killed; the stages of the kills."""
    full_pipeline = write_small(tmp_path / "whole")
    passed("run", full_pipeline)
    moment, killed_in = random.Random(seed), list[str]()
    for number in range(kills):
        folder = write_small(tmp_path / f"killed{number}")
        while True:
            last = len(killed_in) >= kills
            stage = kill(folder, 300 if last else moment.uniform(0.3, longest_s), with_all=bool(len(killed_in) % 2))
            if stage is None:
                break
            killed_in.append(stage)
        assert finals(folder) == finals(full_pipeline) and None not in finals(full_pipeline).values(), killed_in
        assert not list((folder / "checkpoints").glob("*.[0-9]*")), "something began anew"
        if len(killed_in) >= kills:
            break
    print(f"killed in {killed_in}")
    return killed_in


@pytest.mark.product
def test_killed_twice(tmp_path):
    compare(tmp_path, 2, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_moments(tmp_path):
    assert len(set(compare(tmp_path, 20, seed=1, longest_s=9.0))) >= 4
