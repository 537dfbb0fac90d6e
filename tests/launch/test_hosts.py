"""Hostfiles, DeepSpeed's include and exclude, and what goes to other machines."""

import collections
from pathlib import Path

import pytest

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node, carried, choose_slots, hosts_of, read_hostfile
from megatron.neox_arguments import NeoXArgs
from tests.training.runs import BASE

POOL = collections.OrderedDict(a=2, b=4, c=1)
SLOTS = {host: list(range(count)) for host, count in POOL.items()}


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\na slots=2\nb slots=4  # bigger\nc slots=1\n")
    return path


def nodes(path, hosts=(), env=None, **changes) -> list[str]:
    args = NeoXArgs.from_dict({**BASE, **({"hostfile": str(path)} if path else {}), **changes})
    return [str(node) for node in hosts_of(args, hosts, env or {})]


def test_hostfile(hostfile):
    assert read_hostfile(hostfile) == POOL
    assert nodes(hostfile) == ["a=2", "b=4", "c=1"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"include": "b:1,3@a"}, ["a=2", "b:1,3"]),
        ({"exclude": "b:0@c"}, ["a=2", "b:1,2,3"]),
        ({"num_nodes": 2}, ["a=2", "b=4"]),
        ({"num_gpus": 1}, ["a=1", "b=1", "c=1"]),
        ({"include": "b:1,2,3", "num_gpus": 2}, ["b:1,2"]),
    ],
)
def test_some_of_a_hostfile(hostfile, changes, expected):
    assert nodes(hostfile, **changes) == expected


def test_hosts_flag_and_dlts_hostfile(hostfile):
    assert nodes(None, ["a:2,3", "b=3", "c"]) == ["a:2,3", "b=3", "c"]
    assert hosts_of(NeoXArgs.from_dict(BASE), ["a:2,3"], {}) == (Node("a", 2, ("2", "3")),)
    assert nodes(None, env={"DLTS_HOSTFILE": str(hostfile)}) == ["a=2", "b=4", "c=1"]
    assert nodes(None) == []


@pytest.mark.parametrize("text", ["a", "b:3,1", "c@a:1", "b@a", "b:1@b:2", "a:0,0@c:0"])
@pytest.mark.parametrize("word", ["include", "exclude"])
def test_choice_is_deepspeeds(text, word):
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    words = {"include": "", "exclude": "", word: text}
    deepspeeds = parse_inclusion_exclusion(POOL, words["include"], words["exclude"])
    assert choose_slots(SLOTS, words["include"] or None, words["exclude"] or None) == dict(deepspeeds)


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("localhost\n", {}, "hosts:1: 'localhost' is not of the form `host slots=N`"),
        ("# nothing\n", {}, "gives no slots"),
        ("a slots=1\na slots=1\n", {}, "hosts:2: a stands in it twice"),
        (None, {}, "hostfile: .*hosts cannot be read"),
        ("a slots=2\n", {"include": "b:0"}, "include: 'b:0' names b, which is not in"),
        ("a slots=2\n", {"include": "a:2"}, "asks for slot 2 of a, which has 2"),
        ("a slots=2\n", {"exclude": "a:x"}, "'a:x' is not of the form host:0,1"),
        ("a slots=2\n", {"exclude": "a"}, "exclude: 'a' leaves no slot"),
        ("a slots=2\n", {"num_nodes": 2}, "num_nodes: 2 asked for, .* leaves 1: a"),
        ("a slots=2\n", {"num_gpus": 3}, "num_gpus: 3 asked for, but a has 2 slots"),
    ],
)
def test_hostfile_refused(tmp_path, text, changes, message):
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError, match=message):
        nodes(tmp_path / "hosts", **changes)


def test_a_hosts_flag_that_swallowed_the_script_is_refused():
    with pytest.raises(LaunchError, match="--hosts: 'train.py' is not of the form"):
        nodes(None, ["a:2,3", "train.py"])


def test_what_goes_to_other_machines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    Path(".deepspeed_env").write_text("# ours\nWANDB_MODE=offline\nA=b=c\n")
    env = {
        "NCCL_NET": "AWS Libfabric",
        "PATH": "/bin",
        "PYTHONPATH": "/p",
        "HOME": "/h",
        "NEOX_API_KEY": "x",
        "SHELL": "s",
    }
    assert carried(env) == {
        "NCCL_NET": "AWS Libfabric", "PATH": "/bin", "PYTHONPATH": f"{tmp_path}:/p", "WANDB_MODE": "offline", "A": "b=c"
    }  # fmt: skip
    Path(".deepspeed_env").write_text("nonsense\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env:1: 'nonsense' is not of the form NAME=VALUE"):
        carried({})
