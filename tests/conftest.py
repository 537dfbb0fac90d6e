"""Marks, environment and the worker pool of the whole test suite."""

import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.budget import BudgetPlugin
from tests.forked import ForkedPlugin
from tests.last_run import read_record
from tests.pool.client import start_server, stop_server
from tests.pool.protocol import ADDRESS_VARIABLE
from tests.retry import RetryPlugin
from tests.selection import SelectionPlugin

ON_REQUEST = ("more", "product", "soak", "real", "slurm", "browser", "install")
SERVER = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--changed", action="store_true", help="leave out what no change since the last full run touches")
    group.addoption("--record", action="store_true", help="write tests/last_full_run.json")
    with suppress(ValueError):  # an environment of before still has pytest-forked, and its option of this name
        group.addoption("--forked", action="store_true", help="run each test in a process of its own")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports torch, tokenizers or DeepSpeed.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every command that a test starts would compile all modules again
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.fsync = lambda fd: None  # each waits for the disk, thousands of times; no test takes the power away
    config.pluginmanager.register(BudgetPlugin(), "budget")
    config.pluginmanager.register(RetryPlugin(), "retry")
    if config.getoption("forked"):
        config.pluginmanager.register(ForkedPlugin(), "forked")
    if config.getoption("changed"):
        config.pluginmanager.register(SelectionPlugin(read_record()), "selection")
    # With pytest-xdist every worker has its own pool, and the process that hands out the tests none. Tests on
    # GPUs alone have no use for ranks on CPUs.
    needs_pool = not config.getoption("numprocesses", None) and config.option.markexpr != "gpu"
    if not config.getoption("numprocesses", None):
        gc.disable()  # until all test modules are imported: most of what they make stays to the end
    if ADDRESS_VARIABLE not in os.environ and needs_pool:
        config.stash[SERVER] = start_server()


def pytest_unconfigure(config: pytest.Config) -> None:
    server = config.stash.get(SERVER, None)
    if server is not None:
        stop_server(server)


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    """Restores the environment and the working directory after each test.

    A command that runs as one rank in a test's own process sets MASTER_PORT and others, which the commands
    that later tests start would take for their user's; a command on pipelines works in their folder.
    """
    environment, folder = dict(os.environ), os.getcwd()
    yield
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test without the gpu mark gets cpu; gpu tests are left out where there is no CUDA device, those
    of `ON_REQUEST` unless asked for."""
    for mark in ON_REQUEST:
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and mark not in config.option.markexpr:
            items[:] = [item for item in items if item not in marked]
            config.hook.pytest_deselected(items=marked)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        if item not in on_gpu:
            item.add_marker("cpu")
    if on_gpu and not config.getoption("rehearse", False) and not _cuda():
        items[:] = [item for item in items if item not in on_gpu]
        config.hook.pytest_deselected(items=on_gpu)


def pytest_collection_finish() -> None:
    """The garbage collector, which tests use as it is, need not look through imported modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
