"""Preferences begin at ln 2 on the device, packed and padded, and greedy text is the CPU's."""

import math
from pathlib import Path

import pytest
import torch

from megatron.data.preferences.preference_sets import preference_samples_per_epoch
from megatron.generation import SamplingParams, complete
from megatron.neox_arguments import NeoXArgs
from megatron.training import train
from tests.generation.runs import GOLDEN_PROMPTS, LAYOUTS, golden_model
from tests.gpu.runs import PRECISIONS, run
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.training.runs import metric_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pack_impl", ["best_fit", "unpacked"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dpo_begins_at_ln_2(precision: str, pack_impl: str, tmp_path: Path, device: torch.device) -> None:
    steps = {"train_iters": 8, "train_micro_batch_size_per_gpu": 2, "checkpoint_factor": 100}
    save = {"save": str(tmp_path / "run"), "pack_impl": pack_impl}
    with run(pairwise(pairs(tmp_path), PRECISIONS[precision], steps, save)) as training:
        assert training.groups.device == device
        train(training)
    losses = [row["train/lm_loss"] for row in metric_rows(tmp_path / "run")]
    # Policy and reference are the same weights and the same kernels; the reference's scores are kept in fp32.
    assert losses[0] == pytest.approx(math.log(2), abs={"fp32": 1e-5, "bf16": 1e-2}[precision])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shared_prompts_are_those_that_stand_twice(precision: str, tmp_path: Path, device: torch.device) -> None:
    """Scores of the reference from rows with shared prompts serve rows without; losses of steps are equal."""
    losses = []
    for sharing in (True, False):
        save = tmp_path / str(sharing)
        values = pairwise(pairs(tmp_path), PRECISIONS[precision], pack_impl="best_fit", prefix_sharing=sharing,
                          train_batch_size=None, train_iters=3, save=str(save), checkpoint_factor=100,
                          reference_cache_dir=str(tmp_path / "references"))  # fmt: skip
        rows = preference_samples_per_epoch(NeoXArgs.from_dict(values))
        with run({**values, "train_batch_size": rows, "train_micro_batch_size_per_gpu": rows}) as training:
            train(training)
        losses.append([row["train/lm_loss"] for row in metric_rows(save)])
    assert losses[0] == pytest.approx(losses[1], rel={"fp32": 1e-4, "bf16": 0.05}[precision])


@pytest.mark.parametrize("name", ["neox_pp1_mp1", "llama_pp1_mp1"])
def test_greedy_text_is_that_of_the_cpu(name: str, device: torch.device) -> None:
    texts, sampling, seeds = [], SamplingParams(), range(len(GOLDEN_PROMPTS))
    for backend, kind in (("gloo", "cpu"), ("nccl", device.type)):
        model = golden_model(name, {**LAYOUTS["one process"][1], "distributed_backend": backend, "precision": "fp32"})
        assert model.groups.device.type == kind
        texts.append([c.tokens for c in complete(model, GOLDEN_PROMPTS, sampling, maximum_tokens=32, seeds=seeds)])
    assert texts[0] == texts[1]
