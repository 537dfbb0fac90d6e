"""Sums of distillation over a cut vocabulary, beside TRL's loss and autograd of top tokens, in float64."""

import ast
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import Divergence, build_groups, distillation_sums, token_divergence_sum, top_tokens
from tests.mpu.test_head import ALL_AT_ONCE, BATCH, SEQ, THREE_CHUNKS, VOCAB, Case, capped, case, head_of, sizes
from tests.pool import run_ranks

K = 5
LOSSES = [(0.0, 1.0), (0.0, 2.0), (1.0, 1.0), (1.0, 0.7), (0.5, 1.0), (0.1, 1.5)]  # beta, temperature


def models() -> tuple[Case, Case]:
    model, teacher = case(), case()
    random = torch.Generator().manual_seed(5)
    moved = (teacher.hidden + 0.3 * torch.randn(teacher.hidden.shape, generator=random), teacher.weight * 0.9)
    return model, teacher._replace(hidden=moved[0], weight=moved[1])


@cache
def trl_s_loss() -> Callable[..., Tensor]:
    """`GKDTrainer.generalized_jsd_loss` from its file: importing TRL takes longer than all tests here."""
    (folder,) = find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
    tree = ast.parse((Path(folder) / "experimental/gkd/gkd_trainer.py").read_text())
    (function,) = (node for node in ast.walk(tree) if getattr(node, "name", "") == "generalized_jsd_loss")
    function.decorator_list = []  # type: ignore[attr-defined]
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(ast.Module([function], []), "gkd_trainer.py", "exec"), names)
    return names["generalized_jsd_loss"]


def generalized_jsd(logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float) -> Tensor:
    """TRL's, of every token `[...]`."""
    return trl_s_loss()(logits, teacher_logits, beta=beta, temperature=temperature, reduction="none").sum(-1)


def with_rest(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Logits whose softmax has the probabilities of `ids` and last that of all other tokens together."""
    logprobs = (logits / temperature).log_softmax(-1)
    is_other = torch.ones_like(logprobs).scatter(-1, ids, 0.0).bool()
    other_logprob = logprobs.masked_fill(~is_other, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), other_logprob], -1)


def expected(run: dict[str, Any]) -> tuple[Tensor, ...]:
    """(loss, divergence, nll, gradient of hidden states, of the weight) by TRL and autograd."""
    model, teacher = models()
    hidden, weight = (x.double().requires_grad_() for x in (model.hidden, model.weight))
    logits = capped((hidden @ weight.t())[..., : run["columns"]], run["softcap"])
    teacher_logits = capped((teacher.hidden.double() @ teacher.weight.double().t())[..., : run["columns"]], 4.0)
    beta, temperature = run["loss"]
    if run["top"]:
        ids = teacher_logits.topk(K).indices
        divergences = generalized_jsd(
            with_rest(logits, ids, temperature), with_rest(teacher_logits, ids, temperature), beta, 1.0
        )
    else:
        divergences = generalized_jsd(logits, teacher_logits, beta, temperature)
    weights = model.weights.double()
    if run["places"] is not None:
        chosen = torch.zeros(SEQ * BATCH, dtype=torch.float64).index_fill(0, run["places"], 1.0)
        weights = weights * chosen.view(SEQ, BATCH)
    labels = model.labels % (run["columns"] or VOCAB)
    nll = (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()).sum()
    divergence = (divergences * weights).sum()
    loss = run["share"] * divergence + (1 - run["share"]) * nll
    loss.backward()
    return loss.detach(), divergence.detach(), nll.detach(), hidden.grad, weight.grad


def sharded_sums(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[tuple[Tensor, ...]]:
    """For the pool: the same by `distillation_sums`, of this rank's rows; or the loss alone."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    results = []
    for run in runs:
        model, teacher = models()
        rows = slice(rank * VOCAB // world_size, (rank + 1) * VOCAB // world_size)
        hidden, weight = model.hidden.clone().requires_grad_(), model.weight[rows].clone().requires_grad_()
        teacher_head, (beta, temperature) = head_of(teacher.hidden, teacher.weight[rows], softcap=4.0), run["loss"]
        columns, places = run["columns"], run["places"]
        head = head_of(hidden, weight, softcap=run["softcap"])
        with sizes(run["chunk"], 0):
            source = (
                top_tokens(teacher_head, K, temperature, group, columns, places) if run["top"] else teacher_head.use
            )
            labels, divergence = model.labels % (columns or VOCAB), Divergence(beta, temperature)
            args = labels, model.weights, divergence, run["share"], group, columns, places
            if run["kl"]:
                values = [token_divergence_sum(head, teacher_head.use, model.weights, group, columns, places)]
            else:
                values = list(distillation_sums(head, source, *args))
                with torch.no_grad():  # where there is nothing to learn, as in validation
                    assert distillation_sums(head, source, *args).loss == values[0]
        values[0].backward()
        results.append((*(value.detach() for value in values), hidden.grad, weight.grad))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_trl_s_loss_mixed_with_cross_entropy(ranks: int) -> None:
    places = torch.tensor([0, 5, 6, 40, 77, 149])
    ways: list[dict[str, Any]] = [
        {"chunk": ALL_AT_ONCE, "columns": None, "places": None, "share": 1.0, "softcap": None},
        {"chunk": THREE_CHUNKS, "columns": VOCAB - 3, "places": places, "share": 0.3, "softcap": 5.0},
        # leaves the second rank no column
        {"chunk": THREE_CHUNKS, "columns": VOCAB // 2 - 2, "places": None, "share": 0.5, "softcap": None},
    ]
    cases = product(LOSSES, (False, True), ways)
    runs = [{**way, "loss": loss, "top": top, "kl": False} for loss, top, way in cases]
    runs += [{**way, "loss": (0.0, 1.0), "top": False, "kl": True, "softcap": None, "share": 1.0} for way in ways]
    rank_results = run_ranks(sharded_sums, ranks, runs)
    for i, run in enumerate(runs):
        *sums, hidden_grad, weight_grad = expected(run)
        rank_values = [results[i] for results in rank_results]
        for values in rank_values:
            for value, right in zip(values[:-2], sums[:1] if run["kl"] else sums, strict=True):
                rtol = 1e-6 if run["kl"] else 1e-5
                torch.testing.assert_close(value.double(), right, rtol=rtol, atol=0, msg=str(run))
        torch.testing.assert_close(
            sum(values[-2] for values in rank_values).double(), hidden_grad, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            torch.cat([values[-1] for values in rank_values]).double(), weight_grad, rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_of_a_model_and_itself_it_is_nothing(beta: float) -> None:
    model, _ = models()
    hidden, head = model.hidden.clone().requires_grad_(), head_of(model.hidden, model.weight)
    for teacher in (head.use, top_tokens(head, K, 1.0, None)):
        args = None, model.weights, Divergence(beta), 1.0, None
        sums = distillation_sums(head_of(hidden, model.weight), teacher, *args)
        (gradient,) = torch.autograd.grad(sums.loss, hidden)
        assert float(sums.loss.detach()) == pytest.approx(0.0, abs=1e-4) and float(gradient.abs().max()) < 1e-5
    loss = token_divergence_sum(head_of(hidden, model.weight), head.use, model.weights, None)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert float(loss.detach()) == 0.0 and not gradient.any()
