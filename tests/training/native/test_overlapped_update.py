"""The update under the next forward gives the bits of the plain order, in runs of every kind.

So does whatever reads weights or states between two steps."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.callbacks import Parts
from megatron.model.head import FinalNorm
from megatron.training import Training, train
from tests.methods.preferences.test_reference import FLY, PADDED, preferences
from tests.model.stages import Weights
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import assert_refused, losses, stop_after
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, begin, begin_each, bit_equal, cells, config, metric_rows
from tests.training.test_bare_engine import rows_of

KEY = "overlap_optimizer_with_forward"
STEPS = 20
EXPERTS = {**LLAMA, "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.01}
COPIES = ["embed_tokens", "lm_head"]
LORA = {**LLAMA, "no_weight_tying": True, "lora": {"r": 4, "alpha": 4, "init": False, "modules_to_save": COPIES}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}
HALF, MOMENTS = {"precision": "bfloat16"}, {"optimizer_state_dtype": "bf16"}
EXPERT_RANKS = {**EXPERTS, "expert_parallel_size": 2}
# Ranks, and keys beside those of `values`.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulated, tied": (1, {**LLAMA, "no_weight_tying": False, "train_micro_batch_size_per_gpu": 2}),
    "not clipped": (1, {"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 8}),
    "bf16": (1, HALF),
    "fused": (1, {**HALF, "fused_update": True, "train_micro_batch_size_per_gpu": 8}),
    "fused, bf16 moments": (1, {**HALF, "fused_update": True, "train_micro_batch_size_per_gpu": 8, **MOMENTS}),
    "bf16 moments, LoRA": (1, {**LORA, **MOMENTS}),
    "frozen": (1, {**HALF, "trainable": {"last_layers": 1}}),
    "LoRA": (1, LORA),
    "experts": (1, EXPERTS),
    "Muon": (1, {**MUON, **HALF}),
    "Lion": (1, LION),
    "a table of all blocks": (1, RPE),
    "recomputed": (1, {"checkpoint_activations": True}),
    "dp2": (2, HALF),
    "dp2, Muon": (2, MUON),
    "dp2, ranks of experts": (2, EXPERT_RANKS),
    **{f"zero{stage}": (2, zero(stage)) for stage in (1, 2)},
    "zero3, bf16, Muon": (2, {**zero(3), **HALF, **MUON}),
    "zero2, bf16, bf16 moments": (2, {**zero(2), **HALF, **MOMENTS}),
    "zero3, ranks of experts, bf16 moments": (2, {**zero(3), **EXPERT_RANKS, **MOMENTS}),
    "zero2, a table of all blocks": (2, {**zero(2), **RPE}),
    "zero3, ranks of experts": (2, {**zero(3), **EXPERT_RANKS}),
    "zero3, LoRA": (2, {**zero(3), **LORA}),
    "zero1, frozen": (2, {**zero(1), "trainable": {"last_layers": 1}}),
    "pp2, tied": (2, {**LLAMA, "no_weight_tying": False, "pipe_parallel_size": 2}),
    "pp2, LoRA": (2, {**LORA, "pipe_parallel_size": 2}),
}  # fmt: skip
AT_ONCE = ["accumulated, tied", "zero3, bf16, Muon"]
MARKED_MORE = ["fused", "a table of all blocks"]


def values(save: Path, *overrides: dict[str, Any]) -> dict[str, Any]:
    """20 steps with two saves, three validations, and whatever logs weights and states."""
    common = {"train_micro_batch_size_per_gpu": 4, "train_iters": STEPS, "hidden_dropout": 0.1, "engine": "native",
              "lr_decay_style": "cosine", "num_layers": 2, "checkpoint_factor": 8, "eval_interval": 6, "eval_iters": 1,
              "log_interval": 3, "log_param_norm": True, "log_grad_norm": True, "log_optimizer_states": True,
              "on_nonfinite": "skip", "nonfinite_limit": 2}  # fmt: skip
    return config(ADAMW, NEOX, common, {"save": str(save)}, *overrides)


def poison(training: Training) -> None:
    """Let the gradients of steps 4, 5 and 9 be NaN from the last norm down."""

    def on_forward(module: Any, inputs: Any, output: Tensor) -> None:
        if training.progress.iteration + 1 in (4, 5, 9) and output.requires_grad:
            output.register_hook(lambda grad: grad * math.nan)

    for module in training.engine.stage.modules():
        if isinstance(module, FinalNorm):  # on the last pipeline stage
            module.register_forward_hook(on_forward)


def with_skipped(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Weights]:
    """For the pool: the weights after each run, of whose steps three are left out."""
    weights = []
    for training in begin_each(configs):
        poison(training)
        train(training)
        weights.append(training.engine.weights(master=True))
    return weights


@pytest.mark.parametrize(
    "name", cells(AT_ONCE, MARKED_MORE, [name for name in CASES if name not in AT_ONCE + MARKED_MORE])
)
def test_the_bits_of_the_plain_order(name: str, tmp_path: Path) -> None:
    ranks, overrides = CASES[name]
    runs = [values(tmp_path / str(overlap), overrides, {KEY: overlap}) for overlap in (False, True)]
    for in_order, overlapped in run_ranks(with_skipped, ranks, runs, timeout=TIMEOUT):
        assert bit_equal(in_order, overlapped)
    rows = rows_of(tmp_path / "True")
    assert rows == rows_of(tmp_path / "False") and len(rows) >= STEPS / 3
    assert (
        metric_rows(tmp_path / "True", "validation/lm_loss") and sum(r.get("train/skipped_steps", 0) for r in rows) == 3
    )


@pytest.mark.parametrize("overrides", cells([], [PADDED | LORA | {"reference_cache_dir": None}], [PADDED | FLY]))
def test_beside_a_reference(overrides: dict[str, Any], tmp_path: Path) -> None:
    """The reference scores each batch before the step, with adapters by the model itself."""
    saved = {"engine": "native", "checkpoint_factor": 100}
    runs = [preferences(tmp_path, overrides, saved, {"save": str(tmp_path / str(overlap)), KEY: overlap})
            for overlap in (False, True)]  # fmt: skip
    ((in_order, overlapped),) = run_ranks(to_their_ends, 1, runs, timeout=TIMEOUT)
    assert bit_equal(in_order, overlapped) and losses(tmp_path / "True") == losses(tmp_path / "False")
    assert len(losses(tmp_path / "True")) == 12


@pytest.mark.parametrize("name", cells([], ["zero2"], ["Muon"]))
def test_a_run_that_is_killed_goes_on(name: str, tmp_path: Path) -> None:
    """Killed once it has saved, it ends with the bits of one that was not, in either order."""
    ranks, overrides = CASES[name]
    uninterrupted = values(tmp_path / "through", overrides, {KEY: False, "train_iters": 6, "on_nonfinite": "stop"})
    (expected,) = zip(*run_ranks(to_their_ends, ranks, [uninterrupted], timeout=TIMEOUT), strict=True)
    for overlap in (False, True):
        interrupted = {**uninterrupted, "save": str(tmp_path / str(overlap)), KEY: True, "checkpoint_factor": 3}
        run_ranks(stop_after, ranks, interrupted, 3)
        resumed_run = {**interrupted, "load": interrupted["save"], KEY: overlap}
        (resumed,) = zip(*run_ranks(to_their_ends, ranks, [resumed_run], timeout=TIMEOUT), strict=True)
        assert all(bit_equal(*pair) for pair in zip(expected, resumed, strict=True))
        assert losses(tmp_path / str(overlap)) == losses(tmp_path / "through")


Reader = Callable[[Training], Any]
ALL = dict.fromkeys(range(6), 0)


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def copies_by_name(parts: Parts) -> dict[Any, Tensor]:
    return {place: copied(value) for place, value in parts}


def inference_weights(training: Training) -> Any:
    with training.inference() as model:
        return [copied(param) for param in model.stage.parameters()]


def emptied(training: Training) -> Any:
    """Weights that are set stay as they are set."""
    training.engine.set_weights({0: {"word_embeddings.weight": torch.zeros(384, 32)}})
    return training.engine.weights()


def restored(training: Training) -> Any:
    training.engine.restore_state(lambda layer, name: {})
    return dict(training.engine.gather_state(ALL, copied))


def next_loss(training: Training) -> Any:
    """The forward of a step that reads weights and has no backward."""
    batch = next(batches_of(training))
    return training.engine.forward_only(batch, lambda head, _: head.logits(), lambda _: ())


READERS: dict[str, Reader] = {
    "weights": lambda training: training.engine.weights(),
    "master weights": lambda training: training.engine.weights(master=True),
    "weights of a checkpoint": lambda training: dict(training.engine.gather_weights(ALL, copied)),
    "state of a checkpoint": lambda training: dict(training.engine.gather_state(ALL, copied)),
    "sharded weights": lambda training: copies_by_name(training.engine.sharded_weights()),
    "sharded states": lambda training: {
        key: copies_by_name(parts) for key, parts in training.engine.sharded_states().items()
    },
    "a callback's stage": lambda training: [copied(param) for param in training.engine.stage.parameters()],
    "inference": inference_weights,
    "set weights": emptied,
    "restored state": restored,
    "validation": next_loss,
    "log-probabilities of a step": lambda training: training.engine.step_logprobs(next(batches_of(training))),
}  # fmt: skip


def read_by_all(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the pool: what each reader has found after two steps of each run, and then a third."""
    values_by_reader: list[dict[str, Any]] = []
    for training in begin_each(configs):
        values_by_reader.append({})
        for name, reader in READERS.items():
            batches = batches_of(training)
            for _ in range(2):
                training.engine.train_step(next(batches), 1e-2)
            values_by_reader[-1][name] = reader(training)
    return values_by_reader


def test_whatever_reads_between_steps_waits() -> None:
    runs = [config(ADAMW, NEOX, HALF, num_layers=2, engine="native", train_micro_batch_size_per_gpu=8, **{KEY: overlap})
            for overlap in (False, True)]  # fmt: skip
    ((in_order, overlapped),) = run_ranks(read_by_all, 1, runs)
    for name in READERS:
        torch.testing.assert_close(overlapped[name], in_order[name], rtol=0, atol=0, msg=name)


def order_of_updates(rank: int, world_size: int, values: dict[str, Any]) -> list[str]:
    """For the pool: forwards of layers and updates of their weights, in the third step."""
    training, events = begin(values), list[str]()
    stage, batches = training.engine.stage, batches_of(training)
    layer_of = {id(param): index for index, layer in stage.layers.items() for param in layer.parameters()}
    for _ in range(2):
        training.engine.train_step(next(batches), 1e-3)
    for index, layer in stage.layers.items():
        layer.register_forward_pre_hook(lambda module, inputs, index=index: events.append(f"forward {index}"))

    def note(optimizer: Any, *args: Any) -> None:
        updated_layers = {layer_of[id(param)] for group in optimizer.param_groups for param in group["params"]}
        events.append(f"update {' '.join(sorted(updated_layers))}")

    register_optimizer_step_pre_hook(note)
    training.engine.train_step(next(batches), 1e-3)
    return events


def test_each_layer_is_updated_before_its_first_use_and_no_sooner() -> None:
    keys = {KEY: True, "no_weight_tying": True, "train_micro_batch_size_per_gpu": 4}
    run = config(ADAMW, NEOX, keys, num_layers=2, engine="native")
    (events,) = run_ranks(order_of_updates, 1, run)
    layers = ["0", "2", "3", "5", "6"]
    update_order = [f"{event} {index}" for index in layers for event in ("update", "forward")]
    assert events == [*update_order, *(f"forward {index}" for index in layers)]


def test_refused_elsewhere(tmp_path: Path) -> None:
    assert_refused((values(tmp_path, {KEY: True, "engine": "deepspeed"}), f"{KEY}.*engine: native"))
