"""Context parallelism: steps of ranks that share each row equal those of one process, in every layout."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.data.context_parts import ContextLayout
from megatron.mpu import fork_seed
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, assert_resumes, to_their_ends
from tests.training.runs import (
    ADAMW,
    LLAMA,
    NEOX,
    RPE,
    SGD,
    SP2,
    Curve,
    assert_alike,
    begin_each,
    cells,
    config,
    curves,
    curves_of,
    full_curve,
)
from tests.training.test_experts import MOE

STEPS = 4
CP2, CP4, PP2 = {"context_parallel_size": 2}, {"context_parallel_size": 4}, {"pipe_parallel_size": 2}
GATHER, RING, ULYSSES = ({"context_parallel_type": name} for name in ("allgather", "ring", "ulysses"))
PAIRS = {"context_parallel_ulysses_size": 2}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
RECOMPUTE, EP2 = {"checkpoint_activations": True}, {"expert_parallel_size": 2}
TP2 = {"model_parallel_size": 2}
TYPES: dict[str, tuple[int, dict[str, Any]]] = {
    "gather 2": (2, CP2 | GATHER), "ring 2": (2, CP2 | RING), "ulysses 2": (2, CP2 | ULYSSES),
    "gather 4": (4, CP4 | GATHER), "ring 4": (4, CP4 | RING), "ulysses 4": (4, CP4 | ULYSSES),
    "gather of pairs": (4, CP4 | GATHER | PAIRS), "ring of pairs": (4, CP4 | RING | PAIRS),
}  # fmt: skip
# Number of ranks times that of context ranks, and keys.
COMBINED: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2), "tp2 sp": (2, SP2), "pp2": (2, PP2), "zbv": (2, PP2 | {"pipeline_schedule": "zbv"}),
    "interleaved": (2, PP2 | {"pipeline_schedule": "interleaved"}),
    **{f"zero{stage}": (1, zero(stage)) for stage in (1, 2, 3)},
    "dp2": (2, {}), **{f"dp2 zero{stage}": (2, zero(stage)) for stage in (1, 2, 3)},
    "recompute": (1, RECOMPUTE), "selective": (1, RECOMPUTE | {"recompute_granularity": "selective"}),
    "offload": (1, zero(2, offload_optimizer={"device": "cpu"})), "ep2": (1, EP2), "dp2 ep2": (2, EP2),
    "dp2 ep4 zero3": (2, zero(3) | {"expert_parallel_size": 4}),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **TYPES,
    **{
        f"{kind} {name}": (2 * ranks, TYPES[kind][1] | keys)
        for kind in ("gather 2", "ring 2", "ulysses 2")
        for name, (ranks, keys) in COMBINED.items()
    },
    **{f"{kind} compiled": (2, TYPES[kind][1] | {"compile": "block"}) for kind in ("gather 2", "ulysses 2")},
    "ring of pairs tp2 sp": (8, CP4 | RING | PAIRS | SP2), "auto tp2 pp2 sp": (8, CP2 | PP2 | SP2),
}  # fmt: skip
WINDOW = {**LLAMA, **SGD, "sliding_window_width": 5}
MODELS: dict[str, dict[str, Any]] = {
    "neox tied": {**NEOX, **ADAMW}, "llama": {**LLAMA, **ADAMW, "no_weight_tying": True}, "rpe": {**RPE, **ADAMW},
    "packed": {**LLAMA, **ADAMW, **DOCUMENTS}, "narrow window": WINDOW,
    "wide window, packed": {**WINDOW, **DOCUMENTS, "sliding_window_width": 20},
    "one head of keys": {**LLAMA, **SGD, "num_kv_heads": 1}, "alibi": {**NEOX, **ADAMW, "pos_emb": "alibi"},
    "caps and sinks": {**LLAMA, **ADAMW, "attn_logit_softcapping": 5.0, "attention_sinks": True},
    "learned": {**NEOX, **SGD, **DOCUMENTS, "pos_emb": "learned"},
    "odd": {**LLAMA, **ADAMW, **DOCUMENTS, "seq_length": 29}, "tiny": {**NEOX, **ADAMW, "seq_length": 5},
    "topk": {**MOE, **ADAMW},
    "sequence": {**MOE, **ADAMW, "moe_aux_loss_scope": "sequence", "seq_length": 29, "moe_expert_bias": True,
                 "moe_router_bias_update_rate": 0.01},
    "step": {**MOE, **ADAMW, "moe_aux_loss_scope": "step", **DOCUMENTS},
    "adapters": {**LLAMA, **ADAMW, "lora": {"r": 4, "alpha": 8, "dora": True}},
    "hybrid": {**LLAMA, **ADAMW, **DOCUMENTS, "attention_config": ["mamba2", "global", "short_conv", "mamba2_mlp"],
               "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 8,
               "mamba_chunk_size": 4},
    "delta": {**LLAMA, **ADAMW, "seq_length": 29, "attention_config": [[["gated_delta_net", "global"], "all"]],
              "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
              "linear_value_head_dim": 5, "linear_chunk_size": 3},
    "kimi": {**LLAMA, **ADAMW, **DOCUMENTS, "num_kv_heads": None, "pos_emb": "none", "kv_lora_rank": 10,
             "qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7,
             "attention_config": ["kimi_delta_attention", "global", "gated_delta_net", "mamba2"],
             "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
             "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "linear_chunk_size": 4, "mamba_num_heads": 8,
             "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 8, "mamba_chunk_size": 4},
    "muon": {**LLAMA, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}, "gradient_clipping": 0.5},
}  # fmt: skip
DEFAULT_CELLS = [
    ("gather 2", "packed"), ("ring 4", "odd"), ("ulysses 2", "rpe"), ("ring of pairs", "packed"),
    ("gather 2 pp2", "neox tied"), ("ring 2 dp2 ep2", "sequence"), ("gather 2 dp2 zero3", "wide window, packed"),
    ("gather 4", "hybrid"), ("gather 4", "kimi"),
]  # fmt: skip
MORE_CELLS = [("ulysses 2 tp2 sp", "llama"), ("ring 2 zbv", "llama"), ("ulysses 4", "one head of keys")]
EXPERT_MODELS = ("topk", "sequence", "step")
PRODUCT = [(layout, "packed") for layout in LAYOUTS if " ep" not in layout]
PRODUCT += [(layout, model) for layout in TYPES for model in MODELS]
PRODUCT += [(layout, model) for layout in LAYOUTS if " ep" in layout for model in EXPERT_MODELS]
PRODUCT += [
    ("gather 4", "tiny"), ("gather of pairs", "caps and sinks"), ("gather 2 ep2", "step"),
    ("gather 2 tp2 sp", "odd"), ("ring 2 tp2 sp", "odd"), ("ulysses 2 interleaved", "odd"), ("ring 2 dp2 zero1", "rpe"),
    ("gather 2 recompute", "narrow window"), ("gather 2 tp2", "muon"), ("ulysses 2 dp2 zero2", "muon"),
    ("ulysses 2 zero3", "adapters"), ("ulysses 2 tp2 sp", "caps and sinks"), ("gather 2 tp2 sp", "hybrid"),
    ("ring 2 zbv", "hybrid"), ("ulysses 2 dp2 zero2", "hybrid"), ("gather 2 recompute", "hybrid"),
    ("ring 2 tp2 sp", "delta"), ("ulysses 2 pp2", "delta"), ("gather 2 dp2 zero3", "kimi"), ("ring 2 zbv", "kimi"),
    ("gather 2 recompute", "kimi"), ("ulysses 2 compiled", "kimi"),
]  # fmt: skip
PRODUCT = [cell for cell in dict.fromkeys(PRODUCT) if cell not in DEFAULT_CELLS + MORE_CELLS]


def model_config(model: str, *layout: dict[str, Any]) -> dict[str, Any]:
    return config({"train_micro_batch_size_per_gpu": 2}, MODELS[model], *layout)


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Curve]:
    return cache(lambda model: curves_of({model: model_config(model)}, STEPS)[model])


@pytest.mark.parametrize(("layout", "model"), cells(DEFAULT_CELLS, MORE_CELLS, PRODUCT))
def test_layouts_equal_one_process(layout: str, model: str, reference: Callable[[str], Curve]) -> None:
    ranks, keys = LAYOUTS[layout]
    actual = curves_of({model: model_config(model, keys)}, STEPS, ranks)
    bounds = {"norms": 1e-4, "weights": 1e-3} if model == "muon" else {}  # its iterations are in bf16
    assert_alike(actual, {model: reference(model)}, **bounds)


# -- dropout -------------------------------------------------------------------------------------------------


def _full_row_dropout(context: int, x: Tensor, p: float, seed: Tensor, training: bool) -> Tensor:
    """Dropout whose masks are those of full rows, drawn without this context rank's number."""
    if p == 0.0 or not training:
        return x
    rank = torch.distributed.get_rank() if context > 1 else 0
    seq = config()["seq_length"]
    with fork_seed(int(seed) - rank, x.device):
        mask = F.dropout(torch.ones(seq, *x.shape[1:]), p)
    return x * mask[ContextLayout(context).columns(seq, rank)] if context > 1 else x * mask


def curves_with_equal_masks(rank: int, world_size: int, values: dict[str, Any], steps: int) -> Any:
    """For the pool, whose ranks are all context ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("model.block", "model.embedding", "mpu.layers"):
            patch.setattr(f"megatron.{module}.dropout", partial(_full_row_dropout, world_size))
        return curves(rank, world_size, [values], steps)[0]


@pytest.mark.parametrize("context", cells([2], product=[4]))
def test_dropout_with_equal_masks_equals_one_process(context: int) -> None:
    """Hidden states and adapters have dropout, and embeddings NEFTune's noise."""
    adapters = {"lora": {"r": 4, "alpha": 8, "dropout": 0.2}}
    keys = config(LLAMA, ADAMW, adapters, DOCUMENTS, hidden_dropout=0.2, neftune_noise_alpha=5.0)
    keys["train_micro_batch_size_per_gpu"] = 2
    [expected] = run_ranks(curves_with_equal_masks, 1, keys, STEPS)
    parts = run_ranks(curves_with_equal_masks, context, {**keys, "context_parallel_size": context}, STEPS)
    assert_alike({"run": full_curve(parts, keys)}, {"run": full_curve([expected], keys)})


def masks_of(rank: int, world_size: int, values: dict[str, Any]) -> list[int]:
    """For the pool: the seeds of a block's dropout."""
    training = next(begin_each([values]))
    return [int(seed) for seed in training.engine.stage.layers["2"].seeds(7, 2)]


def test_each_rank_draws_masks_of_its_own() -> None:
    keys = config(LLAMA, CP2, SP2, hidden_dropout=0.2)
    seeds = run_ranks(masks_of, 4, keys)
    assert all(len({rank_seeds[kind] for rank_seeds in seeds}) == 4 for kind in range(3))
    keys = config(LLAMA, CP2, hidden_dropout=0.2, attention_dropout=0.2)
    [[expected]] = run_ranks(curves, 1, [{**keys, "context_parallel_size": 1}], STEPS)
    parts = [rank_parts[0] for rank_parts in run_ranks(curves, 2, [keys], STEPS)]
    assert all(part.losses == pytest.approx(expected.losses, rel=0.05) for part in parts)
    assert parts[0].losses != pytest.approx(expected.losses, rel=1e-6)


# -- rows that leave a rank nothing to do --------------------------------------------------------------------


def steps_on_padding(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[float, float]]:
    """For the pool: loss and norm of steps on rows of which only the first tokens are filled or trained."""
    training, results = next(begin_each([values])), []
    for filled, trained in ((3, 3), (32, 2), (20, 0), (1, 1)):
        columns = torch.arange(32)
        tokens = (columns * 7 % 300).expand(2, -1).contiguous()
        weights = (columns < trained).long().expand(2, -1).contiguous()
        full = torch.full((2,), filled) if filled < 32 else None
        batch = Batch(tokens * (columns < filled), tokens.roll(-1, 1) * weights, weights, filled=full)
        result = training.engine.train_step([batch] * training.args.gradient_accumulation_steps, 1e-3)
        results.append((float(result.loss), float(result.grad_norm)))
    return results


@pytest.mark.parametrize("model", cells(["topk"], ["packed"], ["caps and sinks", "rpe"]))
def test_rows_of_padding_give_no_nan(model: str) -> None:
    keys = model_config(model)
    [expected] = run_ranks(steps_on_padding, 1, keys)
    for results in run_ranks(steps_on_padding, 4, {**keys, **CP4}):
        assert all(torch.tensor(pair).isfinite().all() for pair in results)
        assert results == [pytest.approx(pair, rel=1e-5, abs=1e-7) for pair in expected]
    assert expected[2] == (0.0, 0.0), "nothing is trained in this step"


# -- precision and checkpoints -------------------------------------------------------------------------------


@pytest.mark.more
def test_bf16_is_close_to_one_process() -> None:
    keys = config(LLAMA, ADAMW, DOCUMENTS, {"precision": "bfloat16", "train_micro_batch_size_per_gpu": 2})
    expected = curves_of({"run": keys}, STEPS)
    assert_alike(curves_of({"run": {**keys, **CP2}}, STEPS, 2), expected, losses=1e-3, norms=1e-2, weights=1e-2)


def saved(save: Path, **overrides: Any) -> dict[str, Any]:
    folders = {"save": str(save), "load": str(save), "checkpoint_factor": 100, "train_iters": 6}
    return config(ADAMW, LLAMA, DOCUMENTS, {"train_micro_batch_size_per_gpu": 2}, folders, overrides)


@pytest.mark.more
def test_a_run_that_is_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert_resumes(saved(tmp_path, load=None, hidden_dropout=0.1, **CP2, **zero(2)), tmp_path, 4)


@pytest.mark.more
def test_other_numbers_of_context_ranks_go_on(tmp_path: Path) -> None:
    """4, 1 and 2 in turn, with other stages of ZeRO, on four ranks."""
    turns = [(4, 3, 2), (1, 1, 4), (2, 0, 6)]
    runs = [
        saved(tmp_path, context_parallel_size=context, exit_interval=last, **zero(stage))
        for context, stage, last in turns
    ]
    uninterrupted = saved(tmp_path / "through", **zero(1))
    run_ranks(to_their_ends, 4, [uninterrupted, *runs], timeout=TIMEOUT)
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "through"), rel=1e-5)
