"""Sweeps: what sweep.yml means, when a run is trained and when it is skipped, and what the table says."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.experiments import sweep_link, sweep_run
from megatron.experiments.errors import RunError
from megatron.experiments.storage import checkpoint_bytes, kept_checkpoints
from megatron.experiments.sweep_cost import cost_lines
from megatron.experiments.sweep_file import read_sweep
from megatron.experiments.sweep_link import LinkWork, read_record
from megatron.experiments.sweep_run import check_runs, device_shares
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import ConfigError
from megatron.pipelines.digests import loaded_inputs
from megatron.pipelines.state import locked
from tests.experiments.small_sweep import finish, in_process, logged_steps, records, run_sweep, started, write_sweep
from tests.pipelines.small import GATES, STAGES, passed, write_small, write_yaml
from tests.training.runs import LLAMA, config


def works(file: Path) -> list[LinkWork]:
    sweep = read_sweep(file)
    return [LinkWork(sweep, link, file.parent, lambda line: None) for link in sweep.links]


def plant(file: Path, losses: dict[str, float]) -> None:
    """Makes runs finished without training them."""
    for work in works(file):
        if (loss := losses.get(work.link.name)) is not None:
            finish(work.sweep.root, work.link.name, loss)
            record = {"status": "finished", "inputs": work.inputs(), "starts": 1}
            (work.link.folder / "sweep_run.json").write_text(json.dumps(record))


def test_cells_are_the_runs_with_all_combinations_of_the_grid(tmp_path):
    grid = {"optimizer.params.lr": [1e-3, 3e-3], "seed": [1, 2]}
    file = write_sweep(tmp_path, grid=grid, runs=[{"name": "wide", "hidden_size": 64}, {"num_layers": 1}])
    sweep = read_sweep(file)
    assert [cell.name for cell in sweep.cells] == [
        "wide_lr-0.001_seed-1", "wide_lr-0.001_seed-2", "wide_lr-0.003_seed-1", "wide_lr-0.003_seed-2",
        "num_layers-1_lr-0.001_seed-1", "num_layers-1_lr-0.001_seed-2", "num_layers-1_lr-0.003_seed-1",
        "num_layers-1_lr-0.003_seed-2",
    ]  # fmt: skip
    assert sweep.columns == ["run", "hidden_size", "lr", "seed", "num_layers"]
    all_args = [work.args() for work in works(file)]
    assert [(args.hidden_size, args.num_layers, args.seed) for args in all_args[3:5]] == [(64, 2, 2), (32, 1, 1)]
    assert all_args[3].optimizer["params"]["lr"] == 3e-3
    assert len({args.save for args in all_args}) == 8 and all(
        str(tmp_path / "sweep") in str(args.save) for args in all_args
    )


def test_values_that_are_no_file_names_have_names_of_their_own(tmp_path):
    paths = [["a/b"], ["a-b"], ["a b"]]
    names = [cell.name for cell in read_sweep(write_sweep(tmp_path, grid={"valid_data_paths": paths})).cells]
    assert len(set(names)) == 3 and not any("/" in name or " " in name for name in names)


def test_cells_share_the_runs_in_which_they_agree(tmp_path):
    """Keys of a stage have its name in front; a run for each different chain of settings up to a stage."""
    write_small(tmp_path / "base", {name: STAGES[name] for name in ("data", "init", "pretrain", "sft")}, {})
    grid = {"pretrain.seed": [1, 2], "sft.train_iters": [4, 6], "weight_decay": [0.1]}
    write_yaml(tmp_path / "sweep.yml", {"pipeline": "base", "grid": grid})
    sweep = read_sweep(tmp_path / "sweep.yml")
    assert [link.stage.name for link in sweep.links if link.stage] == ["init", *["pretrain", "sft", "sft"] * 2]
    assert [link.parent.name if link.parent else None for link in sweep.links[:4]] == [
        None, "init_weight_decay-0.1", *["pretrain_seed-1_weight_decay-0.1"] * 2
    ]  # fmt: skip
    assert sweep.links[1].settings == {"seed": 1, "weight_decay": 0.1}
    assert sweep.links[3].settings == {"train_iters": 6, "weight_decay": 0.1}
    runs = [{"name": "a", "pretrain.seed": 1, "sft.seed": 1}, {"name": "b", "pretrain.seed": 1, "sft.seed": 2}]
    write_yaml(tmp_path / "sweep.yml", {"pipeline": "base", "runs": runs})
    assert [link.name for link in read_sweep(tmp_path / "sweep.yml").links] == ["init", "pretrain_a", "sft_a", "sft_b"]


@pytest.mark.parametrize(
    "keys, place",
    [
        ({"grids": {"seed": [1]}}, "sweep.yml:7: grids"),
        ({"grid": {"seed": 1}}, "sweep.yml:4: grid.seed"),
        ({"grid": {"save": ["a", "b"]}}, "sweep.yml:4: grid.save"),
        ({"runs": [{"seed": 1}, {"seed": 1}]}, "sweep.yml:5: runs.1.seed"),
        ({"runs": [{"seed": 1}], "grid": {"seed": [1]}}, "sweep.yml:4: runs.0.seed"),
        ({"runs": [{"name": "a/b", "seed": 1}]}, "sweep.yml:4: runs.0.name"),
        ({"pipeline": "p"}, "sweep.yml:1: base"),
        ({"base": ["base.yml", "none"]}, "sweep.yml:3: base.1"),
        ({"price": 2.0}, "sweep.yml:7: price"),
        ({"parallel": 0}, "sweep.yml:7: parallel"),
        ({"grid": {"optimizer": [{"type": "Adam"}], "optimizer.params.lr": [1]}}, "grid.optimizer.params.lr"),
        ({"runs": [{"name": "sweep.csv", "seed": 1}]}, "sweep.yml:4: runs.0.name"),
    ],
)
def test_a_mistake_in_sweep_yml_is_told_with_its_line(tmp_path, keys, place):
    with pytest.raises(ConfigError) as refused:
        read_sweep(write_sweep(tmp_path, **keys))
    assert any(f"{place}" in line for line in refused.value.problems), refused.value


def test_mistakes_of_all_runs_are_told_before_the_first_starts(tmp_path):
    file = write_sweep(tmp_path, runs=[{"seed": 1}, {"num_layer": 2}, {"hidden_size": 33}])
    with pytest.raises(ConfigError) as refused:
        check_runs(read_sweep(file), tmp_path)
    assert "sweep.yml:5: num_layer" in str(refused.value) and "hidden_size" in str(refused.value)
    assert in_process("run", file).code == 1 and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("keys", [{"train_batch_size": None}, {"branched_from": {"run": "a"}}])
def test_runs_that_cannot_be_compared_are_refused(tmp_path, keys):
    """A batch could depend on the machine, or a branch of another run could be trained anew."""
    with pytest.raises(ConfigError, match=next(iter(keys))):
        check_runs(read_sweep(write_sweep(tmp_path, keys)), tmp_path)


def test_initial_weights_are_an_input(tmp_path):
    """Whether `iteration` names them or the file `latest`."""
    for name, digest in (("global_step4", "a"), ("global_step8", "b")):
        (tmp_path / "init" / name).mkdir(parents=True)
        files = {"layer_00-model_00-model_states.pt": {"sha256": digest}}
        (tmp_path / "init" / name / "manifest.json").write_text(json.dumps({"files": files}))
        (tmp_path / "init" / name / "layer_00-model_00-model_states.pt").touch()
    (tmp_path / "init" / "latest").write_text("global_step8")
    args = NeoXArgs.from_dict({**config(), "load": "init"})
    inputs = [loaded_inputs(args.replace(iteration=step), tmp_path) for step in (None, 4, 8, 9)]
    assert inputs[0]["sha256"] == inputs[2]["sha256"] != inputs[1]["sha256"] and "sha256" not in inputs[3]
    assert loaded_inputs(args.replace(load_ema=True), tmp_path) != inputs[0], "the average of the weights"


def test_the_base_keeps_its_own_folders(tmp_path):
    """A base that resumes from its own save does not make the runs load it; other weights they do load."""
    base = {"save": "own", "load": "own", "tensorboard_dir": "own/tensorboard"}
    for work in works(write_sweep(tmp_path, base)):
        args = work.args()
        assert args.load is None and str(work.link.folder) in str(args.tensorboard_dir)
    assert works(write_sweep(tmp_path, {**base, "load": "other"}))[0].args().load == "other"


def test_a_finished_run_is_skipped_until_configuration_data_or_code_change(tmp_path, monkeypatch):
    data = tmp_path / "data"
    golden = Path(str(config()["data_path"]))
    for suffix in (".bin", ".idx"):
        (tmp_path / f"data{suffix}").write_bytes(golden.with_suffix(suffix).read_bytes())
    base = {"data_path": str(data)}
    file = write_sweep(tmp_path, base)
    names = [work.link.name for work in works(file)]
    plant(file, dict.fromkeys(names, 1.0))
    assert [work.is_done() for work in works(file)] == [True, True]
    write_sweep(tmp_path, {**base, "log_interval": 2}, parallel=2)
    assert [work.is_done() for work in works(file)] == [True, True]
    write_sweep(tmp_path, {**base, "weight_decay": 0.3})
    assert [work.is_done() for work in works(file)] == [False, False]
    write_sweep(tmp_path, base)
    with monkeypatch.context() as patched:
        patched.setattr(sweep_link, "code_digest", lambda: "other")
        assert [work.is_done() for work in works(file)] == [False, False]
        write_sweep(tmp_path, base, compare_code=False)
        assert [work.is_done() for work in works(file)] == [True, True]
    (tmp_path / "data.bin").write_bytes((tmp_path / "data.bin").read_bytes()[::-1])
    assert [work.is_done() for work in works(file)] == [False, False]


def test_results_of_other_settings_are_moved(tmp_path, monkeypatch):
    file = write_sweep(tmp_path)
    plant(file, {"lr-0.001": 1.0})
    write_sweep(tmp_path, {"weight_decay": 0.3})
    [work, _] = works(file)
    monkeypatch.setattr(LinkWork, "_train", lambda self, processes, launcher: 0)
    assert work.do() == 0
    assert (work.link.folder / "logs.1/metrics.jsonl").is_file() and not (work.link.folder / "logs").exists()
    assert read_record(work.link).inputs["config"]["weight_decay"] == 0.3


def test_the_table_has_the_lowest_loss_first(tmp_path):
    file = write_sweep(tmp_path, grid={"seed": [1, 2, 3, 4], "optimizer.params.lr": [1e-3]})
    plant(file, {"seed-1_lr-0.001": 3.0, "seed-2_lr-0.001": 1.5, "seed-3_lr-0.001": 2.0})
    done = in_process("status", file)
    rows = [line.split() for line in done.out.splitlines()]
    assert done.code == 0 and rows[0][:3] == ["seed", "lr", "state"]
    assert [row[0] for row in rows[1:5]] == ["2", "3", "1", "4"] and rows[1][2:6] == ["finished", "3/3", "1.5000", "10"]
    assert [line.split(",")[0] for line in (tmp_path / "sweep/sweep.csv").read_text().splitlines()][
        1
    ] == "seed-2_lr-0.001"
    assert records(tmp_path / "sweep")["seed-4_lr-0.001"]["state"] == "waiting"
    assert (tmp_path / "sweep/sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(in_process("status", file, "--json").out)[0]["train/lm_loss"] == 1.5


@pytest.mark.parametrize("key, differs", [("eval_iters", True), ("valid_sets", True), ("weight_decay", False)])
def test_validations_of_other_text_are_noted(tmp_path, key, differs):
    """The table would sort losses that do not measure the same."""
    file = write_sweep(tmp_path)
    values = [{"a": "x"}, {"a": "y"}] if key == "valid_sets" else [1, 2]
    for link, value in zip(read_sweep(file).links, values, strict=True):
        finish(tmp_path / "sweep", link.name, 1.0)
        (link.folder / "sweep_run.json").write_text('{"status": "finished"}')
        args = NeoXArgs.from_dict(config(LLAMA, {"eval_iters": 1, "train_iters": 3, key: value}))
        (link.output.logs / "neox_args.train.1.json").write_text(args.to_json())
        rows = link.output.metrics_file
        rows.write_text(rows.read_text().replace("train/lm_loss", "validation/lm_loss"))
    notes = [line for line in in_process("status", file).out.splitlines() if line.startswith("note: ")]
    assert [key in note for note in notes] == [True] * differs


def test_a_second_sweep_in_the_folder_is_refused(tmp_path):
    file = write_sweep(tmp_path)
    (tmp_path / "sweep").mkdir()
    with locked(tmp_path / "sweep", print, "sweep"):
        done = in_process("run", file)
    assert done.code == 1 and "another process runs this sweep" in done.err and str(os.getpid()) in done.err
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == [".sweep.lock"]


def test_a_run_without_space_for_its_checkpoints_is_not_started(tmp_path):
    file = write_sweep(tmp_path, min_free=1e9)
    done = in_process("run", file, "--only", "lr-0.001", "--cwd", tmp_path)
    [work, _] = works(file)
    assert done.code == 1 and "min_free" in done.err and read_record(work.link).status == "failed"
    assert not (work.link.folder / "output.log").exists()


def test_kept_checkpoints_are_counted():
    def kept_of(**keys: Any) -> int:
        return kept_checkpoints(NeoXArgs.from_dict(config(train_iters=10, save="a", **keys)))

    assert kept_of(checkpoint_factor=3) == 4
    assert kept_of(checkpoint_factor=2, checkpoint_scale="log") == 5  # 1, 2, 4, 8, 10
    assert kept_of(checkpoint_factor=1, keep_last_n_checkpoints=2) == 3
    assert kept_of(checkpoint_factor=5, extra_save_iters=(1,)) == 3


def test_runs_share_the_gpus_of_the_machine(monkeypatch):
    monkeypatch.setattr(sweep_run, "visible_gpus", lambda env: ["0", "1", "2", "3", "4"])
    assert device_shares(2, {}) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert device_shares(1, {}) == [{}]
    with pytest.raises(RunError, match="parallel"):
        device_shares(6, {})


def test_a_failed_run_is_told_and_the_others_go_on(tmp_path):
    runs = [{"name": "good", "seed": 3}, {"name": "bad", "load": str(tmp_path / "none")}]
    file = write_sweep(tmp_path, runs=runs, parallel=2, retry=1)
    done = run_sweep("run", file)
    cells = records(tmp_path / "sweep")
    assert done.code == 1, done.err
    assert (cells["good"]["state"], cells["good"]["steps"], cells["bad"]["state"]) == ("finished", 3, "failed")
    assert str(tmp_path / "none") in cells["bad"]["reason"] and cells["bad"]["reason"] in done.out
    good, bad = works(file)
    assert (read_record(good.link).starts, read_record(bad.link).starts) == (1, 2)
    assert logged_steps(good.link.folder) == [1, 2, 3] and not logged_steps(bad.link.folder)

    checkpoint = tmp_path / "sweep/good/checkpoints/global_step3"
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    estimate = checkpoint_bytes(good.args(), tmp_path) / kept_checkpoints(good.args())
    assert 0.7 < size / estimate < 1.5, (size, estimate)

    write_sweep(tmp_path, runs=runs[:1])
    assert in_process("run", file).code == 0
    assert logged_steps(good.link.folder) == [1, 2, 3]


@pytest.mark.more
def test_twelve_runs_interrupted_three_times_are_each_trained_once(tmp_path):
    """By SIGKILL, SIGINT and SIGKILL. No step is taken twice, because a stopped run saves."""
    base = {"train_iters": 6, "checkpoint_factor": 3}
    grid = {"optimizer.params.lr": [1e-3, 3e-3], "seed": [1, 2, 3, 4, 5, 6]}
    file = write_sweep(tmp_path, base, grid=grid, parallel=2)

    def steps() -> int:
        return sum(len(logged_steps(log.parent)) for log in (tmp_path / "sweep").glob("*/output.log"))

    for number, until in ((signal.SIGKILL, 8), (signal.SIGINT, 27), (signal.SIGKILL, 45)):
        process = started("run", file)
        while steps() < until and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate()  # also waits until the runs that a killed sweep has left have saved
        assert process.returncode == (130 if number == signal.SIGINT else -number), err
    done = run_sweep("run", file)
    assert done.code == 0, done.err
    cells = records(tmp_path / "sweep")
    assert len(cells) == 12 and {cell["state"] for cell in cells.values()} == {"finished"}
    for name, cell in cells.items():
        assert logged_steps(Path(cell["folder"])) == [1, 2, 3, 4, 5, 6], name
    assert sum(read_record(work.link).starts for work in works(file)) > 12  # some were indeed interrupted
    uninterrupted = write_sweep(tmp_path, base, grid={"optimizer.params.lr": [3e-3], "seed": [2]}, save_root="whole")
    assert run_sweep("run", uninterrupted).code == 0
    assert records(tmp_path / "whole")["lr-0.003_seed-2"]["train/lm_loss"] == cells["lr-0.003_seed-2"]["train/lm_loss"]


@pytest.mark.more
def test_a_chain_runs_shared_stages_once(tmp_path):
    """A stage that its gate refuses keeps its children from starting; the others finish."""
    stages = {**STAGES, "pretrain": {"configs": ["pretrain.yml"]}}
    stages = {name: stages[name] for name in ("data", "pretrain", "sft")}
    write_small(tmp_path / "base", stages, {"pretrain": GATES["pretrain"]})
    passed("run", tmp_path / "base", "--only", "data")
    rate = "pretrain.optimizer.params.lr"
    runs = [{rate: lr, "sft.train_iters": steps} for lr, steps in ((1e-2, 4), (1e-2, 6), (1e-4, 4))]
    file = tmp_path / "sweep.yml"
    write_yaml(file, {"pipeline": "base", "runs": runs, "parallel": 2, "min_free": 0.001})
    done = run_sweep("run", file)
    cells = records(tmp_path / "sweep")
    assert done.code == 0 and {cell["state"] for cell in cells.values()} == {"finished"}, done.err
    assert [read_record(work.link).starts for work in works(file)] == [1] * 5
    assert cells["lr-0.01_train_iters-6"]["steps"] == 6
    weights = tmp_path / "sweep/pretrain_lr-0.01/checkpoints/pretrain_final"
    log = (tmp_path / "sweep/sft_lr-0.01_train_iters-4/logs/sft.log").read_text()
    assert str(weights) in log and weights.is_dir()

    losses = [cells[f"lr-{rate}_train_iters-4"]["train/lm_loss"] for rate in ("0.01", "0.0001")]
    gate = {"pretrain": {"require": [{"metric": "train/lm_loss", "max": sum(losses) / 2}]}}
    write_yaml(tmp_path / "base/gates.yml", gate)
    done = run_sweep("run", file)
    cells = records(tmp_path / "sweep")
    assert done.code == 1, done.err
    assert cells["lr-0.0001_train_iters-4"]["state"] == "pretrain: refused"
    assert cells["lr-0.01_train_iters-4"]["state"] == "finished"
    output = (tmp_path / "sweep/pretrain_lr-0.01/logs/pretrain.log").read_text()
    assert len(re.findall(r"\| iteration +8/", output)) == 1  # it was judged again, but not trained again


@pytest.mark.more
def test_the_cost_is_that_of_the_plan(tmp_path):
    keys = {"gpu": "h100", "gpus": 2, "price": 3.0}
    file = write_sweep(tmp_path, grid={"train_iters": [1000, 3000], "seed": [1, 2]}, **keys)
    lines = list(cost_lines(read_sweep(file), read_sweep(file).links, tmp_path))
    hours = [float(line.split(": ")[1].split()[0]) for line in lines]
    prices = [float(line.rpartition("price ")[2]) for line in lines]
    assert len(lines) == 5 and hours[0] > 0 and hours[2] == pytest.approx(3 * hours[0], rel=0.02)
    assert hours[4] == pytest.approx(sum(hours[:4]), rel=0.02) and prices == pytest.approx(
        [3 * h for h in hours], rel=0.02
    )
    assert list(cost_lines(read_sweep(write_sweep(tmp_path)), [], tmp_path)) == []
    assert yaml.safe_load(file.read_text()).get("gpu") is None
