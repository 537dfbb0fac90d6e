"""`qk_clip_threshold`: logits are transformers', heads above it come down to it, in every layout."""

import importlib
import math
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing.families.convert import from_hf
from megatron.data import Batch
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.attention.largest_logits import LogitWatch
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.native.qk_clip import QKClip
from megatron.training.native.shards import ReplicatedWeights
from megatron.training.nonfinite_guard import SpikeGuard
from tests.checkpointing.family_models import VOCAB, collected, on_disk, random_model
from tests.model.stages import Weights, document_batch, make_stage, random_batch, small
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import (
    ADAMW,
    LLAMA,
    NEOX,
    TABLE,
    assert_alike,
    begin,
    cells,
    config,
    curves_of,
    metric_rows,
    run_to_end,
)

ROWS, SEQ = 2, 16
FAMILIES = {"gpt_neox": "gpt_neox", "llama 3": "llama", "mistral": "mistral", "deepseek 3": "deepseek_v3"}
LATENT = {**LLAMA, "num_kv_heads": None, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6,
          "qk_rope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
THRESHOLD = 0.05
MODELS: dict[str, dict[str, Any]] = {"neox": NEOX, "llama": {**LLAMA, **PACKED}, "latent": LATENT}


def imported(case: str, model: Any) -> tuple[NeoXArgs, Weights]:
    saved, tensors = on_disk(model)
    keys, layers = from_hf(saved, tensors.__getitem__, padded_vocab_size=VOCAB)
    sizes = {"padded_vocab_size": VOCAB, "seq_length": SEQ, "train_micro_batch_size_per_gpu": ROWS, "precision": "fp32"}
    return NeoXArgs.from_dict({**keys, **sizes}).for_world(1), collected(layers)


def largest_of_transformers(case: str, model: Any, tokens: Tensor, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """The largest logit of each head by layer, as transformers' eager attention computes logits."""
    module = importlib.import_module(f"transformers.models.{FAMILIES[case]}.modeling_{FAMILIES[case]}")
    eager, largest = module.eager_attention_forward, list[Tensor]()

    def noted(
        layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **options: Any
    ) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        largest.append((query @ keys.transpose(2, 3) * scaling + mask).amax((0, 2, 3)))
        return eager(layer, query, key, value, mask, scaling=scaling, **options)

    patch.setattr(module, "eager_attention_forward", noted)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return largest


@pytest.mark.parametrize("case", FAMILIES)
def test_heads_come_down_to_the_threshold(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(case)
    args, layer_weights = imported(case, model)
    stage = make_stage(args, layer_weights).train()
    groups = ParallelGroups.single()
    held = ReplicatedWeights(stage, args, groups, torch.float32)
    batch = random_batch(args, rows=ROWS)
    expected = largest_of_transformers(case, model, batch.tokens, monkeypatch)
    threshold = float(torch.stack(expected).median())
    clip = QKClip(stage, groups, threshold)
    for limit in (math.inf, threshold):
        clip.begin_step()
        stage(None, batch)
        blocks = [layer for layer in stage.layers.values() if hasattr(layer, "attention")]
        watched = [block.attention.logit_watch.largest for block in blocks]
        bounds = [largest.clamp(max=limit) for largest in expected]
        if limit == math.inf:
            torch.testing.assert_close(watched, bounds, rtol=1e-4, atol=1e-4)
            clip.measure()
            clip.decide(torch.tensor(False))
            assert float(clip.metrics["max_attention_logit"]) == pytest.approx(float(torch.stack(expected).max()))
            clip.apply(held.trained)
            held.publish(held.trained)
        else:  # a changed block changes what the next ones read
            torch.testing.assert_close(watched[0], bounds[0], rtol=1e-4, atol=1e-4)
    assert float(expected[0].max()) > threshold > float(expected[0].min())


def test_a_skipped_step_scales_nothing() -> None:
    args, layer_weights = imported("llama 3", random_model("llama 3"))
    stage, groups = make_stage(args, layer_weights).train(), ParallelGroups.single()
    held = ReplicatedWeights(stage, args, groups, torch.float32)
    clip, old_weights = QKClip(stage, groups, 1e-3), [shard.local.detach().clone() for shard in held.trained]
    stage(None, random_batch(args, rows=ROWS))
    clip.measure()
    clip.decide(torch.tensor(True))
    clip.apply(held.trained)
    assert all(torch.equal(shard.local, old) for shard, old in zip(held.trained, old_weights, strict=True))


def test_only_pairs_of_one_document_count() -> None:
    """The expected logits are those of each document by itself."""
    args = small(num_layers=1)
    watch, generator = LogitWatch(0.5), torch.Generator().manual_seed(1)
    batch = document_batch(args)
    assert batch.documents is not None
    starts, (rows, seq) = batch.documents.cu_seqlens, batch.tokens.shape
    q, k = (torch.randn(seq, rows, heads, 6, generator=generator) for heads in (4, 2))
    watch(q, k, AttentionInputs(cu_seqlens=starts))
    flat_q, flat_k = (x.transpose(0, 1).flatten(0, 1).repeat_interleave(4 // x.shape[2], 1) for x in (q, k))
    largest = []
    for start, end in pairwise(starts.tolist()):
        logits = torch.einsum("qhd,khd->hqk", flat_q[start:end], flat_k[start:end]) * 0.5
        largest.append(logits.masked_fill(~torch.ones_like(logits[0]).tril().bool(), -math.inf).amax((1, 2)))
    torch.testing.assert_close(watch.largest, torch.stack(largest).amax(0))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_padding_has_no_logits(packed: bool) -> None:
    """The expected logits are those of the rows' texts alone; a padded row by itself has none."""
    args = small(num_layers=1, seq_length=SEQ)
    stage = make_stage(args).train()
    clip = QKClip(stage, ParallelGroups.single(), 1e-3)
    batch = (document_batch if packed else random_batch)(args, rows=3)
    filled = torch.tensor([5, SEQ, 0])
    stage(None, replace(batch, filled=filled))
    clip.measure()
    watch = next(layer.attention.logit_watch for layer in stage.layers.values() if hasattr(layer, "attention"))
    padded = watch.largest
    clip.begin_step()
    starts = batch.documents.cu_seqlens.tolist() if batch.documents is not None else [0, SEQ, 2 * SEQ]
    for row, end in enumerate(filled.tolist()):
        begins = [place - row * SEQ for place in starts if row * SEQ <= place < row * SEQ + end]
        for start, stop in pairwise([*begins, end]):
            rows, columns = slice(row, row + 1), slice(start, stop)
            positions = None if batch.positions is None else batch.positions[rows, columns]
            text = Batch(*(x[rows, columns] for x in (batch.tokens, batch.labels, batch.loss_weights)), positions)
            stage(None, text)
    torch.testing.assert_close(padded, watch.largest)
    clip.begin_step()
    stage(None, replace(batch, filled=torch.zeros(3, dtype=torch.int64)))
    clip.measure()
    clip.decide(torch.tensor(False))
    assert math.isnan(float(clip.metrics["max_attention_logit"]))


def logits_of_steps(rank: int, world_size: int, values: dict[str, Any], is_spike: bool) -> list[float]:
    """For the pool: the largest logit of each of four steps, all of which are spikes, or change no weight."""
    training = begin(values)
    if is_spike:
        training.engine.spikes.restore([0.0] * SpikeGuard.MIN_LOSSES)  # type: ignore[attr-defined]
    results = [training.engine.train_step(batches, 0.0) for batches in islice(batches_of(training), 4)]
    assert all(bool(result.spike) == is_spike for result in results)
    return [float(result.metrics["max_attention_logit"]) for result in results]


def test_a_skipped_spike_has_a_logit_of_its_own() -> None:
    values = run_of("llama", {"qk_clip_threshold": 1e6, "weight_decay": 0.0})
    expected = run_ranks(logits_of_steps, 1, values, False)[0]
    assert len(set(expected)) == 4
    assert run_ranks(logits_of_steps, 1, {**values, "skip_step_above_sigma": 1.0}, True)[0] == expected


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["heads", "shared keys"])
def test_a_logit_beyond_fp16_is_seen_and_none_turns_weights_into_nothing(heads: tuple[int, int]) -> None:
    """A product of 2,560,000 is within fp16 after the scale alone; of an infinite logit nothing is scaled."""
    watch = LogitWatch(1 / 64)
    q, k = (torch.full((3, 1, number, 64), 200.0, dtype=torch.float16) for number in heads)
    watch(q, k, AttentionInputs())
    assert watch.largest is not None and watch.largest.tolist() == [40_000.0] * heads[0]
    args, layer_weights = imported("llama 3", random_model("llama 3"))
    stage = make_stage(args, layer_weights).train()
    clip = QKClip(stage, ParallelGroups.single(), 1.0)
    stage(None, random_batch(args, rows=ROWS))
    attention = next(layer.attention for layer in stage.layers.values() if hasattr(layer, "attention"))
    attention.logit_watch.largest[0] = math.inf
    held = ReplicatedWeights(stage, args, ParallelGroups.single(), torch.float32)
    clip.measure()
    clip.decide(torch.tensor(False))
    clip.apply(held.trained)
    assert all(shard.local.isfinite().all() and shard.local.any() for shard in held.trained)


def test_rows_of_metrics_have_the_largest_logit(tmp_path: Path) -> None:
    constant = {"optimizer": {"type": "Adam", "params": {"lr": 0.0}}, "weight_decay": 0.0}
    saves = {"save": str(tmp_path), "train_iters": 8, "checkpoint_factor": 8}
    run_ranks(run_to_end, 1, run_of("llama", constant, saves))
    largest = [row["train/max_attention_logit"] for row in metric_rows(tmp_path, "train/max_attention_logit")]
    assert len(largest) == 8 and largest[0] > 2 * THRESHOLD and largest[-1] < 1.3 * THRESHOLD


@pytest.mark.parametrize(("changes", "facts"), [
    ({"use_qk_layernorm": True}, "norms .*use_qk_layernorm"), ({"clip_qkv": 1.0}, "clip_qkv"),
    ({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"), ({"lora": {"r": 4}}, "frozen .*lora"),
    ({"pos_emb": "alibi"}, "biases .*alibi"), ({"context_parallel_size": 2, "engine": "native"}, "context_parallel"),
    ({"te_mha": True}, "te_mha"), ({"trainable": {"last_layers": 1}}, "frozen .*trainable"),
])  # fmt: skip
def test_what_it_does_not_do_is_refused(changes: dict[str, Any], facts: str) -> None:
    ranks = changes.get("context_parallel_size", 1)
    with pytest.raises(ConfigError, match=f"qk_clip_threshold: .*{facts}" if "engine" not in changes else facts):
        NeoXArgs.from_dict(run_of("neox", {"num_workers": 1}, changes)).for_world(ranks)


def run_of(model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return config(MODELS[model], ADAMW, {"qk_clip_threshold": THRESHOLD, "train_micro_batch_size_per_gpu": 2}, *parts)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return curves_of({model: run_of(model) for model in MODELS}, 4)


@pytest.mark.parametrize("layout", cells(["tp2 sp"], ["zero3", "pp2"], ["dp2", "zero1"]))
def test_layouts_equal_one_process(layout: str, one_process: dict[str, Any]) -> None:
    ranks, keys = TABLE[layout] if layout != "dp2" else (2, {})
    assert_alike(curves_of({model: run_of(model, keys) for model in MODELS}, 4, ranks), one_process)
