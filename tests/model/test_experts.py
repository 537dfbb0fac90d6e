"""The parts of a mixture of experts against formulas written down another way."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megatron.model.build_specs import moe_spec
from megatron.model.moe import MoE
from megatron.model.moe.balance import balancing_loss
from megatron.model.moe.dispatch import limit
from megatron.model.moe.router import Router
from megatron.mpu import ParallelGroups, grouped_mm
from tests.model.stages import make_stage, random_batch, small
from tests.training.runs import GOLDEN

SPEC: dict[str, Any] = {"activation": "swiglu", "intermediate_size": 48, "compat_ffn_width": "none",
                        "use_bias_in_mlp": False, "moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk",
                        "num_layers": 1}  # fmt: skip


def moe_of(**changes: Any) -> MoE:
    return make_stage(small(**{**SPEC, **changes})).layers["2"].mlp.train()  # type: ignore[union-attr,return-value]


def router_of(**values: Any) -> Router:
    return Router(moe_spec(small(**values), 0).router, ParallelGroups.single())  # type: ignore[union-attr]


def expert(moe: MoE, number: int, x: Tensor) -> Tensor:
    """One expert of all tokens, by plain products."""
    experts, n = moe.experts.mlp, moe.experts.mlp.number
    w1, w2, w3 = (w.view(n, -1, 32)[number] for w in (experts.w1, experts.w2, experts.w3) if w is not None)
    biases = (experts.w1_bias, experts.w2_bias, experts.w3_bias)
    b1, b2, b3 = (0.0 if b is None else b.view(n, -1)[number] for b in biases)
    return (torch.nn.functional.silu(x @ w1.T + b1) * (x @ w3.T + b3)) @ w2 + b2


@pytest.mark.parametrize("changes", [
    {},
    {"moe_expert_bias": True, "moe_router_bias": True, "norm_topk_prob": True, "moe_router_topk_scaling_factor": 2.5},
])  # fmt: skip
def test_a_token_is_the_sum_of_its_experts(changes: dict[str, Any]) -> None:
    moe, x = moe_of(**changes), torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0))
    routing, _ = moe.router(x, None, None)
    out, sums = moe.core(x)
    expected = torch.zeros_like(x)
    for number in range(8):
        weight = torch.where(routing.experts == number, routing.weights, 0.0).sum(-1, keepdim=True)
        expected += weight * expert(moe, number, x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert sums.chosen.sum() == 2 * 16 * 2 and sums.tokens.tolist() == [16.0, 16.0]
    if changes:
        torch.testing.assert_close(routing.weights.sum(-1), torch.full((16, 2), 2.5))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("choice", [
    {"moe_router_num_groups": 4, "moe_router_group_topk": 1}, {"moe_router_bias_update_rate": 0.1},
    {"moe_router_type": "sinkhorn"},
])  # fmt: skip
def test_weights_are_scores_of_the_chosen(scores: str, choice: dict[str, Any]) -> None:
    """However they were chosen."""
    router = router_of(**{**SPEC, "moe_router_score_function": scores, **choice}).train()
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


def test_groups_of_products() -> None:
    """Sizes of groups may be anything, none too, and rows may be left over; gradients are autograd's."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(12, 6, generator=generator), torch.randn(4, 6, 5, generator=generator)
    ends, bounds = torch.tensor([3, 3, 9, 10], dtype=torch.int32), [(0, 3), (3, 3), (3, 9), (9, 10)]

    def one_by_one(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return torch.cat([x[i:j] @ weights[group] for group, (i, j) in enumerate(bounds)])

    results: list[list[Tensor]] = []
    for function in (grouped_mm, one_by_one):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = function(*leaves, ends)[:10]
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == 3
    torch.testing.assert_close(*results)


def test_groups_of_experts() -> None:
    """Tokens take experts of the groups whose two best sum to most, as DeepSeek-V3's."""
    router = router_of(**SPEC, moe_router_num_groups=4, moe_router_group_topk=2)
    scores = torch.rand(20, 1, 8, generator=torch.Generator().manual_seed(0))
    chosen = router._choose(scores, scores)
    for token, experts in zip(scores[:, 0], chosen[:, 0], strict=True):
        groups = token.view(4, 2).sum(1).topk(2).indices
        allowed = {int(2 * group + i) for group in groups for i in range(2)}
        best = sorted(allowed, key=lambda i: -token[i])[:2]
        assert experts.tolist() == best


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_sinkhorn_is_that_of_gpt_neox(rounds: int) -> None:
    """Golden: what GPT-NeoX's own function returned."""
    with np.load(GOLDEN / "sinkhorn/upstream.npz") as golden:
        logits, expected = (torch.from_numpy(golden[f"{rounds}_{name}"]).float() for name in ("logits", "scores"))
    actual = router_of(moe_num_experts=logits.shape[1])._sinkhorn(logits.unsqueeze(1))[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert actual.topk(2).indices.equal(expected.topk(2).indices)
    assert not actual.argmax(1).equal(logits.argmax(1))


def test_sinkhorn_balances_without_padding() -> None:
    router = router_of(moe_num_experts=8)
    logits = torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(0))
    token_mask = torch.arange(16).unsqueeze(1) < torch.tensor([9, 16])
    logits[~token_mask] = torch.arange(8.0)
    unpadded = router._sinkhorn(logits[token_mask].unsqueeze(1))[:, 0]
    torch.testing.assert_close(router._sinkhorn(logits, token_mask)[token_mask], unpadded)


@torch.no_grad()
@pytest.mark.parametrize("train", [False, True])
def test_what_padding_is_changes_nothing(train: bool) -> None:
    """With experts that are full, in validation too."""
    args = small(**SPEC, moe_expert_capacity_factor=1.0)
    stage = make_stage(args).train(train)
    batch = replace(random_batch(args), filled=torch.tensor([5, 16]))
    other_tokens = batch.tokens.clone()
    other_tokens[0, 5:] = 3
    assert not torch.equal(other_tokens, batch.tokens)
    logits, other_logits = (stage(None, replace(batch, tokens=tokens)) for tokens in (batch.tokens, other_tokens))
    assert torch.equal(logits[:5, 0], other_logits[:5, 0]) and torch.equal(logits[:, 1], other_logits[:, 1])


def test_an_expert_keeps_the_choices_with_the_highest_weights() -> None:
    experts = torch.tensor([[0], [0], [0], [1], [0]])
    weights = torch.tensor([[0.1], [0.9], [0.5], [0.2], [0.7]])
    assert limit(experts, weights, 2, 0.7).flatten().tolist() == [2, 0, 2, 1, 0]  # ceil(0.7 * 5 / 2) = 2 each


def test_the_balancing_loss_is_least_where_all_are_alike() -> None:
    """Switch Transformer: 1 for equal shares and scores, E for one expert of all tokens."""
    even = torch.full((8,), 16.0)
    assert float(balancing_loss(even, even / 2, torch.tensor(64.0), 2)) == pytest.approx(1.0)
    one_expert = torch.zeros(8)
    one_expert[3] = 64.0
    assert float(balancing_loss(one_expert, one_expert, torch.tensor(64.0), 1)) == pytest.approx(8.0)


def test_padding_does_not_count() -> None:
    """The sums are those of the row without what pads it."""
    args = small(**SPEC)
    router = make_stage(args).train().layers["2"].mlp.router  # type: ignore[union-attr]
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0))
    token_mask = torch.arange(16).unsqueeze(1) < torch.tensor([9, 16])
    _, sums = router(x, token_mask, None)  # type: ignore[operator]
    _, unpadded_sums = router(x[:9, :1], None, None)  # type: ignore[operator]
    for padded_sum, unpadded_sum in zip(sums[:5], unpadded_sums[:5], strict=True):
        torch.testing.assert_close(padded_sum[:1], unpadded_sum)


def test_padding_goes_to_no_expert_and_takes_no_room() -> None:
    moe = moe_of(moe_expert_capacity_factor=1.0).train()
    x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(0))
    is_token = torch.arange(16).unsqueeze(1) < torch.tensor([4, 3])
    x = torch.where(is_token.unsqueeze(-1), x, 1.0)  # padding is all alike
    out, sums = moe.core(x, token_mask=is_token)
    assert out[~is_token].abs().max() == 0.0
    unpadded, dropped = moe.experts(x[is_token], *(routed[is_token] for routed in moe.router(x, None, None)[0]), None)
    torch.testing.assert_close(out[is_token], unpadded)
    assert sums.dropped == dropped > 0.0 and sums.chosen.sum() == 14.0


def test_a_step_that_is_left_out_moves_no_bias() -> None:
    args = small(**SPEC, moe_router_bias_update_rate=0.1)
    stage, groups = make_stage(args).train(), ParallelGroups.single()
    router, chosen = stage.layers["2"].mlp.router, []  # type: ignore[union-attr]
    bias = router.expert_bias  # type: ignore[union-attr]
    router.register_forward_hook(lambda module, inputs, out: chosen.append(out[0].experts))  # type: ignore[operator,union-attr]
    for left_out in (True, False):
        bias_before = bias.clone()  # type: ignore[operator]
        stage.balance.begin(1.0, 1)
        stage(None, random_batch(args))
        stage.balance.end(groups, torch.tensor(left_out))
        tokens = chosen[-1].flatten().bincount(minlength=8).float()
        moved = 0.0 if left_out else 0.1 * (tokens.mean() - tokens).sign()  # busy ones are chosen less often
        torch.testing.assert_close(bias, bias_before + moved)
        assert torch.equal(bias, bias_before) is left_out  # type: ignore[arg-type]
    assert bias.dtype == torch.float32


def test_jitter_moves_only_the_routers_input() -> None:
    args = small(**SPEC, moe_jitter_eps=0.3)
    stage, batch = make_stage(args), random_batch(args)
    eval_logits = stage(None, batch)
    assert stage.train().drops
    logits, repeated_logits = (stage(None, batch) for _ in range(2))
    assert torch.equal(logits, repeated_logits) and not torch.allclose(logits, eval_logits)


# -- DeepSeek's routers


def deepseek_router(kind: str, **fields: Any) -> tuple[Any, Router]:
    """A router of transformers, and ours with its weights and biases."""
    config = getattr(transformers, f"Deepseek{kind}Config")(
        hidden_size=32, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, **fields
    )
    module = import_module(f"transformers.models.deepseek_{kind.lower()}.modeling_deepseek_{kind.lower()}")
    reference = getattr(module, f"Deepseek{kind}TopkRouter")(config)
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.05}
    values = sigmoid if kind == "V3" else {"moe_router_group_score": "best"}
    router = router_of(**{
        **SPEC, **values, "moe_top_k": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "norm_topk_prob": fields.get("norm_topk_prob", False),
        "moe_router_topk_scaling_factor": fields.get("routed_scaling_factor", 1.0),
    })  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        reference.weight.copy_(torch.randn(8, 32, generator=generator))
        router.layer.weight.copy_(reference.weight)
        if router.expert_bias is not None:
            reference.e_score_correction_bias.copy_(torch.randn(8, generator=generator) / 4)
            router.expert_bias.copy_(reference.e_score_correction_bias)
    return reference, router


@pytest.mark.parametrize(("kind", "fields"), [
    ("V3", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    ("V3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    ("V2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
])  # fmt: skip
@torch.no_grad()
def test_routers_of_deepseek_are_those_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    reference, router = deepseek_router(kind, **fields)
    x = torch.randn(50, 1, 32, generator=torch.Generator().manual_seed(1)) / 4
    _, weights, experts = reference(x)
    routing, _ = router.eval()(x, None, None)
    order, expected_order = routing.experts[:, 0].argsort(-1), experts.argsort(-1)
    assert torch.equal(routing.experts[:, 0].gather(-1, order), experts.gather(-1, expected_order))
    actual, expected = routing.weights[:, 0].gather(-1, order), weights.gather(-1, expected_order)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    ungrouped = router.layer(x).topk(3, -1).indices[:, 0]
    assert not torch.equal(ungrouped.sort(-1).values, experts.sort(-1).values), "groups must matter"


def test_ten_steps_of_the_bias_and_the_loss_of_each_sequence() -> None:
    """By the formulas of DeepSeek V3's paper (arXiv 2412.19437): eq. 16 with section 2.1.2, and eq. 17 to 20.

    The loss counts the experts that tokens go to; without groups these are the best by score if biases are 0.
    """
    args = small(**{
        **SPEC, "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.05, "norm_topk_prob": True,
        "moe_aux_loss_coeff": 1.0, "moe_aux_loss_scope": "sequence",
    })  # fmt: skip
    stage = make_stage(args).train()
    router, groups, inputs = stage.layers["2"].mlp.router, ParallelGroups.single(), []  # type: ignore[union-attr]
    bias = router.expert_bias  # type: ignore[union-attr]
    bias.zero_()  # type: ignore[operator]
    router.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].detach()))  # type: ignore[operator,union-attr]
    expected_bias, moved = torch.zeros(8), 0
    for step in range(10):
        stage.balance.begin(1.0, 1)  # type: ignore[union-attr]
        stage(None, random_batch(args, seed=step))
        counts = stage.balance.end(groups, torch.tensor(False))  # type: ignore[union-attr]
        scores = torch.sigmoid(inputs[-1] @ router.layer.weight.detach().T)  # type: ignore[operator,union-attr]
        chosen = torch.zeros_like(scores).scatter_(-1, (scores + expected_bias).topk(2, -1).indices, 1.0)
        load = chosen.sum((0, 1))
        if step == 0:
            seq = len(scores)
            fractions = 8 / (2 * seq) * chosen.sum(0)
            mean_scores = (scores / scores.sum(-1, keepdim=True)).sum(0) / seq
            expected_loss = (fractions * mean_scores).sum(-1).mean()
            torch.testing.assert_close(counts.metrics["moe_aux_loss"], expected_loss)
        expected_bias += 0.05 * (load.mean() - load).sign()
        torch.testing.assert_close(bias.detach(), expected_bias)  # type: ignore[operator,union-attr]
        moved += int((load != load.mean()).sum())
    assert moved > 30
