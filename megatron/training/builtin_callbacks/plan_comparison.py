"""Compares a run with its plan (`plan_file`): tokens per second and memory, in one line after 50 steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.callbacks import Step
from megatron.data import rows_per_sample
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.training.run import Training

_FIRST_STEPS = 50
_SLOW_STEPS = 10  # at the start of a run: compilation, allocation
_PARTS = ("weights", "gradients", "optimizer states")


class PlanComparison:
    """Logs one line, with the first row of metrics after 50 steps that has no step of the first ten.

    Memory is that of rank 0, beside its pipeline rank's in the plan. On a CPU it is not compared.
    """

    def __init__(self, training: Training) -> None:
        """Raises ConfigError if `plan_file` cannot be read, or is the plan of another run."""
        self._training, args = training, training.args
        self._start = training.iteration
        assert args.plan_file is not None
        try:
            plan = parse_json(Path(args.plan_file).read_text(encoding="utf-8"))
            facts = {
                key: plan[key]
                for key in ("model", "world_size", "layout", "micro_batches", "stages", "time", "settings")
            }
            pairs = [] if facts["time"] is None else _facts(facts, args)
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise args.error(
                "plan_file", f"{args.plan_file}: no plan ({problem!r}); write one: deepy.py plan --gpu NAME --json"
            ) from problem
        if facts["time"] is None:
            raise args.error("plan_file", f"{args.plan_file}: it has no seconds; plan with --gpu NAME")
        for name, planned, value in pairs:
            if planned != value:
                raise args.error(
                    "plan_file", f"{args.plan_file} is the plan of another run: {name} {planned}, here {value}"
                )
        self._plan: Mapping[str, Any] | None = facts

    def on_settled(self, step: Step) -> None:
        """Log the line, if the step's row has the speed of steps after the first ones."""
        steps, interval = step.iteration - self._start, self._training.args.log_interval
        if self._plan is None or steps < _FIRST_STEPS or steps - interval < _SLOW_STEPS:
            return
        plan, self._plan = self._plan, None
        if self._training.groups.world_rank == 0:
            self._training.logger.info(self._line(step, plan))

    def _line(self, step: Step, plan: Mapping[str, Any]) -> str:
        gpus = self._training.groups.world_size
        planned, measured = plan["time"]["tokens_per_s_per_gpu"], step.row["runtime/tokens_per_sec"] / gpus
        line = f" plan: after {step.iteration} iterations {measured:,.0f} tokens/s on each GPU"
        line += f" | planned: {planned:,.0f} ({measured / planned - 1:+.1%})"
        if self._training.groups.device.type != "cuda":
            return line
        stage, sizes = plan["stages"][0], self._memory()
        peak, step_bytes = sum(sizes.values()), stage["step"]
        line += f" | memory: {peak / 2**30:.2f} GiB, planned {step_bytes / 2**30:.2f} ({peak / step_bytes - 1:+.1%})"
        expected = {part: stage.get(part.replace(" ", "_"), 0) for part in _PARTS}
        expected["activations and others"] = stage["step"] - sum(expected.values())
        part = max(sizes, key=lambda name: abs(sizes[name] - expected[name]))
        return f"{line} | differs most: {part}, by {(sizes[part] - expected[part]) / 2**30:+.2f} GiB"

    def _memory(self) -> dict[str, int]:
        """Returns the bytes of this rank by part; their sum is the allocator's peak."""
        device, tensors = self._training.groups.device, self._training.engine.tensors()
        sizes = {part: sum(map(_device_bytes, tensors[part])) for part in _PARTS}
        sizes["activations and others"] = torch.cuda.max_memory_allocated(device) - sum(sizes.values())
        return sizes


def _facts(plan: Mapping[str, Any], args: NeoXArgs) -> list[tuple[str, Any, Any]]:
    """Returns what a plan and its run share: names, and both values."""
    layout, tokens = plan["layout"], plan["model"]["tokens"]
    return [
        ("ranks", plan["world_size"], args.world_size),
        ("tensor ranks", layout["tensor"], args.tp),
        ("pipeline ranks", layout["pipe"], max(args.pp, 1)),
        ("context ranks", layout["context"], args.context_parallel_size),
        ("micro-batches", plan["micro_batches"], args.gradient_accumulation_steps),
        ("tokens of a step", tokens, args.train_batch_size * rows_per_sample(args) * args.seq_length),
        # What a plan leaves to the run ("auto") may be anything.
        *((key, _set(value), _set(_value_of(args, key))) for key, value in plan["settings"].items() if value != "auto"),
    ]


def _value_of(args: NeoXArgs, key: str) -> Any:
    name, _, part = key.partition(".")
    return getattr(args, name)[part] if part else getattr(args, name)


def _set(value: Any) -> Any:
    """Returns the value, or "off" for one that is not set."""
    return "off" if value is None else value


def _device_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size() if local.device.type == "cuda" else 0
