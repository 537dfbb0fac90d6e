"""Tiny runs on the real path: a configuration over golden data, trained on ranks of the pool."""

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.training import Training, start, train
from megatron.training.engine import Engine
from megatron.training.loop import steps_of
from tests.model.runs import full_weights
from tests.pool import run_ranks

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"

BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 64, "init_method": "small_init", "output_layer_init_method": "wang_init",
    "train_batch_size": 8, "train_iters": 10, "eval_iters": 0, "precision": "fp32", "weight_decay": 0.1,
    "lr_decay_style": "constant", "warmup": 0.0, "num_workers": 0, "log_interval": 1,
    "data_path": str(GOLDEN / "dataset" / "corpusA_text_document"), "split": "90,10,0",
    "index_cache_dir": str(Path(__file__).resolve().parents[2] / ".cache" / "index_maps"),
    "tokenizer_type": "HFTokenizer", "vocab_file": str(GOLDEN / "dataset" / "tokenizer.json"),
    "eod_mask_loss": True,  # weights differ between micro-batches, so a mean of means would show
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-6}},
}  # fmt: skip
NEOX = {"norm": "layernorm", "pos_emb": "rotary", "rotary_pct": 0.25, "gpt_j_residual": True, "activation": "gelu"}
LLAMA = {
    "norm": "rmsnorm", "rms_norm_epsilon": 1e-5, "pos_emb": "rotary", "activation": "swiglu", "num_kv_heads": 2,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "intermediate_size": 48, "compat_ffn_width": "none",
}  # fmt: skip
# What crosses stages and ranks besides weights: one table for all blocks, documents, logits' sums, a window.
RPE = {
    "pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 16, "sliding_window_width": 12, "z_loss": 1e-3,
    "reset_attention_mask": True, "reset_position_ids": True,
    "use_bias_in_attn_linear": False,  # keys' has no gradient but rounding, where nothing is rotated
}  # fmt: skip
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0}
# A clip that bites: tiny models start with norms well above it.
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}}, "gradient_clipping": 0.5}
OFFLOADED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "engine": "deepspeed",
    "optimizer": {**ADAMW["optimizer"], "type": "CPU_Torch_Adam"},
}  # fmt: skip

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}), "dp2": (2, {}), "tp2": (2, {"model_parallel_size": 2}), "pp2": (2, {"pipe_parallel_size": 2}),
    **{f"zero{stage}": (2, {"zero_optimization": {"stage": stage}}) for stage in (1, 2, 3)},
}  # fmt: skip
"""Ranks and keys of the layouts that most tests go through; test_layouts.py has the whole table."""
SP2 = {"model_parallel_size": 2, "sequence_parallel": True}
TABLE: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "tp2 sp": (2, SP2),
    "tp2 pp2 sp": (4, {**SP2, "pipe_parallel_size": 2, "checkpoint_activations": True}),
    **{f"{name}, deepspeed": (ranks, {**keys, "engine": "deepspeed"}) for name, (ranks, keys) in LAYOUTS.items()},
}
"""LAYOUTS, the same on DeepSpeed, and layouts that shard sequences."""


def cells(default: Iterable[Any], marked_more: Iterable[Any] = (), product: Iterable[Any] = ()) -> list[Any]:
    """For `parametrize`: values, or tuples of them, with the mark of their list."""
    marked = [(default, ()), (marked_more, pytest.mark.more), (product, pytest.mark.product)]
    tuples = [(cell if isinstance(cell, tuple) else (cell,), mark) for values, mark in marked for cell in values]
    return [pytest.param(*cell, marks=mark) for cell, mark in tuples]


class Curve(NamedTuple):
    """The results of a run. weights: full parameters (fp32 master values), by layer and name."""

    losses: list[float]
    norms: list[float]
    weights: dict[int, dict[str, Tensor]]


def config(*parts: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """BASE with changes, later ones winning."""
    merged = dict(BASE)
    for part in (*parts, overrides):
        merged.update(part)
    if merged.get("data_path") is None and merged.get("split") == BASE.get("split"):
        merged["split"] = None  # it is of BASE's data_path
    return merged


def begin(values: Mapping[str, Any], engine: type[Engine] | None = None) -> Training:
    """A run up to its first step, on this rank; quiet."""
    with redirect_stdout(io.StringIO()):
        training = start(NeoXArgs.from_dict(values), process_info(), engine)
    logging.getLogger("megatron").handlers = []
    return training


def begin_each(configs: Iterable[Mapping[str, Any]]) -> Iterator[Training]:
    """Runs up to their first step, one after another in this process."""
    for values in configs:
        training = begin(values)
        yield training
        training.engine.close()


class Part(NamedTuple):
    """One rank's share of a Curve. rates: the learning rates of its steps."""

    losses: list[float]
    norms: list[float]
    tensor_rank: int
    weights: dict[int, dict[str, Tensor]]
    rates: Sequence[float] = ()


def take_steps(training: Training, steps: int, rates: Sequence[float] = ()) -> Part:
    """The next steps of a run. rates: theirs, if not the schedule's."""
    data_of_steps, losses, norms, step_rates = steps_of(training), [], [], list(rates)
    for i in range(steps):
        data, step = next(data_of_steps), training.progress.iteration
        if not rates:
            step_rates.append(training.schedule(step) * data.lr_factor)
        result = training.engine.train_step(data.take(), step_rates[i])
        training.progress.iteration += 1
        losses.append(float(result.loss))
        norms.append(float("nan" if result.grad_norm is None else result.grad_norm))
    return Part(losses, norms, training.groups.rank("tensor"), training.engine.weights(master=True), step_rates)


def curves(
    rank: int, world_size: int, configs: list[dict[str, Any]], steps: int = 10, rates: Sequence[float] = ()
) -> list[Part]:
    """For the pool: several runs one after another in the same processes."""
    return [take_steps(training, steps, rates) for training in begin_each(configs)]


def before_steps(training: Training, do: Callable[[int], Any]) -> None:
    """From now on call this with the number of each step before it is taken."""
    train_step = training.engine.train_step

    def step(*args: Any) -> Any:
        do(training.progress.iteration + 1)
        return train_step(*args)

    training.engine.train_step = step  # type: ignore[method-assign]


def full_curve(parts: list[Part], values: Mapping[str, Any]) -> Curve:
    args = NeoXArgs.from_dict({**values, "padded_vocab_size": 384})
    return Curve(parts[0].losses, parts[0].norms, full_weights(args, parts))


def furthest(actual: Curve, expected: Curve) -> tuple[float, float, float]:
    """Largest relative differences of losses, gradient norms and weights (2-norm a tensor); NaN if one is."""
    pairs = ((actual.losses, expected.losses), (actual.norms, expected.norms))
    differences = [[abs(x - y) / abs(y) for x, y in zip(*pair, strict=True)] for pair in pairs]
    weight_differences = [
        float((actual.weights[layer][name] - tensor).norm() / tensor.norm().clamp(min=1e-3))
        for layer, tensors in expected.weights.items()
        for name, tensor in tensors.items()
    ]
    losses, norms, weights = (
        float(torch.tensor(values).double().max()) for values in (*differences, weight_differences)
    )
    return losses, norms, weights


def curves_of(configs: Mapping[Any, dict[str, Any]], steps: int, ranks: int = 1) -> dict[Any, Curve]:
    """Runs by name, one after another in the same processes."""
    rank_parts = run_ranks(curves, ranks, list(configs.values()), steps, timeout=290)
    return {name: full_curve([rank[i] for rank in rank_parts], configs[name]) for i, name in enumerate(configs)}


def assert_alike(
    actual: Mapping[Any, Curve], expected: Mapping[Any, Curve], losses: float = 1e-5, norms: float = 1e-5,
    weights: float = 1e-4,
) -> None:  # fmt: skip
    """Each run has the numbers of the expected run of its name, up to these relative differences."""
    for name, curve in actual.items():
        differences = furthest(curve, expected[name])
        assert all(
            difference <= bound for difference, bound in zip(differences, (losses, norms, weights), strict=True)
        ), (name, differences)


def run_to_end(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """For the pool: a whole run with its loop; the losses from metrics.jsonl are the caller's to read."""
    training = begin(values)
    train(training)
    weights = training.engine.weights(master=True)
    training.engine.close()
    return [], {layer: {k: v.clone() for k, v in tensors.items()} for layer, tensors in weights.items()}


def output_of_run(rank: int, world_size: int, values: dict[str, Any], to_end: bool = False) -> str:
    """For the pool: what a run prints before its first step, or to its end."""
    with redirect_stdout(io.StringIO()) as output:
        training = start(NeoXArgs.from_dict(values), process_info())
        if to_end:
            train(training)
        training.engine.close()
    return output.getvalue()


def metric_rows(save: Path, key: str = "train/lm_loss") -> list[dict[str, Any]]:
    """The rows of a run's metrics that have this one."""
    rows = map(json.loads, (save / "logs" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row.get(key) is not None]


def bit_equal(a: dict[int, dict[str, Tensor]], b: dict[int, dict[str, Tensor]]) -> bool:
    """Whether two ranks' weights are the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[i][n], b[i][n]) for i in a for n in a[i])
