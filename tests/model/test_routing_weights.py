"""The weights of chosen experts are their own scores, however they were chosen."""

from typing import Any

import pytest
import torch

from megatron.model.moe.router import Router
from megatron.model.specs import moe_spec
from megatron.mpu import ParallelGroups
from tests.model.stages import small

SPEC: dict[str, Any] = {
    "activation": "swiglu", "intermediate_size": 48, "compat_ffn_width": "none", "use_bias_in_mlp": False,
    "moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk", "num_layers": 1,
}  # fmt: skip
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 1}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("choice", [GROUPS, {"moe_router_bias_update_rate": 0.1}, {"moe_router_type": "sinkhorn"}])
def test_weights_are_scores_of_the_chosen(scores: str, choice: dict[str, Any]) -> None:
    args = small(**{**SPEC, "moe_router_score_function": scores, **choice})
    router = Router(moe_spec(args, 0).router, ParallelGroups.single()).train()  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    router.layer.weight.data = torch.randn(8, 32, generator=generator)
    if router.expert_bias is not None:
        router.expert_bias.data = torch.tensor([5.0, 0, 0, 0, 5.0, 0, 0, 0])  # above all scores
    x = torch.randn(24, 2, 32, generator=generator)
    logits = x @ router.layer.weight.T
    expected = torch.sigmoid(logits) if scores == "sigmoid" else torch.softmax(logits, -1)
    routing, _ = router(x, None, None)
    assert not routing.experts.equal(logits.topk(2).indices), "the choice is not that of the highest scores"
    torch.testing.assert_close(routing.weights, expected.gather(-1, routing.experts))
