"""Tiny runs and models on the device of a test, in its process, and functions on ranks of their own."""

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.distributed import init_process_group
from megatron.launch import process_info
from megatron.launch.devices import free_port
from megatron.model import Stage
from megatron.mpu import DTYPES, ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training import Training
from tests.model.stages import gradients, make_stage, random_weights, small
from tests.objectives.steps import as_head
from tests.training.runs import begin

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# Heads of 64, which every kernel takes.
WIDE: dict[str, Any] = {"hidden_size": 256, "seq_length": 128, "max_position_embeddings": 256}


def fp16(power: int) -> dict[str, Any]:
    return {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}


PRECISIONS = {"fp32": {"precision": "fp32"}, "bf16": {"precision": "bfloat16"}, "fp16": fp16(8)}


def join(device: torch.device) -> None:
    """Make this process's group: of NCCL on a GPU, else of gloo."""
    args = small(distributed_backend="nccl" if device.type == "cuda" else "gloo").for_world(1)
    init_process_group(args, process_info(env={}), logging.getLogger("tests.quiet"))


def stage_on(args: NeoXArgs, device: torch.device) -> Stage:
    """The model with random weights, the same anywhere, in its dtype; wide matrices are smaller numbers."""
    weights, factor = random_weights(args), (32 / args.hidden_size) ** 0.5
    scaled = {
        layer: {name: factor * value if value.dim() > 1 else value for name, value in tensors.items()}
        for layer, tensors in weights.items()
    }
    return make_stage(args, scaled, ParallelGroups.single(device)).to(DTYPES[args.params_dtype])


def loss_and_gradients(stage: Stage, batch: Batch) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
    """The sum of the tokens' losses and its gradients, fp32 on the CPU."""
    stage.zero_grad()
    loss = LANGUAGE_MODELLING.loss_sum(as_head(stage(None, batch)), batch, None)[0]
    loss.backward()
    return loss.detach().float().cpu(), {key: value.float().cpu() for key, value in gradients(stage).items()}


def assert_gradients(
    actual: Mapping[tuple[int, str], Tensor], expected: Mapping[tuple[int, str], Tensor], bound: float
) -> None:
    """Each gradient is within `bound` of the expected one, by 2-norms, or of a thousandth of the largest."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for key, value in expected.items():
        difference = float((actual[key] - value).norm())
        assert difference <= bound * float(value.norm()) + 1e-3 * bound * largest, f"{key}: {difference}"


@contextmanager
def run(values: Mapping[str, Any]) -> Iterator[Training]:
    """A run up to its first step, native unless told otherwise; gives back what it holds."""
    values = {"engine": "native", "distributed_backend": "nccl", **values}  # which is gloo where there is no GPU
    if values["engine"] == "deepspeed":
        pytest.importorskip("deepspeed")
    training = begin(values)
    try:
        yield training
    finally:
        training.engine.close()
        training.watchdog.close()
        if training.checkpointer._lock is not None:
            training.checkpointer._lock.close()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Waiting for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 90.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Results of `fn(rank, world, *args)` in a process for each rank, whose GPU is that of its number.

    fn: of a module's top level. Raises AssertionError with what a rank printed where one fails, or when
    `timeout` seconds are over.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "DS_ACCELERATOR")}
    common = {**inherited, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((fn, args)))
        ranks, logs = [], [open(call.with_suffix(f".log{rank}"), "w+") for rank in range(world)]
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), **(env or {})}
            command = [sys.executable, "-m", "tests.gpu.rank", str(call)]
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, cwd=ROOT, env={**common, **place}, **streams))  # type: ignore
        try:
            codes = [process.wait(timeout) for process in ranks]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        printed = ""
        for rank, log in enumerate(logs):
            log.seek(0)
            printed += f"rank {rank}:\n{log.read()[-3000:]}\n"
            log.close()
        assert not any(codes), printed
        return [pickle.loads(call.with_suffix(f".result{rank}").read_bytes()) for rank in range(world)]
