"""Computes how long a machine takes for an operation, from data sheets and the shares that programs reach."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.launch.gpus import Gpu
from megatron.planning.operations import Operation
from megatron.planning.processes import PlanError

# The numbers of a machine that are above 0, because times are divided by them.
_POSITIVE = ("memory", "bf16", "bandwidth", "multiprocessors", "product", "fp8_product", "grouped", "attention",
             "attention_backward", "copy")  # fmt: skip
_TILES = ((128, 256), (256, 128), (128, 128))  # of a product, that one multiprocessor computes at a time


class Reached(NamedTuple):
    """The shares of a data sheet that programs reach.

    product, fp8_product: share of the peak in large products. grouped: share of `product` in products of
        experts. attention, attention_backward: share of the bf16 peak, causal half counted. copy: share of
        the memory's bandwidth. launch: seconds of a kernel in which nothing is computed. host: seconds in
        which the host starts a kernel, for which a faster device waits. overlap: of the time of collectives
        that run beside products, the share by which these take longer. tensor: share of the time of
        collectives over tensor ranks that products do not hide.
    """

    product: float
    fp8_product: float
    grouped: float
    attention: float
    attention_backward: float
    copy: float
    launch: float
    host: float
    overlap: float
    tensor: float


class Link(NamedTuple):
    """A link of one GPU, in one direction. bandwidth: GB/s that collectives reach. latency: seconds."""

    bandwidth: float
    latency: float
    source: str


@dataclass(frozen=True)
class Machine:
    """A cluster of equal machines.

    local: the link between GPUs of a machine. network: that between machines.
    """

    gpu: Gpu
    reached: Reached
    local: Link
    network: Link
    gpus_per_node: int

    def seconds(self, operation: Operation) -> float:
        """Returns the seconds of an operation that runs alone."""
        gpu, reached = self.gpu, self.reached
        if operation.ranks:
            return self.collective_seconds(operation.kind, operation.size, operation.ranks)
        moved = operation.size / (gpu.bandwidth * 1e9 * reached.copy)
        if operation.kind in ("memory", "fused"):
            return moved + reached.launch
        if operation.kind in ("attention", "attention_backward"):
            share = reached.attention if operation.kind == "attention" else reached.attention_backward
            return max(operation.flops / 2 / (gpu.bf16 * 1e12 * share), moved) + reached.launch
        rate = self._product_rate(operation.dtype)
        rows, columns, _, *groups = operation.shape
        share = self._filled(rows, columns, 1)
        if groups:  # as if they were equal
            share = reached.grouped * self._filled(rows // groups[0], columns, groups[0])
        return max(operation.flops / (rate * share), moved) + reached.launch

    def _product_rate(self, dtype: str) -> float:
        """Returns the FLOP/s of a large product."""
        if dtype.startswith("float8"):
            return self.gpu.fp8 * 1e12 * self.reached.fp8_product
        if dtype == "float32" and self.gpu.fp32:
            return self.gpu.fp32 * 1e12 * self.reached.product
        return self.gpu.bf16 * 1e12 * self.reached.product / (2 if dtype in ("float32", "tf32") else 1)

    def _filled(self, rows: int, columns: int, groups: int) -> float:
        """Returns the share of multiprocessors' time in which they compute a part of a result.

        The last tiles may leave some without, and tiles reach over the edges of results. groups: of results.
        """
        shares = []
        for height, width in _TILES:
            tiles = groups * rows * columns / (height * width)
            count = groups * math.ceil(rows / height) * math.ceil(columns / width)
            rounds = math.ceil(count / self.gpu.multiprocessors)
            shares.append(tiles / (rounds * self.gpu.multiprocessors))
        return max(shares)

    def collective_seconds(self, kind: str, size: float, ranks: Sequence[int]) -> float:
        """Returns the seconds of a collective over global ranks. size: bytes of its full tensor.

        A ring over machines enters and leaves each of them through as many network links as the group has
        ranks there (NCCL's "bus bandwidth").
        """
        count = len(ranks)
        if count < 2:
            return 0.0
        on_node = sum(rank // self.gpus_per_node == ranks[0] // self.gpus_per_node for rank in ranks)
        nodes = -(-count // on_node)
        if kind in ("send", "receive"):
            link = self.local if nodes == 1 else self.network
            return size / (link.bandwidth * 1e9) + link.latency
        bandwidth, latency = self.local.bandwidth, self.local.latency * (on_node - 1)
        if nodes > 1:
            bandwidth = min(bandwidth, self.network.bandwidth * on_node) if on_node > 1 else self.network.bandwidth
            latency += self.network.latency * min(nodes - 1, 4 * math.log2(nodes))
        share = (count - 1) / count
        if kind == "all_to_all" and nodes > 1:
            # Each rank exchanges with each other: what leaves the machine has one link.
            sent = size * (count - on_node) / count
            return sent / (self.network.bandwidth * 1e9) + latency
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "barrier": 0.0}.get(kind, share)
        return factor * size / (bandwidth * 1e9) + latency * (2 if kind == "all_reduce" else 1)


def read_links() -> Mapping[str, Link]:
    """Returns links between GPUs and networks between machines, by name."""
    text = Path(__file__).with_name("links.toml").read_text(encoding="utf-8")
    return {name: Link(**values) for name, values in tomllib.loads(text).items()}


def machine_text(gpu: Gpu, reached: Reached) -> str:
    """Returns the file of a calibrated machine (`read_machine`)."""
    tables = {"gpu": gpu._asdict(), "reached": reached._asdict()}
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def read_machine(path: Path) -> tuple[Gpu, Reached]:
    """Returns the GPU and the shares of a file that `deepy.py plan calibrate` has written.

    Raises PlanError if it is not such a file.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        gpu, reached = Gpu(**tables["gpu"]), Reached(**tables["reached"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise PlanError(f"--gpu {path}: {problem}; write it with deepy.py plan calibrate --out {path}") from problem
    unknown = {gpu.link, gpu.network} - {*read_links()}
    numbers = {**gpu._asdict(), **reached._asdict()}
    wrong_names = [
        name
        for name, value in numbers.items()
        if name not in ("generation", "link", "network", "source")
        and not (isinstance(value, int | float) and 0 <= value < math.inf and (value > 0 or name not in _POSITIVE))
    ]
    if unknown or wrong_names:
        wrong = (
            f"unknown link {', '.join(sorted(unknown))}" if unknown else f"{wrong_names[0]} {numbers[wrong_names[0]]}"
        )
        raise PlanError(f"--gpu {path}: {wrong}; write it with deepy.py plan calibrate --out {path}")
    return gpu, reached


def read_reached(name: str) -> Reached:
    """Returns what programs reach on a generation of GPUs (`Gpu.generation`)."""
    text = Path(__file__).with_name("reached.toml").read_text(encoding="utf-8")
    return Reached(**tomllib.loads(text)[name])
