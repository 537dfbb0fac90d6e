"""Hostfiles, DeepSpeed's include and exclude, ranks on GPUs, and what goes to other machines."""

import collections
from pathlib import Path

import pytest

from megatron.launch.devices import choose_ranks
from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node, carried, choose_slots, hosts_of, read_hostfile
from megatron.launch.launcher_rendezvous import RankAssignment
from megatron.launch.plan import plan
from megatron.launch.run import Run, write_args_file
from megatron.launch.start import environments
from megatron.launch.watch import Attempt
from megatron.neox_arguments import NeoXArgs
from tests.training.runs import BASE

POOL = collections.OrderedDict(a=2, b=4, c=1)
SLOTS = {host: list(range(count)) for host, count in POOL.items()}


@pytest.fixture
def hostfile(tmp_path):
    (tmp_path / "hosts").write_text("# ours\n\na slots=2\nb slots=4  # bigger\nc slots=1\n")
    return tmp_path / "hosts"


def nodes(path, hosts=(), env=None, **changes) -> list[str]:
    args = NeoXArgs.from_dict({**BASE, **({"hostfile": str(path)} if path else {}), **changes})
    return [str(node) for node in hosts_of(args, hosts, env or {})]


def test_hostfile_and_hosts_flag(hostfile):
    assert read_hostfile(hostfile) == POOL
    assert nodes(hostfile) == ["a=2", "b=4", "c=1"]
    assert nodes(None, ["a:2,3", "b=3", "c"]) == ["a:2,3", "b=3", "c"]
    assert hosts_of(NeoXArgs.from_dict(BASE), ["a:2,3"], {}) == (Node("a", 2, ("2", "3")),)
    assert nodes(None, env={"DLTS_HOSTFILE": str(hostfile)}) == ["a=2", "b=4", "c=1"]
    assert nodes(None) == []
    with pytest.raises(LaunchError, match="--hosts: 'train.py'"):
        nodes(None, ["a:2,3", "train.py"])


def test_a_host_without_slots_is_left_out(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=0\n")
    assert read_hostfile(tmp_path / "hosts") == {"a": 2} and nodes(tmp_path / "hosts") == ["a=2"]


@pytest.mark.parametrize(("changes", "expected"), [
    ({"include": "b:1,3@a"}, ["a=2", "b:1,3"]),
    ({"exclude": "b:0@c"}, ["a=2", "b:1,2,3"]),
    ({"num_nodes": 2}, ["a=2", "b=4"]),
    ({"num_gpus": 1}, ["a=1", "b=1", "c=1"]),
    ({"include": "b:1,2,3", "num_gpus": 2}, ["b:1,2"]),
])  # fmt: skip
def test_some_of_a_hostfile(hostfile, changes, expected):
    assert nodes(hostfile, **changes) == expected


@pytest.mark.parametrize("text", ["a", "b:3,1", "c@a:1", "b@a", "b:1@b:2", "a:0,0@c:0"])
@pytest.mark.parametrize("word", ["include", "exclude"])
def test_choice_is_deepspeeds(text, word):
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    words = {"include": "", "exclude": "", word: text}
    deepspeeds = parse_inclusion_exclusion(POOL, words["include"], words["exclude"])
    assert choose_slots(SLOTS, words["include"] or None, words["exclude"] or None) == dict(deepspeeds)


@pytest.mark.parametrize(("text", "changes", "message"), [
    ("localhost\n", {}, "hosts:1: 'localhost' .*host slots=N"),
    ("# nothing\n", {}, "no slots"),
    ("a slots=1\na slots=1\n", {}, "hosts:2: a .*twice"),
    (None, {}, "hostfile: .*hosts"),
    ("a slots=2\n", {"include": "b:0"}, "include: 'b:0' .*b, "),
    ("a slots=2\n", {"include": "a:2"}, "include: 'a:2' .*slot 2 of a.* 2"),
    ("a slots=2\n", {"exclude": "a:x"}, "'a:x' .*HOST:0,1"),
    ("a slots=2\n", {"exclude": "a"}, "exclude: 'a' removes every slot"),
    ("a slots=2\n", {"num_nodes": 2}, "num_nodes: 2 .* 1: a"),
    ("a slots=2\n", {"num_gpus": 3}, "num_gpus: 3 .*a has 2"),
])  # fmt: skip
def test_hostfile_refused(tmp_path, text, changes, message):
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError, match=message):
        nodes(tmp_path / "hosts", **changes)


def test_what_goes_to_other_machines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    Path(".deepspeed_env").write_text("# ours\nWANDB_MODE=offline\nA=b=c\n")
    carried_variables, left = (
        {"NCCL_NET": "AWS Libfabric", "PATH": "/bin"},
        {"HOME": "/h", "NEOX_API_KEY": "x", "SHELL": "s"},
    )
    added = {"PYTHONPATH": f"{tmp_path}:/p", "WANDB_MODE": "offline", "A": "b=c"}
    assert carried({**carried_variables, **left, "PYTHONPATH": "/p"}) == carried_variables | added
    Path(".deepspeed_env").write_text("nonsense\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env:1: (?!.*nonsense).*NAME=VALUE"):
        carried({})


GPUS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(("gpus", "num_gpus", "include", "exclude", "expected"), [
    (GPUS, None, None, None, (4, ("0", "1", "2", "3"))),
    (GPUS, 2, None, None, (2, ("0", "1"))),
    (GPUS, None, "localhost:2,3", None, (2, ("2", "3"))),
    (GPUS, None, "localhost:3,1", None, (2, ("3", "1"))),
    (GPUS, 1, "localhost:2,3", None, (1, ("2",))),
    (GPUS, None, "localhost", None, (4, ("0", "1", "2", "3"))),
    (GPUS, None, None, "localhost:0", (3, ("1", "2", "3"))),
    (GPUS, None, None, "localhost:1,2", (2, ("0", "3"))),
    (GPUS, 1, None, "localhost:0,1", (1, ("2",))),
    (["2", "3"], None, None, None, (2, ("2", "3"))),  # of CUDA_VISIBLE_DEVICES
    ([], None, None, None, (1, ())),
    ([], 4, None, None, (4, ())),
])  # fmt: skip
def test_ranks(gpus, num_gpus, include, exclude, expected):
    assert choose_ranks(gpus, num_gpus, include, exclude) == expected


@pytest.mark.parametrize(("gpus", "num_gpus", "include", "exclude", "message"), [
    (GPUS, None, None, "localhost:7", "exclude: 'localhost:7' .*GPU 7.* 0, 1, 2, 3"),
    (GPUS, None, None, "localhost", "exclude: 'localhost' removes every"),
    (GPUS, None, None, "elsewhere:0", "exclude: 'elsewhere:0' .*another machine"),
    (GPUS, None, "localhost:1", "localhost:0", "exclude: 'localhost:0'.* include: 'localhost:1'"),
    ([], None, None, "localhost:0", "exclude: 'localhost:0' .*none"),
    (["2", "3"], None, "localhost:0", None, "GPU 0; .*2, 3"),
    (GPUS, 5, None, None, "num_gpus: 5 .*0, 1, 2, 3"),
    (GPUS, None, "localhost:7", None, "include: 'localhost:7' .*GPU 7"),
    (GPUS, None, "elsewhere:0", None, "include: 'elsewhere:0' .*another machine"),
    ([], None, "localhost:0", None, "include: 'localhost:0' .*none .*num_gpus"),
])  # fmt: skip
def test_refused(gpus, num_gpus, include, exclude, message):
    with pytest.raises(LaunchError, match=message):
        choose_ranks(gpus, num_gpus, include, exclude)


def test_rank_environment(monkeypatch):
    monkeypatch.setattr("megatron.launch.start.cores", lambda: 8)
    monkeypatch.setattr("os.environ", {"HOME": "/h"})
    node = Node("b", 4, devices=("4", "5", "6", "7"))
    run = Run("nodes", ("python",), (Node("a", 3), node), Path(), None, Path(), node_rank=1, master_addr="10.0.0.7")
    env = environments(run, RankAssignment(3, 7, 1234), Attempt(2, cause="rank 1 of 7 was killed"))[2]
    place = {"RANK": "5", "LOCAL_RANK": "2", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "NEOX_RESTARTS": "2",
             "NEOX_RESTART_CAUSE": "rank 1 of 7 was killed"}  # fmt: skip
    meeting = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
    assert env == {"HOME": "/h", **place, **meeting, "CUDA_VISIBLE_DEVICES": "4,5,6,7", "OMP_NUM_THREADS": "2"}
    monkeypatch.setattr("os.environ", {"OMP_NUM_THREADS": "5"})
    assert environments(run, RankAssignment(3, 7, 1234))[0]["OMP_NUM_THREADS"] == "5"


def test_plan_hands_the_args_over_in_a_file(tmp_path, monkeypatch):
    def args_of(**changes):
        return NeoXArgs.from_dict({**BASE, **changes})

    monkeypatch.setattr("megatron.launch.plan.visible_gpus", lambda env: [])
    args = args_of(num_gpus=2, save=str(tmp_path / "run"), checkpoint_factor=10)
    run = plan("train.py", args, ["--more"])
    write_args_file(run)
    assert (run.world_size, run.log_dir) == (2, tmp_path / "run" / "logs")
    script, flag, path, extra_flag = run.command[-4:]
    assert (script, flag, extra_flag) == ("train.py", "--neox-args", "--more")
    assert NeoXArgs.from_json(Path(path).read_text()) == args.for_world(2)
    assert run.master_port is None, "any free port unless the key is set"
    run = plan("train.py", args_of(log_dir=str(tmp_path), master_port=29500, master_addr="10.0.0.7"))
    assert (run.world_size, run.log_dir, run.master_port) == (1, tmp_path, 29500)
    assert environments(run, RankAssignment(0, 1, 29500))[0]["MASTER_ADDR"] == "10.0.0.7"
