"""Ranks find each other through one store, and rank 0 speaks to all before there are process groups."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from megatron.neox_arguments.errors import UserError

_SAY_EVERY_S = 15.0
_LOOK_S = 1.0  # between two looks at who has come
_TELL_S = 3.0  # for the others to hear why the start ends, before the store goes with its host
_ANSWER_S = 30.0  # for a rank that has come to answer a question
_LIKELY = "they ended earlier (see their output), were not started, or do not reach that address"


class StartError(UserError, RuntimeError):
    """Ranks that do not find each other, are not alike, or whose machines are not fit; a line for each problem."""


class Process(Protocol):
    """This process's place in the run, as a launcher left it in the environment."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...
    @property
    def master_addr(self) -> str: ...
    @property
    def master_port(self) -> int: ...


class Rendezvous:
    """All ranks of a run, each with a card that says what it is.

    Every rank comes by `arrive`; then rank 0 may `ask` and ends with `go` or `stop`, while the others `follow`. No rank
    waits longer than `timeout_s` after the latest arrival. Raises StartError, on every rank that is there the same.
    """

    def __init__(self, process: Process, timeout_s: float, logger: logging.Logger) -> None:
        self.host = socket.gethostname()
        self._process, self._timeout_s, self._logger = process, timeout_s, logger
        self._address = f"{process.master_addr}:{process.master_port}"
        self._pause_s = max(0.004, process.world_size / 10_000)  # between two looks; all ranks ask one process
        self._said = 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process has it, not rank 0
        self._is_host = process.rank == 0 and not agent
        store = self._host_store() if self._is_host else self._reach_store()
        # An agent's store outlives a start; the next one must not find what this one left.
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "NEOX_RESTARTS")
        start = "/".join(os.environ.get(name, "") for name in names) if agent else ""
        self._base, self._store = store, dist.PrefixStore(f"neox/{start}", store)

    def arrive(self, card: dict[str, Any]) -> None:
        """Say that this rank is here, and wait for all others."""
        rank, store = self._process.rank, self._store
        own = json.dumps({"host": self.host, "pid": os.getpid(), **card})
        there = store.compare_set(f"card/{rank}", "", own).decode()
        if there != own:
            other = json.loads(there)
            raise StartError(
                f"rank {rank} (host {self.host}, process {os.getpid()}) is already at {self._address}, from host "
                f"{other['host']}, process {other['pid']}: two runs use one address, or two ranks one number; give "
                "each run a master_port of its own"
            )
        store.append("here", f"{rank} {self.host}\n")  # type: ignore[attr-defined]  # not in torch's stubs
        store.add("count", 1)
        came, latest, said = 0, time.monotonic(), time.monotonic()
        patience = self._timeout_s + (0 if rank == 0 else 1)  # rank 0 says it, if it is there
        while not self._until(self._all_here, _LOOK_S):
            now, count = time.monotonic(), store.add("count", 0)
            if count != came:
                came, latest = count, now
            if now - latest > patience:
                self.stop(
                    f"{self._who_is_missing()} within {self._timeout_s:g} s of the latest arrival "
                    f"(rendezvous_timeout_s): {_LIKELY}"
                )
            if now - said >= _SAY_EVERY_S:
                said = now
                self._logger.info(f"still waiting: {self._who_is_missing()} so far")

    def cards(self) -> list[dict[str, Any]]:
        """Everybody's card, by rank."""
        keys = [f"card/{rank}" for rank in range(self._process.world_size)]
        return [json.loads(card) for card in self._store.multi_get(keys)]

    def ask(self, question: dict[str, Any], ranks: Sequence[int]) -> dict[int, Any]:
        """Rank 0: the answers of these ranks to one question."""
        self._say({"ask": question, "of": list(ranks)})
        answers = {}
        for rank in ranks:
            key = f"answer/{self._said}/{rank}"
            if not self._until(lambda key=key: self._store.check([key]), _ANSWER_S):  # type: ignore[misc]
                self.stop(f"rank {rank} came to {self._address}, but does not answer any more; see its output")
            answers[rank] = json.loads(self._store.get(key))
        return answers

    def follow(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        """The other ranks: answer what rank 0 asks until it says how it goes on."""
        while True:
            key = f"say/{self._said}"
            if not self._until(lambda key=key: self._store.check([key]), self._timeout_s + _ANSWER_S):  # type: ignore[misc]
                raise StartError(f"rank 0 at {self._address} says no more; see its output")
            heard = json.loads(self._store.get(key))
            self._said += 1
            if "stop" in heard:
                self._leave(heard["stop"])
            if "go" in heard:
                return
            if self._process.rank in heard["of"]:
                self._store.set(f"answer/{self._said}/{self._process.rank}", json.dumps(answer(heard["ask"])))

    def go(self, timeout: timedelta) -> dist.Store:
        """Rank 0 lets all go on. The store of the process group, whose waits take at most `timeout`."""
        if self._process.rank == 0:
            self._say({"go": True})
        self._base.set_timeout(timeout)
        return dist.PrefixStore("default_pg", self._store)

    def stop(self, text: str) -> NoReturn:
        """End the start on every rank, for a reason in words."""
        self._say({"stop": text})
        self._leave(text)

    def _say(self, message: dict[str, Any]) -> None:
        text = json.dumps(message)
        heard = self._store.compare_set(f"say/{self._said}", "", text).decode()
        if heard != text:  # another rank gave up first
            self._leave(json.loads(heard)["stop"])
        self._said += 1

    def _leave(self, text: str) -> NoReturn:
        told = self._store.add("told", 1)
        if self._is_host:
            here = self._store.add("count", 0)
            self._until(lambda: told >= here or self._store.add("told", 0) >= here, _TELL_S)
        raise StartError(text)

    def _all_here(self) -> bool:
        return self._store.add("count", 0) == self._process.world_size or self._store.check(["say/0"])

    def _who_is_missing(self) -> str:
        here: dict[str, list[int]] = {}
        for line in self._store.get("here").decode().splitlines():
            rank, host = line.split()
            here.setdefault(host, []).append(int(rank))
        found = {rank for ranks in here.values() for rank in ranks}
        missing = [rank for rank in range(self._process.world_size) if rank not in found]
        there = "; ".join(f"{named(ranks)} (host {host})" for host, ranks in sorted(here.items(), key=lambda x: x[1]))
        return f"{named(missing)} of {self._process.world_size} did not come to {self._address} (there: {there})"

    def _until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Look until it is so; whether it became so in time. (A wait of the store's own prints when it is over.)"""
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end:
                return False
            time.sleep(self._pause_s)
        return True

    def _host_store(self) -> dist.Store:
        try:
            return self._make_store(self._timeout_s, is_master=True, multi_tenant=True)
        except dist.DistNetworkError as problem:
            if "EADDRINUSE" in str(problem):
                raise StartError(
                    f"port {self._process.master_port} of host {self.host} is taken, so rank 0 cannot be met at "
                    f"{self._address}; another run? set another master_port"
                ) from None
            raise self._no_answer(str(problem).splitlines()[0]) from None

    def _reach_store(self) -> dist.Store:
        deadline, pause, reason = time.monotonic() + self._timeout_s, self._pause_s, ""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._no_answer(reason)
            try:
                # First a bare connection: torch's own attempts print warnings while rank 0 is not there yet.
                address = (self._process.master_addr, self._process.master_port)
                socket.create_connection(address, timeout=min(5.0, left)).close()
                return self._make_store(min(left, 20.0), is_master=False)
            except (OSError, dist.DistError) as problem:
                reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
                time.sleep(pause)
                pause = min(2 * pause, 0.5)

    def _make_store(self, seconds: float, **how: Any) -> dist.Store:
        """A TCPStore in the given time: torch waits for ever for the answer of a stranger."""
        made: list[dist.Store | Exception] = []

        def make() -> None:
            process, timeout = self._process, timedelta(seconds=seconds)
            try:
                made.append(
                    dist.TCPStore(
                        process.master_addr, process.master_port, wait_for_workers=False, timeout=timeout, **how
                    )
                )
            except Exception as problem:  # handed to the waiting thread
                made.append(problem)

        thread = threading.Thread(target=make, name="rendezvous", daemon=True)
        thread.start()
        thread.join(seconds + 1)
        if not made:
            raise self._no_answer("something that is no run of this program answers there")
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def _no_answer(self, reason: str) -> StartError:
        return StartError(
            f"rank {self._process.rank} (host {self.host}) gets no answer from rank 0 at {self._address} within "
            f"{self._timeout_s:g} s (rendezvous_timeout_s): {reason}; rank 0 ended earlier or was not started, or that "
            "is not the address of its machine (MASTER_ADDR, MASTER_PORT), or a firewall is between"
        )


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
