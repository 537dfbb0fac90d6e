"""How many ranks, on which GPUs; what the ranks see of it."""

from pathlib import Path

import pytest

from megatron.launch.devices import choose_ranks
from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.launch.launcher_rendezvous import RankAssignment
from megatron.launch.local import environments
from megatron.launch.plan import plan
from megatron.launch.run import Run, write_args_file
from megatron.neox_arguments import ConfigError, NeoXArgs

GPUS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("num_gpus", "include", "expected"),
    [
        (None, None, (4, ("0", "1", "2", "3"))),
        (2, None, (2, ("0", "1"))),
        (None, "localhost:2,3", (2, ("2", "3"))),
        (None, "localhost:3,1", (2, ("3", "1"))),
        (1, "localhost:2,3", (1, ("2",))),
        (None, "localhost", (4, ("0", "1", "2", "3"))),
    ],
)
def test_ranks_on_gpus(num_gpus, include, expected):
    assert choose_ranks(GPUS, num_gpus, include) == expected


@pytest.mark.parametrize(
    ("num_gpus", "exclude", "expected"),
    [(None, "localhost:0", ("1", "2", "3")), (None, "localhost:1,2", ("0", "3")), (1, "localhost:0,1", ("2",))],
)
def test_ranks_without_some_gpus(num_gpus, exclude, expected):
    assert choose_ranks(GPUS, num_gpus, exclude=exclude) == (len(expected), expected)


@pytest.mark.parametrize(
    ("gpus", "include", "exclude", "message"),
    [
        (GPUS, None, "localhost:7", "exclude: 'localhost:7' asks for GPU 7; this machine shows 0, 1, 2, 3"),
        (GPUS, None, "localhost", "exclude: 'localhost' leaves none of the GPUs"),
        (GPUS, None, "elsewhere:0", "exclude: 'elsewhere:0' names another machine"),
        (GPUS, "localhost:1", "localhost:0", "exclude: 'localhost:0', but include: 'localhost:1'"),
        ([], None, "localhost:0", "exclude: 'localhost:0' names GPUs, but this machine shows none"),
    ],
)
def test_exclude_refused(gpus, include, exclude, message):
    with pytest.raises(LaunchError, match=message):
        choose_ranks(gpus, None, include, exclude)


def test_ranks_follow_cuda_visible_devices():
    assert choose_ranks(["2", "3"]) == (2, ("2", "3"))
    with pytest.raises(LaunchError, match="asks for GPU 0; this machine shows 2, 3"):
        choose_ranks(["2", "3"], include="localhost:0")


def test_ranks_without_gpus():
    assert choose_ranks([]) == (1, ())
    assert choose_ranks([], 4) == (4, ())


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "include", "message"),
    [
        (GPUS, 5, None, "num_gpus: 5 GPUs asked for, to choose from are 0, 1, 2, 3"),
        (GPUS, None, "localhost:7", "include: 'localhost:7' asks for GPU 7"),
        (GPUS, None, "elsewhere:0", "names another machine"),
        ([], None, "localhost:0", "this machine shows none; use num_gpus"),
    ],
)
def test_refused(gpus, num_gpus, include, message):
    with pytest.raises(LaunchError, match=message):
        choose_ranks(gpus, num_gpus, include)


def test_rank_environment(monkeypatch):
    monkeypatch.setattr("megatron.launch.local.cores", lambda: 8)
    monkeypatch.setattr("os.environ", {"HOME": "/h"})
    node = Node("b", 4, devices=("4", "5", "6", "7"))
    run = Run("nodes", ("python",), (Node("a", 3), node), Path(), None, Path(), node_rank=1, master_addr="10.0.0.7")
    env = environments(run, RankAssignment(3, 7, 1234), restarts=2)[2]
    place = {"RANK": "5", "LOCAL_RANK": "2", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "NEOX_RESTARTS": "2"}
    meeting = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
    assert env == {"HOME": "/h", **place, **meeting, "CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "2"}
    monkeypatch.setattr("os.environ", {"OMP_NUM_THREADS": "5"})
    assert environments(run, RankAssignment(3, 7, 1234))[0]["OMP_NUM_THREADS"] == "5"


def _args(**changes):
    model = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8}
    return NeoXArgs.from_dict({**model, "train_batch_size": 8, **changes})


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr("megatron.launch.plan.visible_gpus", lambda env: [])


def test_plan_hands_the_args_over_in_a_file(tmp_path, no_gpus):
    args = _args(num_gpus=2, save=str(tmp_path / "run"), checkpoint_factor=10)
    run = plan("train.py", args, ["--more"])
    write_args_file(run)
    assert run.world_size == 2
    assert run.log_dir == tmp_path / "run" / "logs"
    script, flag, path, more = run.command[-4:]
    assert (script, flag, more) == ("train.py", "--neox-args", "--more")
    assert NeoXArgs.from_json(Path(path).read_text()) == args.for_world(2)
    assert run.master_port is None, "any free port unless the key is set"


def test_plan_with_keys_set(tmp_path, no_gpus):
    run = plan("train.py", _args(log_dir=str(tmp_path), master_port=29500, master_addr="10.0.0.7"))
    assert (run.world_size, run.log_dir, run.master_port) == (1, tmp_path, 29500)
    assert environments(run, RankAssignment(0, 1, 29500))[0]["MASTER_ADDR"] == "10.0.0.7"


def test_plan_refuses_a_layout_that_does_not_fit(tmp_path, no_gpus):
    with pytest.raises(ConfigError, match="3 ranks cannot be divided"):
        plan("train.py", _args(log_dir=str(tmp_path), num_gpus=3, model_parallel_size=2))
