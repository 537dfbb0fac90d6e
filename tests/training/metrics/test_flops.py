"""Model FLOPs beside torch's own counter and beside NeoX's formula."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.model import freeze
from megatron.model.init import stage_parameters
from megatron.objectives import LANGUAGE_MODELLING, language_modelling
from megatron.training.metrics.flops import model_flops, neox_flops
from tests.model.stages import make_stage, random_batch, random_weights, small
from tests.training.runs import LLAMA

ROWS = 3
MODELS: dict[str, dict[str, Any]] = {
    "neox": {"gpt_j_residual": True, "rotary_pct": 0.25, "no_weight_tying": True},
    "llama": LLAMA,
    "learned": {"pos_emb": "learned", "padded_vocab_size": 192, "seq_length": 32, "num_layers": 3},
    "alibi": {"pos_emb": "alibi", "activation": "geglu", "num_kv_heads": 1},
    "two depths": {**LLAMA, "mtp_num_layers": 2},
    "adapters": {"num_layers": 6, "lora": {"r": 4, "target": ["q_proj", "dense", "up_proj"]}},
    "adapters and copies": {"no_weight_tying": True, "lora": {"r": 2, "modules_to_save": ["embed_tokens", "lm_head"]}},
    "adapters and a tied copy": {"lora": {"r": 2, "modules_to_save": ["embed_tokens"]}},
}


@pytest.mark.parametrize("name", MODELS)
def test_model_flops_are_those_of_torchs_counter(name: str) -> None:
    # The counter knows only plain attention on CPUs, and counts the whole square, we the causal half.
    args = small(attention_backend="math", **MODELS[name], train_micro_batch_size_per_gpu=ROWS).for_world(1)
    stage, batch = make_stage(args, random_weights(args)).train(), random_batch(args, rows=ROWS)
    freeze(stage_parameters(stage), args)
    objective = language_modelling(mtp_layers=args.mtp_num_layers or 0, mtp_factor=0.5)
    with FlopCounterMode(display=False) as counter:
        stage(None, batch, lambda head: objective.loss_sum(head, batch, None)[0]).backward()
    one_product = 2 * ROWS * args.seq_length**2 * args.num_attention_heads * args.head_dim
    square = (args.num_layers + (args.mtp_num_layers or 0)) * 6 * one_product  # two products forward, four backward
    operator_flops = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    assert operator_flops["aten.bmm"] == square
    assert model_flops(args) == pytest.approx(counter.get_total_flops() - square / 2, rel=0.01)


def test_model_flops_count_the_full_step() -> None:
    micro_batch = small(train_micro_batch_size_per_gpu=2).for_world(1)
    step = small(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3).for_world(4)
    assert model_flops(step) == 12 * model_flops(micro_batch)


def test_flops_of_gated_delta_net_are_those_of_torchs_counter() -> None:
    """The counter leaves out convolutions and triangular systems, and counts full squares of chunks."""
    chunk, key_heads, heads, key, value, blocks = 4, 2, 6, 5, 7, 3
    args = small(
        norm="rmsnorm", num_layers=blocks, attention_config=[[["gated_delta_net"], "all"]], seq_length=256,
        max_position_embeddings=256, linear_num_key_heads=key_heads, linear_num_value_heads=heads,
        linear_key_head_dim=key, linear_value_head_dim=value, linear_chunk_size=chunk,
        train_micro_batch_size_per_gpu=ROWS,
    ).for_world(1)  # fmt: skip
    stage, batch = make_stage(args, random_weights(args)).train(), random_batch(args, rows=ROWS)
    with FlopCounterMode(display=False) as counter:
        stage(None, batch, lambda head: LANGUAGE_MODELLING.loss_sum(head, batch, None)[0]).backward()
    scans = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    pairs, states = chunk * (2 * key_heads * key + heads * value), 3 * heads * key * value
    system, convolution = chunk * heads * (key + value), 4 * (2 * key_heads * key + heads * value)
    # Products are computed twice forward. The gradient of a system is a product; the first state has none.
    per_token = 2 * ROWS * args.seq_length * blocks
    assert scans == pytest.approx(per_token * (4 * (pairs + states) + system), rel=0.01)
    uncounted = 3 * per_token * ((pairs + system) / 2 + states + convolution)
    assert model_flops(args) == pytest.approx(counter.get_total_flops() - scans + uncounted, rel=1e-3)
    assert neox_flops(args, 3) == pytest.approx(model_flops(args)), "GPT-NeoX has no such blocks"


SHAPE_1_4B: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "max_position_embeddings": 2048,
    "padded_vocab_size": 50304,
}  # fmt: skip


def test_both_formulas_on_the_1_4b_shape() -> None:
    args = small(**SHAPE_1_4B, num_layers=24, train_micro_batch_size_per_gpu=8).for_world(1)
    tokens, weights = 8 * 2048, 24 * 12 * 2048**2 + 2048 * 50304
    assert model_flops(args) == 6 * tokens * (weights + 24 * 2048 * 2048)
    # NeoX counts attention's whole square, and the head as if computed again too (arXiv 2104.04473).
    square, head = 6 * tokens * 24 * 2048 * 2048, 6 * tokens * 2048 * 50304
    assert neox_flops(args, 3) - model_flops(args) == pytest.approx(square - head / 4)


def test_formulas_of_mamba() -> None:
    """The 1.4B shape that GPT-NeoX ships: its formula, and the products of a hybrid by hand."""
    shape: dict[str, Any] = {**SHAPE_1_4B, "train_micro_batch_size_per_gpu": 4, "use_bias_in_attn_linear": False}
    tokens, inner, rank, head = 4 * 2048, 4096, 128, 2048 * 50304
    mamba = small(**shape, num_layers=48, attention_config=["mamba"] * 48).for_world(1)
    layer = inner * (11 * 16 + 4 * rank + 1) + 6 * inner * 2048 + 2 * inner * 4
    assert neox_flops(mamba, 4) == pytest.approx(tokens * (4 * 48 * layer + 6 * head))
    weights = 2048 * 2 * inner + 4 * inner + inner * (rank + 32) + inner * rank + inner * 2048
    assert model_flops(mamba) == pytest.approx(6 * tokens * (48 * (weights + 3 * inner * 16) + head))
    hybrid = small(**shape, num_layers=3, attention_config=["mamba2", "attention", "mlp"]).for_world(1)
    rows, chunk = 2 * inner + 2 * 8 * 128 + 64, 256
    weights = 2048 * rows + 4 * (inner + 2 * 8 * 128) + inner * 2048 + 12 * 2048**2
    chunk_products = chunk / 2 * (8 * 128 + inner) + 2 * inner * 128 + 2048 * 2048
    assert model_flops(hybrid) == pytest.approx(6 * tokens * (weights + chunk_products + head))
    assert neox_flops(hybrid, 3) == pytest.approx(model_flops(hybrid)), "GPT-NeoX has no such blocks"
