"""Captures decode steps as CUDA graphs (`decode_cuda_graphs`).

The host then launches one graph per step instead of many small kernels, whose launches take longer than their
work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron.data import Batch
from megatron.model import InferenceContext, KVCache, Model
from megatron.mpu import HeadInput, Linear
from megatron.mpu.gpu_kernels import capability_of, not_run_on
from megatron.mpu.products import PlainProduct

_TOKEN, _POSITION, _SLOT, _STATE, _TABLE = range(5)  # columns of `_Step.inputs`; the table takes the rest
_ROWS = 8  # numbers of rows are padded to powers of 2 up to this number, and to its multiples above
_BLOCKS = 8  # numbers of blocks are padded to multiples of at least this number


def captures_decode(model: Model, log: Callable[[str], None] | None = None) -> bool:
    """Returns whether to capture this model's decode steps as CUDA graphs (`decode_cuda_graphs`).

    `auto` captures them if that is possible and was tested on this kind of GPU. Raises ConfigError if the key
    is true but the steps cannot be captured.

    log: called with a line of text about the choice of `auto`.
    """
    setting = model.args.decode_cuda_graphs
    if setting is False:
        return False
    problem = _problem(model)
    if setting is True:
        if problem is not None:
            raise model.args.error("decode_cuda_graphs", f"true: not possible: {problem}; set it to false or auto")
        return True
    problem = problem or not_run_on("decode_cuda_graphs: true", capability_of(model.groups.device))
    if log is not None and model.groups.device.type == "cuda":
        log(f"decode_cuda_graphs: auto chose {'true' if problem is None else f'false ({problem})'}")
    return problem is None


def _problem(model: Model) -> str | None:
    """Returns the reason why the decode steps of a model cannot be captured; None if they can."""
    args, modules = model.args, list(model.stage.modules())
    sharded = model.lockstep or any(isinstance(module, FSDPModule) for module in modules)
    unquantized = all(isinstance(module.product, PlainProduct) for module in modules if isinstance(module, Linear))
    problems = {
        "CUDA graphs need a GPU": model.groups.device.type != "cuda",
        "without a cache (recompute: true) there are no decode steps": args.recompute,
        "pipeline stages wait for each other (pipe_parallel_size above 1)": args.pp > 1,
        "collectives of tensor ranks cannot be captured (model_parallel_size above 1)": args.tp > 1,
        "mixtures of experts cannot be captured": any(args.has_experts(block) for block in range(args.num_layers)),
        "weights are sharded over ranks (ZeRO 3, expert parallelism, fully_shard)": sharded,
        "FP8 and quantised weights cannot be captured (precision_fp8, lora.quantization)": not unquantized,
        "each row has its own LoRA adapter": model.adapter_rows is not None,
        "LongRoPE copies its factors from the host in each step": (args.rope_scaling or {}).get("rope_type")
        == "longrope",
    }
    return next((problem for problem, applies in problems.items() if applies), None)


@dataclass(frozen=True)
class DecodeRows:
    """The inputs of one decode step, in host memory.

    tokens, positions: `[rows]` int64, the last token of each row and the token's position.
    slots, table, states: places in the KV cache, as in `CacheRows`; slots `[rows]` and table `[rows, blocks]`
        are int64.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    table: np.ndarray
    states: Sequence[int] | None


class CapturedDecode:
    """Runs decode steps over one KV cache, with a CUDA graph for each padded number of rows and blocks.

    Numbers of rows and blocks are padded to a few values, which limits the number of graphs. Padding rows
    write to slot 0, which no request uses, and to the Mamba state with the index `maximum_rows`. Graphs read
    weights and cache at fixed addresses, so they use the current values. For each padded shape, the first
    step runs without a graph and the second step is captured.
    """

    def __init__(self, model: Model, cache: KVCache, maximum_rows: int, capacity: int) -> None:
        """Starts without graphs.

        maximum_rows: most rows of a step. capacity: number of KV-cache blocks of the longest text.
        """
        self.model, self.cache = model, cache
        self.maximum_rows, self.capacity = maximum_rows, capacity
        self.pool = torch.cuda.graph_pool_handle() if model.groups.device.type == "cuda" else None
        self.steps: dict[tuple[int, int], _Step] = {}

    def logits(self, rows: DecodeRows) -> Tensor:
        """Returns the logits of each row's next token, `[rows, 1, vocab]`; valid until the next call."""
        count, blocks = rows.table.shape
        key = padded_rows(count, self.maximum_rows), padded_blocks(blocks, self.capacity)
        if key not in self.steps:
            self.steps[key] = _Step(self, *key)
        return self.steps[key](rows)[:count]


class _Step:
    """Runs the decode step for one padded number of rows and blocks: a call with `DecodeRows` returns the
    logits.

    All inputs are copied to the device as one tensor.
    """

    def __init__(self, decode: CapturedDecode, rows: int, blocks: int) -> None:
        device, shape = decode.model.groups.device, (rows, _TABLE + blocks)
        self.decode = decode
        self.host = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.inputs = torch.zeros(shape, dtype=torch.long, device=device)
        self.last = torch.zeros(rows, dtype=torch.long, device=device)
        self.logit_positions = torch.arange(rows, device=device)
        self.ran = False
        self.launch: Callable[[], None] | None = None
        self.result: Tensor | None = None

    def __call__(self, rows: DecodeRows) -> Tensor:
        count, blocks = rows.table.shape
        # The host has read the tokens of the previous step, so the previous copy from this buffer has ended.
        values = self.host.numpy()
        values[:] = 0
        values[:, _STATE] = self.decode.maximum_rows
        values[:count, _TOKEN], values[:count, _POSITION] = rows.tokens, rows.positions
        if blocks:
            values[:count, _SLOT] = rows.slots
        if rows.states is not None:
            values[:count, _STATE] = rows.states
        values[:count, _TABLE : _TABLE + blocks] = rows.table
        self.inputs.copy_(self.host, non_blocking=True)
        if not self.ran:  # kernels and caches set themselves up in the first run, which is not captured
            self.ran = True
            return self._run()
        if self.launch is None:
            self.launch, self.result = cuda_graph(self._run, self.decode.pool)
        self.launch()
        assert self.result is not None
        return self.result

    @torch.no_grad()
    def _run(self) -> Tensor:
        model, cache = self.decode.model, self.decode.cache
        tokens, positions = self.inputs[:, _TOKEN : _TOKEN + 1], self.inputs[:, _POSITION : _POSITION + 1]
        states = self.inputs[:, _STATE].contiguous() if model.args.state_blocks else None
        table = self.inputs[:, _TABLE:].contiguous()
        slots = self.inputs[:, _SLOT].contiguous() if model.args.attends else self.inputs[:0, _SLOT]
        # The graph needs buffers of its own, because shared buffers are replaced when they must grow.
        view = cache.with_rows(slots, table, states=states, room={})
        batch = Batch(tokens, labels=tokens, loss_weights=tokens, positions=positions)
        context = InferenceContext(cache=view, last_tokens=self.last, logit_positions=self.logit_positions)
        logits = model.stage(None, batch, HeadInput.logits, context=context)
        assert isinstance(logits, Tensor)
        return logits


def padded_rows(rows: int, maximum_rows: int) -> int:
    """Returns the number of rows, padding included, of the CUDA graph that runs a step of `rows` rows.

    Up to 8 (`_ROWS`) rows it is the next power of two, above that the next multiple of 8. It is never more
    than `maximum_rows`.
    """
    padded = 1 << (rows - 1).bit_length() if rows <= _ROWS else -(-rows // _ROWS) * _ROWS
    return min(padded, maximum_rows)


def padded_blocks(blocks: int, capacity: int) -> int:
    """Returns the number of blocks per row, padding included, of the CUDA graph that runs a step of `blocks`
    blocks.

    Above 32 blocks, padding adds at most a quarter.

    capacity: number of blocks of the longest text, which the result never exceeds.
    """
    unit = max(_BLOCKS, (1 << max(blocks - 1, 0).bit_length()) // 8)
    return min(-(-blocks // unit) * unit, capacity)


def cuda_graph(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
    """Captures a call of `run` as a CUDA graph. Returns a function that replays the graph, and the tensor
    that holds the result after each replay.

    pool: the memory pool that all graphs share.
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads may wait for their own CUDA events meanwhile (NCCL's, copies to the host).
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result
