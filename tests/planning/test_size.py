"""Sizes of models: parameters of experts, and of trained parts."""

from megatron.planning.size import model_size
from tests.fake.layouts import HIDDEN, MODEL, VOCAB
from tests.training.layout_runs import args_of

EXPERTS = {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk", "moe_intermediate_size": 128}
EXPERT = 3 * HIDDEN * 128


def test_a_token_meets_some_experts() -> None:
    size = model_size(args_of({**MODEL, **EXPERTS}, {}, 1))
    assert size.total - size.active == 2 * (8 - 2) * EXPERT and size.trained == size.total


def test_trained_parts() -> None:
    size = model_size(args_of({**MODEL, "lora": {"r": 4, "alpha": 8, "target": ["o_proj"]}}, {}, 1))
    assert size.trained == 2 * 4 * 2 * HIDDEN
    dense = model_size(args_of(MODEL, {}, 1))
    assert size.total == dense.total + size.trained and dense.total > 2 * VOCAB * HIDDEN
    assert dense.tokens == MODEL["train_micro_batch_size_per_gpu"] * MODEL["seq_length"]
