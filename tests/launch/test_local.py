"""Real launches of tiny scripts: output, failures, signals, and nobody left behind."""

import os
import pty
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import Any

import pytest

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.launch.run import Run
from megatron.launch.start import run_local
from tests.launch.runs import alive, deepy, environment, logs_of, taken_port, wait_for, write_script

LAUNCH = """
import os, sys
from pathlib import Path
from megatron.launch import watch
from megatron.launch.hosts import Node
from megatron.launch.start import run_local
from megatron.launch.run import Run
watch.STOPPED_S, watch.GRACE_S = float(os.environ.pop("STOPPED_S")), float(os.environ.pop("GRACE_S"))
watch.PYTHON_S = 0.5  # tests wait themselves until ranks are ready
watch.STACKS_S = 60.0  # they are written at once; a busy machine takes its time
command = (sys.executable, "-u", "script.py")
logs = Path("logs")
logs.mkdir()
sys.exit(run_local(Run("local", command, (Node("here", int(sys.argv[1])),), logs, None, logs)).code)
"""
PRELUDE = """\
def touch(file):
    Path(file).touch()

def complain(text):
    print("Traceback (most recent call last):\\n" + text, file=sys.stderr)

Path(f"pid_{rank}").write_text(str(os.getpid()))
"""
Launch = Callable[..., Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a script on N ranks under a launcher of its own; all of it is process_end with the test."""
    started: list[Popen[str]] = []

    def start(text: str, ranks: int = 2, stopped_s: float = 1.5, grace_s: float = 10.0, **options: Any) -> Popen[str]:
        write_script(tmp_path, PRELUDE + textwrap.dedent(text))
        env = environment(STOPPED_S=str(stopped_s), GRACE_S=str(grace_s))
        del env["OMP_NUM_THREADS"]
        streams = {"stdout": PIPE, "stderr": PIPE, **options}
        command = [sys.executable, "-c", LAUNCH, str(ranks)]
        started.append(Popen(command, cwd=tmp_path, env=env, text=True, **streams))
        return started[-1]

    yield start
    for process in started:
        with process:  # waits, and closes its streams
            process.kill()


def process_end(run: Popen[str]) -> tuple[int, str, str]:
    out, err = run.communicate(timeout=200)
    return run.returncode, out, err or ""


def pids(folder: Path, count: int) -> list[int]:
    """Process ids that `count` ranks have written down as pid_<rank>."""
    wait_for(lambda: len([p for p in folder.glob("pid_*") if p.read_text()]) == count)
    return [int(p.read_text()) for p in folder.glob("pid_*")]


def test_every_rank_gets_its_place_and_keeps_its_output(launch: Launch, tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    run = launch(f"print(*[os.environ[n] for n in '{names}'.split()]); print('to stderr', file=sys.stderr)")
    code, out, err = process_end(run)
    assert (code, err) == (0, "")
    threads, lines = max(1, len(os.sched_getaffinity(0)) // 2), logs_of(tmp_path)
    port = lines[0].split()[4]
    assert lines == [f"{rank} {rank} 2 127.0.0.1 {port} {threads}\nto stderr\n" for rank in (0, 1)]
    assert out == lines[0], "rank 0 is streamed, the others are not"


CAUSE = """
if rank == 1:
    complain("ValueError: the cause")
    touch("failing")
    wait_for("complained")
    time.sleep(0.3)
    sys.exit(3)
wait_for("failing")
complain("ConnectionError: peer is gone")
touch("complained")
sys.exit(1)
"""
REFUSAL = """
if rank == 1:
    print("train.py: error: a.bin: document 3 holds token id 999", file=sys.stderr)
    touch("refused")
    sys.exit(1)
wait_for("refused")
complain("ConnectionError: peer is gone")
time.sleep(0.3)
sys.exit(1)
"""
HANDLED = """
if rank == 1:
    complain("ValueError: only a warning")
    touch("handled")
    time.sleep(60)
wait_for("handled")
sys.exit(4)
"""
ILL = "if rank == 1: raise ValueError('rank one is ill')\ntime.sleep(60)"
KILLED = "print('last words', rank)\nos.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"


@pytest.mark.parametrize(("script", "code", "facts"), [
    (ILL, 1, r"error: rank 1 of 2 .*exit code 1;.*logs/rank_1.log.*\nTraceback[\s\S]*ValueError: rank one is ill"),
    # As when a peer's end breaks a collective: rank 0 fails first, of what rank 1 did
    (CAUSE, 3, r"peer is gone[\s\S]*error: rank 1 of 2 .*exit code 3;[\s\S]*ValueError: the cause"),
    # One data rank alone meets a bad token; rank 0 only hears that its peer is gone
    (REFUSAL, 1, r"error: rank 1 of 2 .*exit code 1[\s\S]*token id 999"),
    (HANDLED, 4, r"^deepy.py: error: rank 0 of 2 .*exit code 4; .*above"),  # its traceback is not blamed
    (KILLED, 137, r"error: rank 1 of 2 .*SIGKILL;.*logs/rank_1.log.*\nlast words 1"),
], ids=["first", "cause", "refusal", "handled", "killed"])  # fmt: skip
def test_the_rank_to_blame_is_shown_last(launch: Launch, tmp_path: Path, script: str, code: int, facts: str) -> None:
    all_started = "wait_for('pid_0', 'pid_1')\n"  # else the first to end has the other killed before it starts
    run = launch(all_started + script, grace_s=1.0 if script == HANDLED else 10.0, stderr=STDOUT)
    exit_code, out, _ = process_end(run)
    assert exit_code == code and re.search(facts + r"\n\Z", out), out
    assert re.search("traceback|exception|error:", out, re.I), "what people grep for"
    assert not any(alive(pid) for pid in pids(tmp_path, 2))


@pytest.mark.ends_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_rank_that_was_ended_from_outside_is_the_cause(launch: Launch, number: signal.Signals) -> None:
    """As by a scheduler, or by hand, while the ranks still start: gloo's complaint is the other's."""
    script = f"""
    if rank == 1:
        signal.signal({int(number)}, signal.SIG_DFL)
        wait_for("complained")
        os.kill(os.getpid(), {int(number)})
    complain("ConnectionError: peer is gone")
    touch("complained")
    time.sleep(0.3)
    sys.exit(1)
    """
    code, _, err = process_end(launch(script))
    assert code == 128 + number and re.search(f"error: rank 1 of 2 .*{number.name}", err)


@pytest.mark.ends_processes
def test_signals_that_end_ranks_before_they_act_on_them_are_no_errors(launch: Launch, tmp_path: Path) -> None:
    run = launch("signal.signal(2, signal.SIG_DFL); touch(f'ready_{rank}'); time.sleep(60)")
    wait_for(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)))
    run.send_signal(signal.SIGINT)
    code, out, err = process_end(run)
    assert (code, out) == (130, "") and "SIGINT" in err and "error" not in err and err.count("\n") == 2


@pytest.mark.ends_processes
def test_a_stopped_rank_ends_the_run_with_every_stack(launch: Launch) -> None:
    """While it is stopped nothing but the launcher can tell."""
    script = """
    from megatron.process import show_stacks_on_signal
    show_stacks_on_signal()
    def waits_for_the_other():
        time.sleep(60)
    def stops_here():
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    stops_here() if rank == 1 else waits_for_the_other()
    """
    code, log, _ = process_end(launch(script, stderr=STDOUT))
    assert code == 128 + signal.SIGSTOP
    assert "in waits_for_the_other" in log and "in stops_here" in log
    assert re.search("error: rank 1 of 2 .*SIGSTOP", log.splitlines()[-1])


@pytest.mark.ends_processes
def test_a_short_stop_is_forgiven(launch: Launch) -> None:
    script = """
    import subprocess
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    code, _, err = process_end(launch(script, stopped_s=60.0))
    assert (code, err) == (0, "")


@pytest.mark.ends_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_rank(launch: Launch, tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
    def stop(number, frame):
        print("stopped by", number)
        sys.exit(0)
    signal.signal({int(number)}, stop)
    touch(f"ready_{{rank}}")
    time.sleep(60)
    """
    run = launch(script)
    wait_for(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)))
    run.send_signal(number)
    code, out, err = process_end(run)
    assert (code, out) == (0, f"stopped by {int(number)}\n")
    assert len(err.splitlines()) == 1 and number.name in err, "it is acknowledged, and nothing else is said"
    assert logs_of(tmp_path)[1] == f"stopped by {int(number)}\n"


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(launch: Launch, tmp_path: Path) -> None:
    script = """
    import subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        child = subprocess.Popen(['sleep', '60'])
        Path('pid_child').write_text(str(child.pid))
        touch('ready')
        time.sleep(60)
    wait_for('ready')
    sys.exit(5)
    """
    run = launch(script, grace_s=1.0)
    left = pids(tmp_path, 3)
    assert process_end(run)[0] == 5
    assert not any(alive(pid) for pid in left)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_end_when_the_launcher_is_killed_outright(launch: Launch, tmp_path: Path) -> None:
    run = launch("time.sleep(60)")
    left = pids(tmp_path, 2)
    run.kill()
    wait_for(lambda: not any(alive(pid) for pid in left))


def test_rank_0_sees_a_terminal_when_there_is_one(launch: Launch, tmp_path: Path) -> None:
    parent_end, child_end = pty.openpty()
    run = launch("print('terminal', sys.stdout.isatty(), sys.stderr.isatty())", stdout=child_end, stderr=child_end)
    run.wait(200)
    os.close(child_end)
    assert os.read(parent_end, 1000) == b"terminal True True\r\n"
    os.close(parent_end)
    assert logs_of(tmp_path) == ["terminal True True\n", "terminal False False\n"]


SEPARATED = """
from megatron.process.terminal import for_log_file, for_terminal, terminal_log
print(for_log_file(f"long {rank}"))
print(for_terminal("short") if terminal_log() else "no terminal")
"""


def test_a_terminal_shows_short_lines_and_the_log_has_the_long_ones(launch: Launch, tmp_path: Path) -> None:
    parent_end, child_end = pty.openpty()
    launch(SEPARATED, stdout=child_end, stderr=child_end).wait(200)
    os.close(child_end)
    assert os.read(parent_end, 1000) == b"short\r\n"
    os.close(parent_end)
    assert logs_of(tmp_path) == ["long 0\n", "long 1\nno terminal\n"]


def test_without_a_terminal_nothing_is_separated(launch: Launch, tmp_path: Path) -> None:
    run = launch(SEPARATED)
    assert run.communicate(timeout=200)[0] == "long 0\nno terminal\n"
    assert logs_of(tmp_path)[0] == "long 0\nno terminal\n"


@pytest.mark.parametrize("fails", [False, True])
def test_quiet_shows_only_failures(tmp_path: Path, fails: bool) -> None:
    text = f"print('rank', rank, flush=True)\nif {fails} and rank == 0: raise ValueError('seen')"
    done = deepy(tmp_path, text, "--quiet")
    assert logs_of(tmp_path)[0].startswith("rank 0\n")
    assert done.returncode == fails and ("ValueError: seen" in done.stdout) == fails
    assert fails or done.stdout == ""


def test_a_lost_reader_does_not_end_the_run(launch: Launch, tmp_path: Path) -> None:
    run = launch("print('one')\nwait_for('lost')\nprint('two')\ntouch(f'done_{rank}')")
    assert run.stdout.readline() == "one\n"
    run.stdout.close()
    (tmp_path / "lost").touch()
    assert run.wait(200) == 0 and (tmp_path / "done_0").exists() and (tmp_path / "done_1").exists()


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with taken_port() as port, pytest.raises(LaunchError, match=f"master_port: port {port}"):
        run_local(Run("local", ("true",), (Node("here", 2),), tmp_path, None, tmp_path, master_port=port))


LISTENING = """
import logging
from datetime import timedelta
import torch.distributed as dist
from megatron.distributed.rendezvous import Rendezvous
from megatron.launch.enter import enter
from megatron.neox_arguments import NeoXArgs
place = enter(NeoXArgs.from_dict({"num_layers": 2, "hidden-size": 8, "num_attention_heads": 2, "seq_length": 8,
    "max_position_embeddings": 8, "train_batch_size": 8, "distributed_backend": "gloo"}))
rendezvous = Rendezvous(place, 60.0, logging.getLogger("x"))
rendezvous.arrive({})
if rank == 0:
    store = rendezvous.release(timedelta(seconds=60))
else:
    rendezvous.answer_until_released(lambda question: None)
    store = rendezvous.release(timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.barrier()
inodes = {os.readlink(link)[8:-1] for link in Path("/proc/self/fd").iterdir()
          if link.exists() or link.is_symlink() and os.readlink(link).startswith("socket:")}
for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
    for line in Path(file).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:  # it listens, and is ours
            print("listens at", fields[1].partition(":")[0])
dist.barrier()
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_on_one_machine_listens_only_on_loopback(launch: Launch, tmp_path: Path) -> None:
    """As `ss -ltn` shows it, although MASTER_ADDR is another address of this machine, where it has one."""
    address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        address = probe.getsockname()[0]
    code, _, err = process_end(launch(f"os.environ['MASTER_ADDR'] = {address!r}\n{LISTENING}"))
    assert code == 0, err
    listening = [
        re.findall(r"listens at (\w+)", (tmp_path / "logs" / f"rank_{rank}.log").read_text()) for rank in (0, 1)
    ]
    assert len(listening[0]) >= 2 and listening[1], "the store and gloo"
    assert {place for places in listening for place in places} == {"0100007F"}, "127.0.0.1"
