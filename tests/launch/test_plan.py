"""The machines of a run, its launcher, and the command lines that follow."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.launch import dry_run, enter
from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.launch.plan import plan
from megatron.launch.run import Run
from megatron.launch.runners import mvapich, openmpi, pdsh, torchrun
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.reading.command_line import parse_deepy
from tests.launch.runs import ROOT
from tests.training.runs import BASE


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine `here` with four GPUs; a.example resolves to nothing of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron.launch.plan.visible_gpus", lambda env: ["0", "1", "2", "3"])
    for module in ("plan", "typed_variables"):
        local = ("here", "localhost", "127.0.0.1").__contains__
        monkeypatch.setattr(f"megatron.launch.{module}.is_this_machine", local)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.setattr("megatron.launch.typed_variables._addresses", lambda host: set())
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")


def planned(node_rank=None, hosts=(), env=None, **changes) -> Run:
    args = NeoXArgs.from_dict({**BASE, "train_batch_size": 60, **changes})
    return plan("train.py", args, (), node_rank, hosts, env or {})


def test_one_machine_is_started_here_whatever_the_launcher():
    for changes in ({}, {"launcher": "openmpi"}, {"deepspeed_mpi": True}, {"num_nodes": 1}):
        run = planned(num_gpus=2, **changes)
        assert (run.launcher, run.nodes) == ("local", (Node("here", 2, ("0", "1")),)), changes
    Path("mine").write_text("localhost slots=3\n")
    assert planned(hostfile="mine").node == Node("here", 3, ("0", "1", "2"))
    assert planned(hostfile="mine", include="localhost:1,2").node == Node("here", 2, ("1", "2"))
    assert planned(hostfile="mine", force_multi=True).launcher == "pdsh"
    Path("other").write_text("a slots=3\n")
    assert planned(hostfile="other").launcher == "pdsh"


def test_by_hand():
    """By flags, by the variables of accelerate's users and of operators, by a hostfile, by --hosts."""
    run = planned(1, num_nodes=2, master_addr="10.0.0.1", include="localhost:2,3")
    assert (run.launcher, run.node_rank, run.master_addr, run.master_port) == ("nodes", 1, "10.0.0.1", 29500)
    assert run.nodes == (Node(""), Node("here", 2, ("2", "3")))
    env = {"MAIN_NODE_IP": "192.168.1.100", "GPUS": "2,3", "TOTAL_GPUS": "4", "MASTER_PORT": "23456"}
    run = planned(0, env=env, num_nodes=2)
    assert (run.master_addr, run.node.devices, run.total_ranks) == ("192.168.1.100", ("2", "3"), 4)
    assert run.master_port == 23456
    pods = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_NPROC_PER_NODE": "1", "MASTER_ADDR": "job-master-0"}
    run = planned(env=pods)
    assert (len(run.nodes), run.node_rank, run.node.ranks, run.master_addr) == (4, 3, 1, "job-master-0")
    run = planned(env={"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0"})
    assert (len(run.nodes), run.node_rank) == (3, 1)
    run = planned(1, hostfile="hosts")
    assert (run.launcher, run.node_rank, run.master_addr) == ("nodes", 1, "a")
    assert run.nodes == (Node("a", 2), Node("b", 4, ("0", "1", "2", "3")))
    run = planned(0, hosts=["a:2,3", "b"])
    assert (run.node, run.nodes[1].ranks) == (Node("a", 2, ("2", "3")), None)


@pytest.mark.parametrize(("node_rank", "env", "changes", "message"), [
    (None, {}, {"num_nodes": 2}, "num_nodes: 2, .*which"),
    (0, {}, {"num_nodes": 2}, "master_addr"),
    (2, {}, {"num_nodes": 2, "master_addr": "a"}, "node_rank: 2 .*0 to 1"),
    (0, {"GPUS": "all"}, {"num_nodes": 2, "master_addr": "a"}, "GPUS='all'"),
    (0, {"GPUS": "7"}, {"num_nodes": 2, "master_addr": "a"}, "GPU 7"),
    (0, {"TOTAL_GPUS": "5"}, {"hostfile": "hosts"}, "TOTAL_GPUS is 5, .* 6 ranks"),
    (None, {"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, {}, "PET_NNODES='1:4'"),
    (0, {"MASTER_ADDR": "a", "PET_MASTER_PORT": "0"}, {"num_nodes": 2}, "PET_MASTER_PORT='0'"),
    (0, {"MASTER_ADDR": "a", "MASTER_PORT": "x"}, {"num_nodes": 2}, "^MASTER_PORT='x'"),
    (None, {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, {}, "a rank already"),
    (None, {}, {"deepspeed_slurm": True, "deepspeed_mpi": True}, "both true"),
    (None, {}, {"hostfile": "hosts", "launcher": "torchrun"}, "launcher: torchrun"),
    (None, {}, {"hosts": ["a:2,3", "b"]}, "--hosts "),  # not all machines could be started
])  # fmt: skip
def test_refused(node_rank, env, changes, message):
    with pytest.raises(LaunchError, match=message):
        planned(node_rank, env=env, **changes)


TYPED_VARIABLES = {"MAIN_NODE_IP": "10.0.0.9", "TOTAL_GPUS": "6"}


def in_a_job(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("megatron.launch.plan.has_slurm", lambda args, env: True)
    monkeypatch.setattr("megatron.launch.plan.allocation", lambda args, env: (Node("a", 2), Node("b", 4)))
    return {"launcher": "slurm"}


def test_variables_are_taken_however_ranks_are_started(monkeypatch):
    """MAIN_NODE_IP, TOTAL_GPUS and GPUS; flags come first."""
    run = planned(env={"MAIN_NODE_IP": "here", "TOTAL_GPUS": "2", "GPUS": "1,3"})
    assert (run.launcher, run.node.devices) == ("local", ("1", "3"))
    assert planned(env={"GPUS": "1,3"}, include="localhost:0").node.devices == ("0",)
    assert planned(env={"GPUS": "1,3"}, num_gpus=1).node.devices == ("1",)
    for launcher in ("pdsh", "openmpi"):
        assert planned(env=TYPED_VARIABLES, hostfile="hosts", launcher=launcher).master_addr == "10.0.0.9"
    assert planned(env=TYPED_VARIABLES, hostfile="hosts", master_addr="b").master_addr == "b"
    assert planned(env=TYPED_VARIABLES, **in_a_job(monkeypatch)).master_addr == "10.0.0.9"


def test_gpus_says_what_it_chose(monkeypatch, capsys):
    """In many a shell it is a count."""
    assert planned(env={"GPUS": "1"}).node.devices == ("1",)
    assert re.search("GPUS=1 .*: 1\n", capsys.readouterr().err)
    planned(env={"GPUS": "1"}, include="localhost:0")
    planned()
    assert capsys.readouterr().err == "", "where something else chose"
    with pytest.raises(LaunchError, match="GPUS='8'.*GPU 8"):
        planned(env={"GPUS": "8"})
    monkeypatch.setattr("megatron.launch.plan.visible_gpus", lambda env: [])
    for value in ("8", "all"):
        assert planned(env={"GPUS": value}, num_gpus=2).node == Node("here", 2)
        assert f"GPUS={value}" in capsys.readouterr().err


def test_the_main_node_is_one_of_the_machines(monkeypatch, capsys):
    """By name or by what names resolve to; master_addr is not asked."""
    addresses = {"a": {"10.0.0.1"}, "b": {"10.0.0.9", "10.1.0.9"}}
    monkeypatch.setattr("megatron.launch.typed_variables._addresses", lambda host: addresses.get(host, {host}))
    job = in_a_job(monkeypatch)
    monkeypatch.setattr("megatron.launch.plan.has_slurm", lambda args, env: args.launcher == "slurm")
    for changes in ({"hostfile": "hosts"}, {"hostfile": "hosts", "node_rank": 1}, job):
        for address in ("a", "10.0.0.9", "10.1.0.9"):
            assert planned(env={"MAIN_NODE_IP": address}, **changes).master_addr == address
        with pytest.raises(LaunchError, match="MAIN_NODE_IP=10.0.0.7 .*a, b"):
            planned(env={"MAIN_NODE_IP": "10.0.0.7"}, **changes)
        assert planned(env={"MAIN_NODE_IP": "10.0.0.7"}, master_addr="10.0.0.7", **changes).master_addr == "10.0.0.7"
    monkeypatch.setenv("MAIN_NODE_IP", "10.0.0.7")
    with pytest.raises(LaunchError, match="MAIN_NODE_IP"):
        dry_run("train.py", NeoXArgs.from_dict({**BASE, "train_batch_size": 60}), (), None, ["a:2,3", "b:0"])
    assert capsys.readouterr().err == ""
    addresses["b"] = set()
    assert planned(env=TYPED_VARIABLES, hostfile="hosts").master_addr == "10.0.0.9"
    assert re.search("MAIN_NODE_IP=10.0.0.9 .* b ", capsys.readouterr().err)


@pytest.mark.parametrize("variable", ["MAIN_NODE_IP", "TOTAL_GPUS"])
@pytest.mark.parametrize(("node_rank", "changes"), [
    (None, {}), (None, {"launcher": "torchrun"}), (None, {"num_gpus": 1}), (None, {"num_nodes": 1}),
    (0, {"num_nodes": 1}),
])  # fmt: skip
def test_several_machines_never_train_separately(variable, node_rank, changes):
    with pytest.raises(LaunchError, match=f"^{variable}.*--num_nodes"):
        planned(node_rank, env={variable: TYPED_VARIABLES[variable]}, **changes)


def test_other_ranks_than_total_gpus_are_refused(monkeypatch):
    wrong = {"TOTAL_GPUS": "5"}
    for changes in ({"hostfile": "hosts"}, {"hosts": ["a:2,3", "b:0"], "node_rank": 0}, in_a_job(monkeypatch)):
        with pytest.raises(LaunchError, match="TOTAL_GPUS is 5, .* [36] ranks"):
            planned(env=wrong, **changes)
    monkeypatch.setenv("TOTAL_GPUS", "5")
    with pytest.raises(LaunchError, match="TOTAL_GPUS is 5, .* 3 ranks"):
        dry_run("train.py", NeoXArgs.from_dict({**BASE, "train_batch_size": 60}), (), None, ["a:2,3", "b:0"])


def test_a_rank_checks_typed_variables(monkeypatch):
    """A rank of torchrun, or of `python train.py` without a launcher, checks them too."""
    args, env = NeoXArgs.from_dict({**BASE, "distributed_backend": "gloo"}), {"MAIN_NODE_IP": "10.0.0.9"}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here"}
    for rank_env, variable in (
        (env, "MAIN_NODE_IP"),
        ({**rank, "TOTAL_GPUS": "4"}, "TOTAL_GPUS"),
        ({"TOTAL_GPUS": "2"}, "TOTAL_GPUS"),
    ):
        monkeypatch.setattr("os.environ", dict(rank_env))
        with pytest.raises(LaunchError, match=variable):
            enter(args)
    monkeypatch.setattr("os.environ", {**rank, "TOTAL_GPUS": "2"})
    assert enter(args).world_size == 2
    monkeypatch.setattr("os.environ", dict(TYPED_VARIABLES))
    assert enter(args.replace(init_only=True)).world_size == 1, "one process writes the weights of all"


def test_a_layout_that_all_ranks_do_not_fit_is_refused_before_they_start():
    with pytest.raises(ConfigError, match="6 ranks"):
        planned(hostfile="hosts", model_parallel_size=4)


def test_pdsh_line():
    """DeepSpeed's options and exports; a launcher of ours on each host, told its number by pdsh."""
    # The file of arguments still has the exclude: the launchers there go by --hosts.
    run = planned(hostfile="hosts", exclude="b:0", env={"NCCL_NET": "AWS Libfabric", "NEOX_X": "50% $HOME"})
    words, env = pdsh(run)
    assert env == {"PDSH_RCMD_TYPE": "ssh"}
    assert words[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    remote = " ".join(words[6:])
    assert plan("train.py", run.args, (), 1, ["a=2", "b:1,2,3"], {}).node == Node("b", 3, ("1", "2", "3"))
    assert "export NCCL_NET='AWS Libfabric'; export NEOX_X='50%% $HOME'; " in remote
    place = "--hosts a=2 b:1,2,3 --node_rank %n --master_addr a --master_port 29500"
    ends = f"cd {os.getcwd()}; {sys.executable} -u {ROOT}/deepy.py {place} train.py --neox-args {run.args_file}"
    assert remote.endswith(ends)


def test_mpirun_lines():
    run = planned(hostfile="hosts", deepspeed_mpi=True, env={"NCCL_DEBUG": "INFO"})
    words, _ = openmpi(run)
    assert words[:5] == ["mpirun", "-n", "6", "-hostfile", f"{str(run.args_file).removesuffix('.json')}.hosts"]
    exports = [words[k + 1] for k, word in enumerate(words) if word == "-x"]
    assert {"NCCL_DEBUG=INFO", "MASTER_ADDR=a", "MASTER_PORT=29500"} <= set(exports)
    assert words[-5:] == [sys.executable, "-u", "train.py", "--neox-args", str(run.args_file)]
    run = planned(hostfile="hosts", num_gpus=2, launcher="mvapich")
    assert mvapich(run)[0][:5] == ["mpirun", "-np", "4", "-ppn", "2"]
    with pytest.raises(LaunchError, match="a: 2, b: 4"):
        mvapich(planned(hostfile="hosts", launcher="mvapich"))
    with pytest.raises(LaunchError, match="openmpi .*b:1,2,3"):
        openmpi(planned(hostfile="hosts", exclude="b:0", launcher="openmpi"))


def test_torchrun_lines():
    run = planned(1, num_nodes=2, master_addr="a", include="localhost:2,3", launcher="torchrun", max_restarts=2)
    words, env = torchrun(run)
    assert env == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert words[1:] == [
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=a",
        "--master-port=29500", "--max-restarts=2", "train.py", "--neox-args", str(run.args_file),
    ]  # fmt: skip
    assert "--standalone" in torchrun(planned(launcher="torchrun"))[0]


def test_dry_run_of_hosts_prints_the_line_of_every_machine():
    """Row 51: one line typed on each node. Typed again, a line means that machine."""
    Path("train.py").write_text("")
    Path("a.yml").write_text("".join(f"{key}: 8\n" for key in ("num_layers", "hidden_size", "num_attention_heads")))
    Path("b.yml").write_text("seq_length: 8\nmax_position_embeddings: 8\ntrain_batch_size: 10\n")
    typed_words = "--hosts a:2,3 b:0,1,2 --dry-run train.py a b.yml --iteration 3 --set seed=5".split()
    command = parse_deepy(typed_words)
    lines = dry_run(command.user_script, command.args, command.words, command.node_rank, command.hosts)
    script_words = "train.py a b.yml --iteration 3 --set seed=5"
    for rank, (host, gpus) in enumerate({"a": "2,3", "b": "0,1,2"}.items()):
        place = f"--num_nodes 2 --node_rank {rank} --master_addr a --master_port 29500 --include localhost:{gpus}"
        assert lines[rank] == f"{host}: python deepy.py {place} {script_words}"
    parsed = parse_deepy(shlex.split(lines[1].partition("deepy.py ")[2]))
    run = plan(parsed.user_script, parsed.args, (), parsed.node_rank, parsed.hosts, {})
    assert (run.node_rank, run.node.devices, run.master_addr) == (1, ("0", "1", "2"), "a")
    assert (parsed.args.seed, parsed.args.iteration) == (5, 3)
    assert not Path("logs").exists(), "nothing is written"


def test_dry_run_of_every_starter():
    for changes, expected in (
        ({"num_gpus": 2}, "here (2 ranks, GPUs 0,1): "),
        ({"launcher": "torchrun"}, f"CUDA_VISIBLE_DEVICES=0,1,2,3 {sys.executable} -m torch.distributed.run"),
        ({"hostfile": "hosts"}, "PDSH_RCMD_TYPE=ssh pdsh -S"),
        ({"hostfile": "hosts", "launcher": "openmpi"}, "mpirun -n 6"),
    ):
        (line,) = dry_run("train.py", NeoXArgs.from_dict({**BASE, "train_batch_size": 60, **changes}), ())
        assert line.startswith(expected)
    assert not Path("logs").exists()


def test_arguments_longer_than_a_command_line_may_be():
    """128 KiB an argument is what Linux takes; a long list of data files is more."""
    paths = [f"/data/{k:06d}/" + "x" * 100 for k in range(2800)]
    data = {f"{part}_data_paths": paths for part in ("train", "valid", "test")}
    run = planned(hostfile="hosts", data_path=None, **data)
    assert len(run.args.to_json()) > 300 * 1024
    assert sum(map(len, pdsh(run)[0])) < 4096


def test_gloo_takes_no_gpus(monkeypatch):
    """distributed_backend: gloo works on CPUs also beside GPUs, in the launcher and in every rank."""
    assert planned(distributed_backend="gloo", num_gpus=2).node == Node("here", 2, ())
    with pytest.raises(LaunchError, match="localhost:0.*none"):
        planned(distributed_backend="gloo", include="localhost:0")
    for backend, visible in (("gloo", ""), ("auto", "0,1")):
        monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": "0,1"})
        enter(NeoXArgs.from_dict({**BASE, "distributed_backend": backend}))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
