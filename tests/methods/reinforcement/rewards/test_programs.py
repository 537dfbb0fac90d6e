"""Programs that a model wrote: what they can reach, and that nothing of them is left."""

import ctypes
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.methods.reinforcement.rewards.functions import Completion, RewardFunctions
from megatron.methods.reinforcement.rewards.programs import NoIsolation, prepare_programs, run_program, start_trial
from tests.launch.runs import wait_for

FORKS = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    pass
"""
WRITES = """
written = 0
try:
    for number in range(100):
        with open(f"{number}", "wb") as file:
            written += file.write(bytes(10 << 20))
except OSError:
    pass
"""

# What other processes were started with, and hold.
READS_PROC = """
import os
numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
found = []
for number in numbers:
    for name in ("environ", "cmdline", "mem", "fd/5", "fd/6", "fd/7"):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file:
                if number != os.getpid() and b"SECRET" + b"_KEY" in file.read(1 << 20):
                    found.append((number, name))
        except OSError:
            pass
"""


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        prepare_programs()
    except NoIsolation as problem:
        refused = ("Operation not permitted", "Permission denied", "Function not implemented")
        if not any(words in str(problem) for words in refused):  # that is not for the machine to allow
            raise
        pytest.skip(str(problem))


def test_the_tests_decide() -> None:
    assert run_program("def f(x):\n    return 2 * x", "assert f(2) == 4", 20)
    assert not run_program("def f(x):\n    return x", "assert f(2) == 4", 20)


@pytest.mark.parametrize("program", [
    *("import sys; sys.exit(0)", "import os; os._exit(0)", "x = '''", "raise SystemExit", "def f(:", "1 / 0"),
    *("quit()", "import os; os.write(3, b'x' * 1000)"),
    "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
])  # fmt: skip
def test_no_program_passes_without_its_tests(program: str) -> None:
    assert not run_program(program, "x = '''", 20)
    assert not run_program(program, "pass", 20)


def test_a_port_outside_is_closed() -> None:
    """The listener is reached from here, and nothing is from within, by address or by file."""
    connect = "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = connect.format(port=listener.getsockname()[1])
        exec(connect, {})
        listener.accept()[0].close()
        refused = f"try:\n    {'; '.join(connect.splitlines())}\nexcept ConnectionRefusedError:\n    refused = True\n"
        refused += "except OSError as problem:\n    refused = 'unreachable' in str(problem)"
        assert run_program(refused, "assert refused", 20)
        assert not run_program(connect, "pass", 20)
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    names = "import socket\nnames = [name for _, name in socket.if_nameindex()]"
    assert run_program(names, "assert 'eth0' not in names and not any(n.startswith('en') for n in names)", 20)


@pytest.mark.parametrize(("program", "problem"), [
    ("x = bytearray(2 << 30)", "MemoryError"),
    ("x = []\n    while True: x.append(bytes(1 << 20))", "MemoryError"),
    ("open('big', 'wb').write(bytes(20 << 20))", "OSError"),
    ("open('/etc/rewards_test', 'w')", "OSError"),
], ids=["memory", "growing", "file", "disk"])  # fmt: skip
def test_what_is_forbidden_is_refused(program: str, problem: str) -> None:
    assert not run_program(program.replace("\n    ", "\n"), "pass", 100)
    refused = f"refused = False\ntry:\n    {program}\nexcept {problem}:\n    refused = True"
    assert run_program(refused, "assert refused", 100)
    assert not Path("/etc/rewards_test").exists()


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (FORKS, "assert 1 < count < 100, count"),
        (WRITES, "assert written < 70 << 20, written"),
        (
            "import os, sys\nseen = [sys.stdin.read(), os.getcwd(), os.environ['HOME']]",
            "assert seen == ['', '/dev/shm', '/dev/shm']",
        ),
        (
            "import os\nseen = set(os.environ)",
            "assert seen.isdisjoint({'SECRET_KEY', 'PYTHONPATH', 'CUDA_VISIBLE_DEVICES'})",
        ),
        (
            "import os\nfound = [os.path.exists(name) for name in ('{home}/.profile', '{tmp}')]",
            "assert not any(found)",
        ),
        ("import os\nseen = os.getpid(), os.getuid()", "assert 1 < seen[0] < 10 and seen[1] != 0"),
        (READS_PROC, "assert found == [] and (numbers == [] or max(numbers) < 10), (found, numbers)"),
        ("import numpy\nx = numpy.ones(3)", "assert x.sum() == 3"),
        ("open('a', 'w').write('b')", "assert open('a').read() == 'b'"),
        ("import ctypes\nlibc = ctypes.CDLL(None)", "assert libc.mount(b'none', b'/', None, 0x1020, None) != 0"),
    ],
    ids=["forks", "files", "folder", "environment", "home", "process", "proc", "numpy", "writes", "mount"],
)
def test_what_a_program_sees(program: str, tests: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "1")
    names = {"{home}": pwd.getpwuid(os.getuid()).pw_dir, "{tmp}": str(tmp_path)}
    for name, value in names.items():
        program = program.replace(name, value)
    assert run_program(program, tests, 20)


@pytest.mark.parametrize("program", [
    "while True: pass",
    "import time\ntime.sleep(60)",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: 0",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ntime.sleep(60)",
    "import os\nwhile True: os.write(3, b'x' * 1000)",
], ids=["loop", "sleep", "bomb", "session", "report"])  # fmt: skip
def test_nothing_is_left_of_what_does_not_end(program: str) -> None:
    with all_end():
        assert not run_program(program, "pass", 1.2)


def test_folders_of_the_run_are_hidden() -> None:
    """Folders of Python or of the system stay visible as far as Python needs them."""
    program = "import os, numpy\nseen = os.listdir('/usr/share')"
    assert run_program(program, "assert seen != []", 20)
    hidden = ["/usr/share", "/usr", "/", str(Path(sys.prefix).parent)]
    assert run_program(program, "assert seen == []", 20, hidden)


def test_children_of_a_program_end_with_it() -> None:
    with all_end():
        program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)"
        assert run_program(program, "time.sleep(1)", 20)


def test_closing_ends_the_program_that_runs() -> None:
    functions = RewardFunctions(["code"], timeout_s=50)
    functions.check()
    completions = [Completion("p", "```python\nwhile True: pass\n```", [], {"tests": "pass"})]
    processes_before = descendants()
    with ThreadPoolExecutor(1) as thread, all_end():
        scored = thread.submit(functions.score, completions)
        wait_for(lambda: len(descendants() - processes_before) >= 3)  # the sandbox, its first process, the program
        functions.close()
        scored.exception(100)


def test_code_takes_the_last_block_and_tests_as_text_or_list() -> None:
    rows = [
        ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "assert x == 2"),
        ("x = 2", ["assert x == 2", "assert x < 3"]),
        ("```python\nx = 1\n```", "assert x == 2"),
        ("x = 2", None),
        ("x = 2", 5),
        ("x = 2", ["assert x == 2", "assert x =="]),
    ]
    with closing(RewardFunctions(["code"], timeout_s=100, workers=2)) as functions:
        result = functions.score([Completion("p", text, [], {"tests": tests}) for text, tests in rows])
    assert result.parts == {"code": [1.0, 1.0, 0.0, None, None, None]}
    assert [(failure.row, failure.reason.partition(":")[0]) for failure in result.failures] == [
        (4, "ValueError"),
        (5, "ValueError"),
    ]
    assert "line 2" in result.failures[1].reason


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a capability away from root")
def test_where_programs_cannot_be_isolated_code_is_refused() -> None:
    script = (
        "from megatron.methods.reinforcement.rewards.functions import RewardFunctions\n"
        "try: RewardFunctions(['code'], timeout_s=10).check()\n"
        "except Exception as problem: print(type(problem).__name__, problem)\n"
    )
    libc, drop, sys_admin = ctypes.CDLL(None), 24, 21
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600,
                          preexec_fn=lambda: libc.prctl(drop, sys_admin, 0, 0, 0))  # fmt: skip
    message = "programs cannot be isolated here (setup: unshare: Operation not permitted); it needs Linux"
    assert done.stdout.startswith(f"RewardError code: {message}"), done


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as a user already")
def test_users_need_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    python = "/usr/bin/python3"
    if not os.access(python, os.X_OK):
        pytest.skip(f"needs {python}, which all users may run")
    monkeypatch.setenv("SECRET_KEY", "1")
    limits = {"CPU": 20, "AS": 1 << 30, "FSIZE": 1 << 20, "NPROC": 64, "CORE": 0, "NOFILE": 128}
    program = "import os\nseen = os.getuid(), os.getpid() < 10, os.listdir('/tmp')\nopen('a', 'w')\n"
    tests = "assert seen == (65534, True, []) and found == [], (seen, found)"
    for last, passes in (("", b"passed"), ("\nopen('/var/tmp/x', 'w')", b"")):
        with start_trial(
            program + READS_PROC + last, tests, limits, python, user=65534, group=65534, extra_groups=[]
        ) as process:
            assert process.communicate(timeout=600)[0] == passes


def descendants() -> set[tuple[int, str]]:
    """The processes that this one has started, directly or not: number and time of start."""
    descendant_pids, parents = {os.getpid()}, {pid: parent for (pid, _), parent in processes().items()}
    while children := {child for child, parent in parents.items() if parent in descendant_pids} - descendant_pids:
        descendant_pids |= children
    return {(pid, start) for pid, start in processes() if pid in descendant_pids and pid != os.getpid()}


def processes() -> dict[tuple[int, str], int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name), fields[19]] = int(fields[1])
    return parents


@contextmanager
def all_end() -> Iterator[None]:
    """At the end none runs of the processes that were started within, whoever their parent is by then."""
    processes_before, started_processes, done = descendants(), set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            started_processes.update(descendants())
            time.sleep(0.02)

    begin = subprocess.Popen.__init__

    def noted(process: subprocess.Popen, *arguments: Any, **options: Any) -> None:
        begin(process, *arguments, **options)  # it may end before anybody looks
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        started_processes.add((process.pid, fields[19]))

    looks = threading.Thread(target=look)
    looks.start()
    try:
        with mock.patch.object(subprocess.Popen, "__init__", noted):
            yield
    finally:
        done.set()
        looks.join()
    assert started_processes - processes_before
    wait_for(lambda: not (started_processes - processes_before) & processes().keys())
