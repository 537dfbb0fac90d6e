"""A store is hosted, reached and waited on in bounded time, whoever answers at its port."""

import itertools
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.distributed import store
from megatron.launch.devices import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_a_store_that_comes_later_is_reached_and_one_that_does_not_is_named_by_the_reason() -> None:
    port = free_port()
    with pytest.raises(store.StoreUnreachable, match="refused"):
        store.reach_store("127.0.0.1", port, patience_s=0.3, timeout_s=1.0, pause_s=0.1)
    hosts = []
    later = threading.Timer(0.3, lambda: hosts.append(store.host_store("127.0.0.1", port, 5.0)))
    later.start()
    reached = store.reach_store("127.0.0.1", port, patience_s=30.0, timeout_s=5.0)
    later.join()
    hosts[0].set("key", "value")
    assert reached.get("key") == b"value"


def test_a_stranger_at_the_port_is_no_store() -> None:
    """torch alone would wait for its answer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(store.StoreUnreachable, match="no run of this program"):
            store.reach_store("127.0.0.1", silent.getsockname()[1], patience_s=60.0, timeout_s=0.5)
    assert time.monotonic() - began < 20
    for thread in threading.enumerate():  # it ends with the stranger; torch must not find the interpreter gone
        if thread.name == "store":
            thread.join(30)


def test_a_key_is_claimed_once() -> None:
    shared = dist.HashStore()
    assert store.claim(shared, "seat", "a") is None
    assert store.claim(shared, "seat", "b") == "a"


def test_who_waits_is_reminded_and_each_arrival_gives_the_next_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "REMIND_EVERY_S", 0.05)
    began, reminders = time.monotonic(), itertools.count()

    def arrived() -> int:
        return 1 + int((time.monotonic() - began) / 0.3)  # the third comes after 0.6 s

    assert store.wait_for_arrivals(arrived, 3, patience_s=0.5, pause_s=0.01, remind=lambda: next(reminders))
    assert next(reminders) > 0
    assert not store.wait_for_arrivals(lambda: 1, 2, patience_s=0.1, pause_s=0.01, remind=lambda: None)


def test_launchers_import_it_without_torch() -> None:
    code = "import sys, megatron.distributed.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
