"""AdamW in one pass beside AdamW between copies: the same bits in runs, and where it is not available."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.native.fused_update import FusedAdamW
from tests.methods.unlearning.test_runs import DIFFERENCE
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_refused, losses
from tests.training.native.in_turn import TIMEOUT, assert_resumes, to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, bit_equal, config

STEPS = 8
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk"}


def values(save: Path, *parts: dict[str, Any]) -> dict[str, Any]:
    common = {"precision": "bfloat16", "train_micro_batch_size_per_gpu": 8, "train_iters": STEPS, "hidden_dropout": 0.1}
    saved = {"save": str(save), "checkpoint_factor": 100, "engine": "native", "lr_decay_style": "cosine"}
    return config(ADAMW, NEOX, common, saved, *parts)


@pytest.mark.parametrize("overrides", [
    {}, {"gradient_clipping": 0.0, "log_grad_norm": True, "log_interval": 1}, {"trainable": {"last_layers": 1}},
    {**LLAMA, "no_weight_tying": False}, {**LLAMA, **EXPERTS},
], ids=["clipped", "norms of gradients", "frozen", "tied", "experts"])  # fmt: skip
def test_the_bits_of_separate_passes(overrides: dict[str, Any], tmp_path: Path) -> None:
    runs = [values(tmp_path / name, overrides, {"fused_update": name == "fused"}) for name in ("separate", "fused")]
    ((separate, fused),) = run_ranks(to_their_ends, 1, runs, timeout=TIMEOUT)
    assert bit_equal(separate, fused)
    assert losses(tmp_path / "fused") == losses(tmp_path / "separate") and len(losses(tmp_path / "fused")) == STEPS


def test_goes_on_as_without_an_end(tmp_path: Path) -> None:
    assert_resumes(values(tmp_path, {"fused_update": True, "train_iters": 4}), tmp_path)


@pytest.mark.parametrize("fused_first", [True, False])
def test_goes_on_from_the_other_update(fused_first: bool, tmp_path: Path) -> None:
    """State is the same on disk: a run that changes over ends with the weights of one that does not."""
    uninterrupted = values(tmp_path / "through", {"fused_update": fused_first, "train_iters": 4})
    interrupted = values(tmp_path / "cut", {"fused_update": fused_first, "train_iters": 4})
    resumed = {**interrupted, "load": interrupted["save"], "fused_update": not fused_first}
    ((full_weights, _, resumed_weights),) = run_ranks(
        to_their_ends, 1, [uninterrupted, {**interrupted, "exit_interval": 2}, resumed], timeout=TIMEOUT
    )
    assert bit_equal(full_weights, resumed_weights)


def updated(skip: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    master = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    weight = torch.nn.Parameter(master.detach().bfloat16())
    optimizer = FusedAdamW([{"params": [master], "weight_decay": 0.1}], {master: weight}, 0.01, (0.9, 0.95), 1e-8)
    for found_inf in (0.0, skip):
        optimizer.gradients = {master: torch.full_like(weight, 2.0)}
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found_inf)  # type: ignore[attr-defined]
        optimizer.step()
    return master.detach(), weight.detach(), dict(optimizer.state[master])


def test_a_skipped_step_changes_nothing() -> None:
    skipped, applied = updated(1.0), updated(0.0)
    assert (float(skipped[2]["step"]), float(applied[2]["step"])) == (1.0, 2.0)
    assert torch.equal(skipped[1], skipped[0].bfloat16()) and not torch.equal(skipped[0], applied[0])
    torch.testing.assert_close(skipped[2]["exp_avg"], torch.full((9,), 0.1 * 2.0 / 4.0))


def test_refused_where_gradients_are_added(tmp_path: Path) -> None:
    fused = {"fused_update": True}
    assert_refused(
        (values(tmp_path, fused, {"precision": "fp32"}), "fused_update.*16-bit"),
        (values(tmp_path, fused, {"train_micro_batch_size_per_gpu": 4}), "fused_update.*one micro-batch"),
        (values(tmp_path, fused, DIFFERENCE), "fused_update.*one micro-batch"),
        (values(tmp_path, fused, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}), "fused_update.*AdamW"),
        (values(tmp_path, fused, {"engine": "deepspeed"}), "fused_update.*engine"),
    )
