"""Estimates seconds and memory of many layouts by formulas, so that a search plans only the best of them.

Estimates only order layouts. What a search tells is planned from recorded steps.
"""

from functools import cache, cached_property
from typing import Any, NamedTuple

from megatron.data import rows_per_sample
from megatron.model import block_specs, layer_params, prediction_specs
from megatron.model.layer_products import head_products, mixing_products
from megatron.neox_arguments import NeoXArgs
from megatron.planning.machines import Machine
from megatron.planning.operations import Operation
from megatron.planning.size import model_size

# How often a block's hidden states travel over tensor ranks, counted in all-reduces: two sums forward, two
# backward, and again what is recomputed. Sharded hidden states are gathered once more for weights' gradients.
_TRAVELS = {"none": 4.0, "selective": 4.0, "full": 5.0}
_SHARDED_TRAVELS = 6.5
_QUANTIZED = 0.65  # bytes of a weight in 4 bits, with its scales
# Bytes that a block moves besides products, forward and backward, for each element of hidden states, and for
# each element between the products of its feed-forward.
_ELEMENTWISE, _FFN_ELEMENTWISE = 60, 20
_ROUTED = 24  # bytes for each element that goes to an expert and comes back
_LOGIT = 14  # bytes for each logit
# Bytes of a micro-batch for each parameter of a rank, by ZeRO stage: sums of gradients, gathered weights.
_PARAMETER = {0: 14, 1: 14, 2: 10, 3: 22}


class Layout(NamedTuple):
    """How a run is shared out. tensor, pipe, context, expert: ranks. zero: stage. rows: of a micro-batch.

    sequence: norms and dropout are sharded over tensor ranks too (`sequence_parallel`).
    recompute: "none", "selective" or "full". schedule: `pipeline_schedule`. chunks: stages of a rank.
    """

    tensor: int
    sequence: bool
    pipe: int
    context: int
    expert: int
    zero: int
    rows: int
    recompute: str
    schedule: str
    chunks: int

    @staticmethod
    def configured(args: NeoXArgs) -> "Layout":
        """Returns the layout of a configuration."""
        recompute = args.recompute_granularity if args.checkpoint_activations else "none"
        is_piped = args.pp > 1
        return Layout(
            args.tp, args.sequence_parallel, max(args.pp, 1), args.context_parallel_size, args.expert_parallel_size,
            max(args.zero_stage, 0), args.train_micro_batch_size_per_gpu, recompute,
            args.pipeline_schedule if is_piped else "1f1b", args.stages_per_rank if is_piped else 1,
        )  # fmt: skip

    def keys(self) -> dict[str, Any]:
        """Returns the keys that set this layout."""
        is_chunked = self.schedule == "interleaved"
        return {
            "model_parallel_size": self.tensor, "sequence_parallel": self.sequence,
            "pipe_parallel_size": self.pipe, "pipeline_schedule": self.schedule,
            "virtual_pipeline_stages": self.chunks if is_chunked else None,
            "context_parallel_size": self.context, "expert_parallel_size": self.expert,
            "zero_optimization.stage": self.zero, "train_micro_batch_size_per_gpu": self.rows,
            "checkpoint_activations": self.recompute != "none",
            "recompute_granularity": "full" if self.recompute == "none" else self.recompute,
        }  # fmt: skip


class Estimate(NamedTuple):
    """Seconds of a step by part, and memory of a rank of the first stage in it.

    states: bytes of weights, gradients and optimizer states. activations: other bytes.
    """

    parts: dict[str, float]
    states: float
    activations: float

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.parts.values())


class _Pass(NamedTuple):
    """Seconds of a micro-batch in all blocks, and in the head.

    forward, full: without and with backward. elementwise: of memory-bound operations. travel: of an
    all-reduce of hidden states over tensor ranks in each block. exchanges: of other collectives.
    """

    forward: float
    elementwise: float
    full: float
    travel: float
    exchanges: float
    head: float


class MemoryEstimator:
    """Estimates the memory of layouts of one model on a number of GPUs."""

    def __init__(self, args: NeoXArgs) -> None:
        assert args.world_size is not None and args.train_batch_size is not None
        self._args, self._world = args, args.world_size
        self._batch: int = args.train_batch_size
        self._sample_tokens = rows_per_sample(args) * args.seq_length
        self._is_fp32 = args.precision == "fp32"
        self._element = 4.0 if self._is_fp32 else 2.0  # bytes of weights and activations

    def memory(self, layout: Layout) -> tuple[float, float]:
        """Returns `states` and `activations` of an Estimate."""
        micro_batches = self._batch // (self._data(layout) * layout.rows)
        shares = len(self._data_ranks(layout))
        states = self._states(layout, self._parameters(layout), shares, micro_batches)
        return states, self._activations(layout, micro_batches, self._args.num_layers)

    def _data(self, layout: Layout) -> int:
        return self._world // (layout.tensor * layout.pipe * layout.context)

    @cached_property
    def _matrices(self) -> dict[tuple[Any, ...], int]:
        """How many blocks have each matrix: (shape, sharded axis, experts)."""
        counts: dict[tuple[Any, ...], int] = {}
        params = layer_params(self._args)
        for block in (*block_specs(self._args), *prediction_specs(self._args)):
            for spec in params[block.index]:
                if len(spec.shape) == 2 and spec.weight_decay:
                    key = spec.shape, spec.axis, spec.experts or 0
                    counts[key] = counts.get(key, 0) + 1
        return counts

    def _hidden_bytes(self, layout: Layout) -> float:
        rows = layout.rows * self._sample_tokens / layout.context
        rows /= layout.tensor if layout.sequence else 1
        return self._element * rows * self._args.hidden_size

    def _data_ranks(self, layout: Layout) -> tuple[int, ...]:
        """The ranks that hold the same weights as the first one: those of its context and data groups."""
        return tuple(range(0, self._world // layout.pipe, layout.tensor))

    def _parameters(self, layout: Layout) -> float:
        """Returns the parameters of a rank of the first stage."""
        blocks = 0.0
        for (shape, axis, experts), count in self._matrices.items():
            ranks = (layout.tensor if axis is not None else 1) * (layout.expert if experts else 1)
            blocks += count * shape[0] * shape[1] / ranks
        edges = self._args.padded_vocab_size * self._args.hidden_size / layout.tensor
        return blocks / layout.pipe + edges * (1 if layout.pipe > 1 or not self._args.no_weight_tying else 2)

    def _states(self, layout: Layout, size: float, shares: int, micro_batches: int) -> float:
        """size: parameters of a rank. shares: ranks over which ZeRO shards."""
        block = size * layout.pipe / self._args.num_layers
        trained = self._trained_share
        optimizer = self._args.optimizer_bytes * size * trained / (shares if layout.zero else 1)
        is_quantized = (self._args.user_values.get("lora") or {}).get("quantization") is not None
        element = _QUANTIZED if is_quantized else self._element
        weights = element * (size if layout.zero < 3 else 2 * block)
        shards = element * (1 - trained) * size / shares if layout.zero else 0.0  # of frozen weights, beside copies
        are_summed_at_once = layout.zero > 1 or (layout.zero == 1 and micro_batches == 1)
        gradients = 4.0 * trained * (size / shares + 2 * block if are_summed_at_once else size)
        return optimizer + weights + shards + gradients

    @cached_property
    def _trained_share(self) -> float:
        size = model_size(self._args)
        return size.trained / size.total

    def _activations(self, layout: Layout, micro_batches: int, blocks: int) -> float:
        rows = layout.rows * self._sample_tokens / layout.context
        hidden = self._hidden_bytes(layout)
        wide = 0.0
        for (shape, axis, experts), count in self._matrices.items():
            share = self._args.moe_top_k / experts if experts else 1.0
            wide += self._element * rows * count / blocks * share * (shape[0] / (layout.tensor if axis == 0 else 1))
        full = 4 * hidden + 2 * wide
        block_bytes = {"none": full, "selective": 3 * hidden + wide, "full": hidden}[layout.recompute]
        if layout.schedule == "zero_bubble":  # the last rank leaves all its products for weights for later
            block_bytes = full
        held = min(layout.pipe + (layout.pipe - 1) / layout.chunks * (layout.chunks > 1), micro_batches)
        return held * blocks / layout.pipe * block_bytes + (4 * hidden + 2 * wide) + 6 * hidden


class Estimator(MemoryEstimator):
    """Estimates memory and seconds of layouts of one model on a number of GPUs."""

    def __init__(self, args: NeoXArgs, machine: Machine) -> None:
        super().__init__(args)
        self._machine = machine
        self._passes, self._collectives = cache(self._pass), cache(self._collective)

    def estimate(self, layout: Layout) -> Estimate:
        """Returns seconds and memory of a layout."""
        machine = self._machine
        micro_batches = self._batch // (self._data(layout) * layout.rows)
        work = self._passes(layout.tensor, layout.sequence, layout.context, layout.expert, layout.rows)
        recomputed = {"none": 0.0, "selective": work.elementwise / 3, "full": work.forward}[layout.recompute]
        travels = work.travel * (_SHARDED_TRAVELS if layout.sequence else _TRAVELS[layout.recompute])
        exchanges = work.exchanges * (1.5 if layout.recompute == "full" else 1.0)
        size, copy = self._parameters(layout), machine.gpu.bandwidth * 1e9 * machine.reached.copy
        summed = _PARAMETER[layout.zero] * size / copy
        share, has_head = self._busiest(layout, work.full + recomputed + travels + exchanges, work.head)
        head = work.head * has_head
        parts = {"computation": micro_batches * (share * work.full + head + summed)}
        parts["recomputation"] = micro_batches * share * recomputed
        parts["communication: tensor"] = micro_batches * share * travels
        parts["communication: expert, context"] = micro_batches * share * exchanges
        stage = sum(parts.values()) / micro_batches
        if layout.pipe > 1:
            idle = (layout.pipe - 1) * stage / {"1f1b": 1, "interleaved": layout.chunks}.get(layout.schedule, 3)
            ends = 0, self._world // layout.pipe
            message = machine.collective_seconds("send", self._hidden_bytes(layout), ends)
            parts["pipeline"] = idle + 2 * message * (layout.pipe + 0.1 * layout.chunks * micro_batches)
        passes = micro_batches if layout.zero > 1 else 1
        gathers = 2 * passes if layout.zero == 3 else 1
        sums, gather = self._collectives(layout.tensor, layout.pipe, layout.expert)
        moved = sums * passes + gather * gathers
        hiding = stage * passes
        parts["communication: data"] = max(moved - hiding, 0.0) + machine.reached.overlap * min(moved, hiding)
        shares = len(self._data_ranks(layout))
        parts["update"] = 28 * size / (shares if layout.zero else 1) / copy
        return Estimate(parts, *self.memory(layout))

    def _busiest(self, layout: Layout, blocks: float, head: float) -> tuple[float, bool]:
        """Returns the share of all blocks that the busiest pipeline rank has, and whether it has the head.

        blocks, head: seconds of all of them.
        """
        number, stages = self._args.num_layers, layout.pipe * layout.chunks
        if layout.pipe == 1:
            return 1.0, True
        if self._args.pipe_partition_method.lower() in ("parameters", "flops"):
            return max((blocks + head) / (layout.pipe * blocks), 1 / number), False
        blocks_each, left = divmod(number, stages)
        ranks = [
            (layout.chunks * blocks_each + -(-left // layout.pipe)) / number,
            (layout.chunks * blocks_each + left // layout.pipe) / number,
        ]
        return (ranks[1], True) if ranks[1] * blocks + head > ranks[0] * blocks else (ranks[0], False)

    @cached_property
    def _mixing(self) -> float:
        """The multiplications of a token in all mixers besides products with weights."""
        blocks = (*block_specs(self._args), *prediction_specs(self._args))
        return sum(mixing_products(block.mixer, self._args.seq_length) for block in blocks)

    def _collective(self, tensor: int, pipe: int, expert: int) -> tuple[float, float]:
        """Returns the seconds in which gradients are summed over data ranks once, and weights gathered."""
        layout = Layout(tensor, False, pipe, 1, expert, 1, 1, "none", "1f1b", 1)
        size, members = self._parameters(layout), self._data_ranks(layout)
        seconds = self._machine.collective_seconds
        return seconds("reduce_scatter", 4 * size, members), seconds("all_gather", 2 * size, members)

    def _pass(self, tensor: int, sequence: bool, context: int, expert: int, rows: int) -> _Pass:
        """Returns the seconds of a micro-batch in all blocks, on the ranks of a pipeline together."""
        args, machine = self._args, self._machine
        tokens = rows * self._sample_tokens // context
        products = forward = ffn_elements = 0.0
        dtype = "float8_e4m3fn" if args.precision_fp8 not in (None, "off") else "bfloat16"
        for (shape, axis, experts), count in self._matrices.items():
            high, wide = (n // tensor if i == axis else n for i, n in enumerate(shape))
            kind, length, groups = "product", tokens, 1
            if experts:
                kind, groups, length = "grouped", max(experts // expert, 1), tokens * args.moe_top_k
                high //= experts
            flops = 2.0 * length * high * wide
            moved = self._element * (length * (high + wide) + groups * high * wide)
            number = (groups,) if experts else ()
            times = [
                machine.seconds(Operation(kind, "", flops, moved, (*size, *number), dtype))
                for size in ((length, high, wide), (length, wide, high), (high * groups, wide, length))
            ]
            forward += count * times[0]
            products += count * sum(times)
            if axis == 0 or experts:
                ffn_elements += count * length * high
        scores = 2.0 * 2.0 * tokens / tensor * self._mixing
        reached = machine.reached
        for share, factor in ((reached.attention, 1.0), (reached.attention_backward, 2.5)):
            seconds = factor * scores / 2 / (machine.gpu.bf16 * 1e12 * share)
            products += seconds
            forward += seconds if factor == 1.0 else 0.0
        copy = machine.gpu.bandwidth * 1e9 * reached.copy
        hidden = args.num_layers * tokens * args.hidden_size
        moved = _ELEMENTWISE * hidden / (tensor if sequence else 1) + _FFN_ELEMENTWISE / 2 * ffn_elements
        moved += _ROUTED * args.moe_top_k * hidden if args.moe_num_experts > 1 else 0
        elementwise = moved / copy + 30 * args.num_layers * (reached.launch + reached.host)
        forward += elementwise / 3
        group = tuple(range(tensor))
        size = 2.0 * tokens * args.hidden_size
        travel = machine.collective_seconds("all_reduce", size, group) * args.num_layers * reached.tensor
        exchanges = 0.0
        if expert > 1:
            members = tuple(range(0, tensor * expert, tensor))
            exchanges += 4 * machine.collective_seconds("all_to_all", args.moe_top_k * size, members) * args.num_layers
        if context > 1:
            members = tuple(range(0, tensor * context, tensor))
            exchanges += machine.collective_seconds("all_gather", size * context / 2, members) * args.num_layers
        shape = tokens, args.padded_vocab_size // tensor, args.hidden_size
        flops = 2.0 * tokens * head_products(args) / tensor
        heads = 1 + (args.mtp_num_layers or 0)  # each block of multi-token prediction runs the output layer again
        logits = _LOGIT * tokens * args.padded_vocab_size / tensor / copy
        head = heads * (3 * machine.seconds(Operation("product", "", flops, 0.0, shape, "bfloat16")) + logits)
        return _Pass(forward, elementwise, products + elementwise, travel, exchanges, head)
