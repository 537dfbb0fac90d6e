"""Connects ranks through one store, over which rank 0 can send messages before process groups exist."""

import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from megatron.distributed import store
from megatron.neox_arguments.errors import UserError

_NOTICE_S = 3.0  # other ranks have this long to read why the start ends, before the store's process ends
_ANSWER_S = 30.0  # time limit for a rank to answer a question
_STORE_S = 20.0  # time limit for one reply of the store


class StartError(UserError, RuntimeError):
    """Raised when a run cannot start: ranks do not find each other, differ in configuration or software, or
    run on unsuitable machines. The message has a line for each problem."""


class Process(Protocol):
    """Gives this process's rank, the number of ranks and the address of rank 0, as the launcher set them in
    the environment."""

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
    @property
    def on_one_machine(self) -> bool: ...


class Rendezvous:
    """Connects all ranks of a run over one store before torch.distributed is initialised.

    Every rank calls `arrive` with a mapping that describes the rank (its rank info). Rank 0 may then `ask`
    questions, and ends with `release` or `abort`; other ranks call `answer_until_released`. No rank waits
    longer than `timeout_s` after the latest arrival. If the start fails, every rank that has arrived raises
    the same StartError.
    """

    def __init__(self, process: Process, timeout_s: float, logger: logging.Logger) -> None:
        self.host = socket.gethostname()
        self._process, self._timeout_s, self._logger = process, timeout_s, logger
        # The agent process of torchrun hosts the store, not rank 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._met_at = store.LOOPBACK if process.on_one_machine and not agent else process.master_addr
        self._address = f"{self._met_at}:{process.master_port}"
        # Seconds between two polls; longer for more ranks, because all of them poll one process
        self._pause_s = max(0.004, process.world_size / 10_000)
        self._messages = 0  # number of rank 0's messages that were sent or read so far
        self._is_host = process.rank == 0 and not agent
        self._base = self._host_store() if self._is_host else self._reach_store()
        # An agent's store outlives a restart, so each start uses keys of its own.
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "NEOX_RESTARTS")
        start = "/".join(os.environ.get(name, "") for name in names) if agent else ""
        self._store = dist.PrefixStore(f"neox/{start}", self._base)

    def arrive(self, rank_info: dict[str, Any]) -> None:
        """Registers this rank and waits for all others. Raises StartError if another process has registered
        as this rank, or if ranks are missing after the time limit."""
        rank = self._process.rank
        described = json.dumps({"host": self.host, "pid": os.getpid(), **rank_info})
        claimed = store.claim(self._store, f"rank_info/{rank}", described)
        if claimed is not None:
            holder = json.loads(claimed)
            raise StartError(
                f"rank {rank} (host {self.host}, process {os.getpid()}) cannot join: a process with this rank is "
                f"already at {self._address}, from host {holder['host']}, process {holder['pid']}. Two runs share this "
                "address, or a launcher started one rank twice; set another master_port for each run"
            )
        self._store.append("arrivals", f"{rank} {self.host}\n")  # type: ignore[attr-defined]  # no stub has it
        self._store.add("count", 1)
        patience_s = self._timeout_s + (0 if rank == 0 else 1)  # so that rank 0 reports the missing ranks first
        world_size = self._process.world_size
        if not store.wait_for_arrivals(self._arrived, world_size, patience_s, self._pause_s, self._remind):
            self.abort(
                f"{self._describe_missing()} within {self._timeout_s:g} s of the latest arrival (rendezvous_timeout_s)"
                ": the missing ranks ended earlier (see their output), were not started, or cannot reach this address"
            )

    def rank_infos(self) -> list[dict[str, Any]]:
        """Returns the mapping that each rank passed to `arrive`, with its host and process id added, in rank
        order."""
        keys = [f"rank_info/{rank}" for rank in range(self._process.world_size)]
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def ask(self, question: dict[str, Any], ranks: Sequence[int]) -> dict[int, Any]:
        """Sends a question to `ranks` and returns {rank: answer}. Only rank 0 calls it. If a rank does not
        answer, every rank raises StartError."""
        self._send({"ask": question, "of": list(ranks)})
        answers = {}
        for rank in ranks:
            key = f"answer/{self._messages}/{rank}"
            if not self._wait_for_key(key, _ANSWER_S):
                self.abort(f"rank {rank} joined at {self._address}, then stopped answering; see that rank's output")
            answers[rank] = json.loads(self._store.get(key))
        return answers

    def answer_until_released(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        """On a rank other than 0, answers rank 0's questions until rank 0 releases all ranks.

        answer: takes a question that rank 0 passed to `ask`, and returns this rank's answer.

        Raises StartError if a rank aborts the start or rank 0 stops answering.
        """
        while True:
            key = f"message/{self._messages}"
            if not self._wait_for_key(key, self._timeout_s + _ANSWER_S):
                raise StartError(f"rank 0 at {self._address} stopped answering; see the output of rank 0")
            message = json.loads(self._store.get(key))
            self._messages += 1
            if "abort" in message:
                self._end_start(message["abort"])
            if "release" in message:
                return
            if self._process.rank in message["of"]:
                self._store.set(f"answer/{self._messages}/{self._process.rank}", json.dumps(answer(message["ask"])))

    def release(self, timeout: timedelta) -> dist.Store:
        """Returns the store for the process group. On rank 0 it first releases the ranks in
        `answer_until_released`.

        timeout: time limit of each later wait on the store.
        """
        if self._process.rank == 0:
            self._send({"release": True})
        self._base.set_timeout(timeout)
        return dist.PrefixStore("default_pg", self._store)

    def abort(self, reason: str) -> NoReturn:
        """Ends the start: every rank raises a StartError with the message `reason`."""
        self._send({"abort": reason})
        self._end_start(reason)

    def _send(self, message: dict[str, Any]) -> None:
        """Publishes the next message to all ranks. Raises StartError if another rank has aborted the start
        before."""
        earlier = store.claim(self._store, f"message/{self._messages}", json.dumps(message))
        if earlier is not None:
            self._end_start(json.loads(earlier)["abort"])
        self._messages += 1

    def _end_start(self, reason: str) -> NoReturn:
        """Raises StartError with the message `reason`. The rank that hosts the store first waits a few
        seconds, so that all ranks that have arrived can read the reason."""
        informed = self._store.add("informed", 1)
        if self._is_host:
            present = self._store.add("count", 0)
            store.wait_for_condition(
                lambda: informed >= present or self._store.add("informed", 0) >= present, _NOTICE_S, self._pause_s
            )
        raise StartError(reason)

    def _arrived(self) -> int:
        """Returns the number of ranks that have arrived. Once a message or an abort was published, it returns
        the number of all ranks, so that `arrive` stops waiting."""
        if self._store.check(["message/0"]):
            return self._process.world_size
        return self._store.add("count", 0)

    def _remind(self) -> None:
        self._logger.info(f"still waiting: {self._describe_missing()} so far")

    def _describe_missing(self) -> str:
        ranks_of: dict[str, list[int]] = {}
        for line in self._store.get("arrivals").decode().splitlines():
            rank, host = line.split()
            ranks_of.setdefault(host, []).append(int(rank))
        present = {rank for ranks in ranks_of.values() for rank in ranks}
        missing = [rank for rank in range(self._process.world_size) if rank not in present]
        hosts = sorted(ranks_of.items(), key=lambda item: item[1])
        present_text = "; ".join(f"{format_ranks(ranks)} (host {host})" for host, ranks in hosts)
        return (
            f"{format_ranks(missing)} of {self._process.world_size} did not come to {self._address} "
            f"(present: {present_text})"
        )

    def _wait_for_key(self, key: str, seconds: float) -> bool:
        return store.wait_for_condition(lambda: self._store.check([key]), seconds, self._pause_s)

    def _host_store(self) -> dist.Store:
        process = self._process
        address = store.listening_address(self._met_at, process.on_one_machine)
        if address == store.EVERYWHERE:
            self._logger.info(store.says_everywhere(self._met_at))
        try:
            return store.host_store(address, process.master_port, self._timeout_s, multi_tenant=True)
        except RuntimeError as problem:
            if "EADDRINUSE" in str(problem):
                raise StartError(
                    f"port {process.master_port} of host {self.host} is taken, so rank 0 cannot listen at "
                    f"{self._address}: perhaps another run uses this port; set another master_port"
                ) from None
            raise StartError(
                f"rank 0 (host {self.host}) cannot open the store where ranks meet, {self._address}: "
                f"{str(problem).splitlines()[0]}; check that MASTER_ADDR is an address of this host, and its limits of "
                "memory and processes (ulimit -a)"
            ) from None

    def _reach_store(self) -> dist.Store:
        try:
            port = self._process.master_port
            return store.reach_store(self._met_at, port, self._timeout_s, _STORE_S, pause_s=self._pause_s)
        except store.StoreUnreachable as problem:
            raise self._no_answer(str(problem)) from None

    def _no_answer(self, reason: str) -> StartError:
        return StartError(
            f"rank {self._process.rank} (host {self.host}) gets no answer from rank 0 at {self._address} within "
            f"{self._timeout_s:g} s (rendezvous_timeout_s): {reason}; check that rank 0 is running, that MASTER_ADDR "
            "and MASTER_PORT are its address, and that no firewall blocks the port"
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns rank numbers as text, such as `rank 3` or `ranks 0-2, 5`."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
