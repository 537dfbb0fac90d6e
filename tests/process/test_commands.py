"""How commands read their words, and how they end when nobody reads what they write."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.process.command_parser import CommandParser
from tests.launch.runs import DEEPY, ROOT, environment, write_script

# Writes as a command does, within its own handling of errors; what it leaves says how it was unwound.
COMMAND = """
import sys, threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from megatron.process import outlive_readers, run_command
def write(how):
    if how == "thread":
        thread = threading.Thread(target=write, args=("many",))
        thread.start()
        thread.join()
        print("more")
    if how == "executor":
        with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
            list(pool.map(write, ["many"] * 4))
    if how == "pool":
        with get_context("fork").Pool(2) as pool:
            pool.map(write, ["many"] * 4)
    for number in range(100_000 if how == "many" else 3):
        print(number)
def main():
    how = sys.argv[1]
    if how == "run":
        outlive_readers()
        how = "many"
    if how in ("executor", "pool"):
        write(how)
    if how == "bug":
        raise ValueError("of its own")
    if how == "error":
        sys.exit("error: of its own")
    try:
        write(how)
    except OSError as problem:
        return type(problem).__name__
    except Exception:
        return 5
    finally:
        Path("unwound").touch()
    return 0
run_command(main)
"""


def read_by_nobody(words: list[str], folder: Path, stderr: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    """A command whose stdout has no reader from its beginning, as behind a `head` that has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        return subprocess.run(words, cwd=folder, env=environment(), stdout=pipe, stderr=stderr, text=True, timeout=120)


@pytest.mark.parametrize("unbuffered", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("mode", ["many", "few", "thread"])
def test_a_command_ends_by_sigpipe(mode: str, unbuffered: list[str], tmp_path: Path) -> None:
    """In silence, at whatever write, and unwound; what it would say of an OSError is not said."""
    done = read_by_nobody([sys.executable, *unbuffered, "-c", COMMAND, mode], tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    assert (tmp_path / "unwound").exists()


@pytest.mark.parametrize("mode", ["executor", "pool"])
def test_a_command_whose_processes_write_ends_so_too(mode: str, tmp_path: Path) -> None:
    done = read_by_nobody([sys.executable, "-c", COMMAND, mode], tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "") and not (tmp_path / "unwound").exists()


@pytest.mark.parametrize("mode", ["bug", "error"])
def test_an_error_of_its_own_is_told(mode: str, tmp_path: Path) -> None:
    done = read_by_nobody([sys.executable, "-c", COMMAND, mode], tmp_path)
    assert done.returncode == 1 and "of its own" in done.stderr and "Broken" not in done.stderr


def test_a_run_outlives_its_readers(tmp_path: Path) -> None:
    done = read_by_nobody([sys.executable, "-c", COMMAND, "run"], tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("BrokenPipeError")


def test_the_launcher_of_a_run_outlives_its_readers_too(tmp_path: Path) -> None:
    """The launcher itself prints that it starts the ranks again."""
    write_script(
        tmp_path,
        """
        for number in range(3000):
            print("iteration", number, flush=True)
        if start == 0:
            raise ValueError("not yet")
        Path(f"trained_{rank}").touch()
    """,
    )
    words = [*DEEPY, "--num_gpus", "2", "--max-restarts", "1", "script.py", "model.yml"]
    done = read_by_nobody(words, tmp_path, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and {path.name for path in tmp_path.glob("trained_*")} == {"trained_0", "trained_1"}


@pytest.mark.parametrize("words", [
    ["deepy.py", "--help-config", "lr*"], ["train.py", "--help"], ["tools/new_config.py", "--help"],
    ["tools/datasets/inspect.py", "--help"], ["-I", "megatron/launch/torch_builds.py", "--cpu"],
])  # fmt: skip
def test_commands_as_typed(words: list[str]) -> None:
    done = read_by_nobody([sys.executable, *words], ROOT)
    assert done.returncode == -signal.SIGPIPE and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("intermixed", [False, True])
def test_flags_cannot_be_abbreviated(intermixed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="it.py")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--upload-neox-only", action="store_true")
    parse = parser.parse_intermixed_args if intermixed else parser.parse_args
    assert parse(["a", "--upload-neox-only"]).upload_neox_only
    for flag in ("--upload-neox", "--upload-neox-onyl", "--upload-neox=3"):
        with pytest.raises(SystemExit) as done:
            parse(["a", flag])
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert done.value.code == 2 and flag in last_line and "--upload-neox-only?" in last_line


def test_subcommands_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser(prog="it.py")
    parser.add_subparsers(dest="command").add_parser("list").add_argument("--states")
    assert parser.parse_args(["list", "--states", "a"]).states == "a"
    with pytest.raises(SystemExit):
        parser.parse_args(["list", "--state", "a"])
    assert "--states?" in capsys.readouterr().err


def test_who_makes_a_parser_may_say_otherwise() -> None:
    parser = CommandParser(prog="it.py", allow_abbrev=True, formatter_class=argparse.MetavarTypeHelpFormatter)
    parser.add_argument("--states", type=str)
    assert (
        parser.parse_args(["--state", "a"]).states == "a"
        and parser.formatter_class is argparse.MetavarTypeHelpFormatter
    )
    assert CommandParser().formatter_class is argparse.RawDescriptionHelpFormatter
