"""Real launches of tiny scripts: output, failures, signals, and nobody left behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron.launch.environment import LaunchError
from megatron.launch.hosts import Node
from megatron.launch.local import run_local
from megatron.launch.run import Run

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = """
import sys
from pathlib import Path
from megatron.launch import watch
from megatron.launch.hosts import Node
from megatron.launch.local import run_local
from megatron.launch.run import Run
watch.STOPPED_S = 1.5
command = (sys.executable, "-u", sys.argv[1])
logs = Path("logs")
logs.mkdir()
sys.exit(run_local(Run("local", command, (Node("here", int(sys.argv[2])),), logs, None, logs)).code)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts a script on N ranks under a launcher of its own; all of it is ended with the test."""
    started = []

    def start(text: str, ranks: int, **options) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS"):
            env.pop(name, None)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        command = [sys.executable, "-c", LAUNCH, str(script), str(ranks)]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder: Path, count: int) -> list[int]:
    """Process ids that `count` ranks have written down as pid_<rank>."""
    wait_for(lambda: len([p for p in folder.glob("pid_*") if p.read_text()]) == count)
    return [int(p.read_text()) for p in folder.glob("pid_*")]


def test_every_rank_gets_its_place_and_keeps_its_output(launch, tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    run = launch(f"print(*[os.environ[n] for n in '{names}'.split()]); print('to stderr', file=sys.stderr)", 2)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    port = lines[0].split()[4]
    for rank in (0, 1):
        assert lines[rank] == f"{rank} {rank} 2 127.0.0.1 {port} {threads}\nto stderr\n"
    assert out == lines[0], "rank 0 is streamed, the others are not"


def test_output_is_streamed_while_the_run_goes_on(launch):
    run = launch("print('begun'); time.sleep(60)", 2)
    assert run.stdout.readline() == "begun\n"
    assert run.poll() is None


def test_first_failing_rank_is_shown_and_ends_the_others(launch, tmp_path):
    run = launch(
        """
        open(f'pid_{rank}', 'w').write(str(os.getpid()))
        if rank == 1:
            while not all(os.path.exists(f'pid_{r}') for r in range(3)):
                time.sleep(0.02)
            raise ValueError('rank one is ill')
        time.sleep(60)
        """,
        3,
    )
    out, err = run.communicate(timeout=30)
    assert run.returncode == 1
    first, second = err.splitlines()[:2]
    assert first == "deepy.py: error: rank 1 of 3 failed with exit code 1; logs/rank_1.log ends with:"
    assert second == "Traceback (most recent call last):"
    assert "ValueError: rank one is ill" in err
    assert not any(alive(pid) for pid in pids(tmp_path, 3))


def test_the_cause_comes_last_after_the_complaint_of_rank_0(launch):
    """As when a peer's end breaks a collective: rank 0 fails first, of what rank 1 did."""
    run = launch(
        """
        if rank == 1:
            print('Traceback (most recent call last):\\nValueError: the cause', file=sys.stderr)
            time.sleep(1)
            sys.exit(3)
        time.sleep(0.5)
        raise ConnectionError('peer is gone')
        """,
        2,
        stderr=subprocess.STDOUT,
    )
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 3
    assert out.index("peer is gone") < out.index("deepy.py: error: rank 1 of 2 failed with exit code 3;")
    assert out.rstrip().endswith("ValueError: the cause")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_rank_that_was_ended_from_outside_is_the_cause(launch, tmp_path, number):
    """As by a scheduler, or by hand, while the ranks still start: gloo's complaint is the other's."""
    run = launch(
        f"""
        if rank == 1:
            signal.signal({int(number)}, signal.SIG_DFL)
            while not os.path.exists('complained'):
                time.sleep(0.01)
            os.kill(os.getpid(), {int(number)})
        print('Traceback (most recent call last):\\nConnectionError: peer is gone', file=sys.stderr)
        open('complained', 'w').close()
        time.sleep(0.3)
        sys.exit(1)
        """,
        2,
    )
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + number
    assert f"deepy.py: error: rank 1 of 2 was killed by {number.name};" in err


def test_signals_that_end_ranks_before_they_act_on_them_are_no_errors(launch, tmp_path):
    run = launch("signal.signal(2, signal.SIG_DFL); open(f'pid_{rank}', 'w').write('x'); time.sleep(60)", 2)
    wait_for(lambda: all((tmp_path / f"pid_{rank}").exists() for rank in (0, 1)))
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out, err) == (130, "", "deepy.py: ended by SIGINT\n")


def test_a_refusal_in_one_line_is_what_is_shown(launch):
    """One data rank alone meets a bad token; rank 0 only hears that its peer is gone."""
    run = launch(
        """
        if rank == 1:
            print('train.py: error: a.bin: document 3 holds token id 999', file=sys.stderr)
            sys.exit(1)
        time.sleep(0.2)
        raise ConnectionError('peer is gone')
        """,
        2,
    )
    _, err = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "deepy.py: error: rank 1 of 2 failed with exit code 1" in err and "token id 999" in err


def test_a_traceback_that_was_handled_is_not_blamed(launch):
    run = launch(
        """
        if rank == 1:
            print('Traceback (most recent call last):\\nValueError: only a warning', file=sys.stderr)
            time.sleep(60)
        time.sleep(0.5)
        sys.exit(4)
        """,
        2,
    )
    _, err = run.communicate(timeout=30)
    assert run.returncode == 4
    assert err == "deepy.py: error: rank 0 of 2 failed with exit code 4; its output is above\n"


def test_a_killed_rank_is_named_with_its_signal(launch):
    run = launch(
        "print('last words', rank); time.sleep(rank)\nos.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", 2
    )
    _, err = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGKILL
    assert err.endswith("error: rank 1 of 2 was killed by SIGKILL; logs/rank_1.log ends with:\nlast words 1\n")


def test_a_stopped_rank_ends_the_run_with_every_stack(launch):
    """While it is stopped nothing but the launcher can tell."""
    run = launch(
        """
        from megatron.process import show_stacks_on_signal
        show_stacks_on_signal()
        def waits_for_the_other():
            time.sleep(60)
        def stops_here():
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        stops_here() if rank == 1 else waits_for_the_other()
        """,
        2,
        stderr=subprocess.STDOUT,
    )
    log, _ = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGSTOP
    assert "in waits_for_the_other" in log and "in stops_here" in log
    assert log.rstrip().splitlines()[-1].startswith("deepy.py: error: rank 1 of 2 was stopped (SIGSTOP)")


def test_a_short_stop_is_forgiven(launch):
    run = launch(
        """
        import subprocess
        if rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(2)
        """,
        2,
    )
    _, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_rank(launch, tmp_path, number):
    run = launch(
        f"""
        def stop(number, frame):
            print('stopped by', number)
            sys.exit(0)
        signal.signal({int(number)}, stop)
        open(f'pid_{{rank}}', 'w').write(str(os.getpid()))
        time.sleep(60)
        """,
        2,
    )
    pids(tmp_path, 2)
    run.send_signal(number)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (0, "")
    assert out == f"stopped by {int(number)}\n"
    assert (tmp_path / "logs" / "rank_1.log").read_text() == out


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(launch, tmp_path):
    run = launch(
        """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            child = subprocess.Popen(['sleep', '60'])
            open('pid_child', 'w').write(str(child.pid))
            open('pid_0', 'w').write(str(os.getpid()))
            time.sleep(60)
        while not os.path.exists('pid_0'):
            time.sleep(0.02)
        sys.exit(5)
        """,
        2,
    )
    left = pids(tmp_path, 2)
    run.communicate(timeout=30)
    assert run.returncode == 5
    assert not any(alive(pid) for pid in left)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_end_when_the_launcher_is_killed_outright(launch, tmp_path):
    run = launch("open(f'pid_{rank}', 'w').write(str(os.getpid())); time.sleep(60)", 2)
    left = pids(tmp_path, 2)
    run.kill()
    wait_for(lambda: not any(alive(pid) for pid in left))


def test_one_rank_is_watched_like_several(launch, tmp_path):
    run = launch("print(os.environ['WORLD_SIZE']); sys.exit(6)", 1)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, out) == (6, "1\n")
    assert err == "deepy.py: error: rank 0 of 1 failed with exit code 6; its output is above\n"
    assert (tmp_path / "logs" / "rank_0.log").read_text() == out


def test_rank_0_sees_a_terminal_when_there_is_one(launch, tmp_path):
    import pty

    parent_end, child_end = pty.openpty()
    run = launch("print('terminal', sys.stdout.isatty(), sys.stderr.isatty())", 2, stdout=child_end, stderr=child_end)
    run.wait(30)
    os.close(child_end)
    assert os.read(parent_end, 1000) == b"terminal True True\r\n"
    os.close(parent_end)
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert logs == ["terminal True True\n", "terminal False False\n"]


def test_a_lost_reader_does_not_end_the_run(launch, tmp_path):
    run = launch("print('one')\ntime.sleep(1)\nprint('two')\nopen(f'done_{rank}', 'w').close()", 2)
    assert run.stdout.readline() == "one\n"
    run.stdout.close()
    assert run.wait(30) == 0
    assert (tmp_path / "done_0").exists() and (tmp_path / "done_1").exists()


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"master_port: port {port} cannot be used"):
            run_local(Run("local", ("true",), (Node("here", 2),), tmp_path, None, tmp_path, master_port=port))
