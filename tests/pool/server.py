"""The pool's server: a process with everything slow imported, forked once per rank and job.

It stays single-threaded and never touches CUDA, so forks of it are sound. Started by tests.pool.client.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from megatron.launch.devices import free_port
from tests.pool.protocol import Job, Reply, receive, send

# Imported by a training step, some only when first used; a rank that imports them itself starts a second
# later.
WARM = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.onnx",
    "sympy",
    "deepspeed",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.module_inject.auto_ep_layer",
    "numpy",
    "tokenizers",
    "megatron.training.native.engine",
    "megatron.training.deepspeed.engine",
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
POLL_S = 0.005


def main() -> None:
    """Serve jobs one after another until SIGTERM, or until the pytest process is gone."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    address = listener.getsockname()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    os.environ.update(ENVIRONMENT)
    os.fsync = lambda fd: None  # as in tests/conftest.py
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    listener.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.setblocking(True)
            job = receive(connection)
            if job is not None:
                reply = serve(job, connection, listener)
                if reply is not None:
                    send(connection, reply)
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)


def serve(job: Job, connection: socket.socket, listener: socket.socket) -> Reply | None:
    """Run one job; None when the client has gone away meanwhile."""
    try:
        _warm(job)
    except BaseException:
        return Reply(failure=f"{job.module} cannot be imported in the pool\n{traceback.format_exc()}")
    folder = Path(tempfile.mkdtemp(prefix="neox-job-"))
    port = free_port()
    ranks: dict[int, int] = {}  # rank -> pid
    store_listener = socket.create_server(("127.0.0.1", 0))  # bound here, so that no other process gets its port
    try:
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                connection.close()
                listener.close()
                _run_rank(job, rank, folder, port, store_listener)
            ranks[rank] = pid
        store_listener.close()
        return _wait(job, ranks, folder, connection)
    finally:
        store_listener.close()
        for pid in ranks.values():
            _kill(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _warm(job: Job) -> None:
    """Import what ranks need before they are forked from this process."""
    os.chdir(job.folder)
    sys.path.extend(entry for entry in job.path if entry not in sys.path)
    if "deepspeed" not in sys.modules:
        for name in WARM:
            importlib.import_module(name)
        import logging

        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        # Nothing may be compiled; only inference uses this op.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        from megatron.neox_arguments import NeoXArgs

        sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
        NeoXArgs.from_dict(dict.fromkeys(sizes, 8))  # what keys there are is worked out once
        _use_large_pages()
    importlib.import_module(job.module)
    gc.freeze()  # forks neither look through nor copy what was here before them, and DeepSpeed collects a lot


def _use_large_pages() -> None:
    """Puts this process's memory into pages of 2 MB, where Linux can: a fork copies a shorter page table."""
    if sys.platform != "linux":
        return
    madvise, size, MADV_COLLAPSE = ctypes.CDLL(None).madvise, 2 << 20, 25
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        begin, end = -(-begin // size) * size, end // size * size
        if access == "rw-p" and name in ([], ["[heap]"]) and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _run_rank(job: Job, rank: int, folder: Path, port: int, store_listener: socket.socket) -> None:
    """One rank from fork to result; never returns."""
    try:
        os.setsid()
        if sys.platform == "linux":
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        faulthandler.enable()  # a crash shows where, in the log
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.world_size),
            LOCAL_WORLD_SIZE=str(job.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        os.environ.update(job.env)
        if job.init:
            _make_group(rank, job.world_size, store_listener)
        fn, args, kwargs = pickle.loads(job.call)
        outcome = (True, time.monotonic(), pickle.dumps(fn(rank, job.world_size, *args, **kwargs)))
    except BaseException:
        outcome = (False, time.monotonic(), traceback.format_exc().encode())
    try:
        sys.stdout.flush()
        temporary = folder / f"result_{rank}.new"
        temporary.write_bytes(pickle.dumps(outcome))
        temporary.rename(folder / f"result_{rank}")
        if outcome[0]:
            while True:  # other ranks may still talk to this one: the server ends all together
                signal.pause()
    finally:
        os._exit(0)


def _make_group(rank: int, world_size: int, store_listener: socket.socket) -> None:
    """The gloo process group. Its store is a socket's: one in a file is asked again and again, 10 ms a new
    group."""
    import torch.distributed as dist

    port = store_listener.getsockname()[1]
    handle = store_listener.detach() if rank == 0 else None
    if rank != 0:
        store_listener.close()
    store = dist.TCPStore(
        "127.0.0.1", port, world_size, is_master=rank == 0, wait_for_workers=False, master_listen_fd=handle
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _wait(job: Job, ranks: dict[int, int], folder: Path, connection: socket.socket) -> Reply | None:
    """Waits until every rank has a result, one has failed, the time is up, or nobody waits for the answer."""
    deadline = time.monotonic() + job.timeout
    while True:
        results, failures = _outcomes(ranks, folder)
        if failures:
            # A rank's peers fail too, of its end; a crash is noticed later than the complaint about it.
            time.sleep(0.1)
            _, failures = _outcomes(ranks, folder)
            _, rank, reason = min(failures)
            return Reply(failure=f"rank {rank} of {job.world_size} failed\n{reason}", output=_output(job, folder))
        if len(results) == job.world_size:
            return Reply([results[rank] for rank in range(job.world_size)], output=_output(job, folder))
        if time.monotonic() > deadline:
            for pid in ranks.values():
                os.kill(pid, signal.SIGUSR2)  # faulthandler writes the stacks into the logs
            time.sleep(0.3)
            waiting = ", ".join(str(rank) for rank in ranks if rank not in results)
            reason = f"after {job.timeout:g} s rank(s) {waiting} of {job.world_size} had not finished; stacks follow\n"
            return Reply(failure=reason + _output(job, folder))
        if select.select([connection], [], [], POLL_S)[0]:
            return None  # the client says nothing while it waits: its end of the line is closed


def _outcomes(ranks: dict[int, int], folder: Path) -> tuple[dict[int, bytes], list[tuple[float, int, str]]]:
    """Results so far by rank, and failures as (time, rank, text); a rank that crashed counts as the first to
    fail."""
    results: dict[int, bytes] = {}
    failures: list[tuple[float, int, str]] = []
    for rank, pid in ranks.items():
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # asked first: results come before ends
        path = folder / f"result_{rank}"
        if path.exists():
            good, ended_at, value = pickle.loads(path.read_bytes())
            if good:
                results[rank] = value
            else:
                failures.append((ended_at, rank, value.decode()))
        elif end is not None:
            kind = "exit code" if end.si_code == os.CLD_EXITED else "signal"
            failures.append((0.0, rank, f"the process ended without a result ({kind} {end.si_status})"))
    return results, failures


def _output(job: Job, folder: Path) -> str:
    """Returns the lines that ranks printed, each with its rank."""
    lines = []
    for rank in range(job.world_size):
        path = folder / f"rank_{rank}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        lines += [f"[rank {rank}] {line}\n" for line in text.splitlines()]
    return "".join(lines)


def _kill(pid: int) -> None:
    """End a rank and the processes it started."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
