"""Attention by stand-ins of flash-attn and Transformer-Engine; packages that are not there or broken."""

import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError
from tests.model.runs import assert_steps, sgd_steps
from tests.model.stages import chosen, document_batch, make_stage, random_batch, random_weights, small
from tests.model.test_trees import flex_runs_on_a_cpu
from tests.pool import run_ranks
from tests.stand_ins import flash_attn, installed, modules

PACKAGES = ("flash_attn", "transformer_engine")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "query_pre_attn_scalar": 11},
    "windows": {"sliding_window_width": 3, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("package", PACKAGES)
def test_logits_and_gradients_equal_the_plain_mathematics(package: str, kind: str) -> None:
    keys = KINDS[kind]
    weights = random_weights(small(**keys))
    with installed(*PACKAGES):
        backends = chosen(small(**keys, attention_backend=package)).backend_by_kind
    ran = {kind: backends[kind].name for kind in ("plain", "over documents", "in windows") if kind in backends}
    assert set(ran.values()) == {package} and len(ran) == 2 + (kind == "windows"), ran
    for batch in (random_batch(small()), document_batch(small())):
        results = []
        for backend in ("math", package):
            with installed(*PACKAGES):
                stage = make_stage(small(**keys, attention_backend=backend), weights)
                logits = stage(None, batch)
                logits.float().logsumexp(-1).square().mean().backward()
            results.append([logits.detach(), *(param.grad for param in stage.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_flash_attn_in_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler meets no import. In flash-attn it would find an operator, here torch's attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **_: Any) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=True, scale=softmax_scale).transpose(1, 2)

    with installed("flash_attn"):
        monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", attend)
        args, batch = small(attention_backend="flash_attn"), random_batch(small())
        stage = make_stage(args)
        eager = stage(None, batch)
        for spec in stage.blocks:
            stage.layers[str(spec.index)].compile(fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(stage(None, batch), eager)


def steps_anywhere(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Any]:
    """For the pool: `sgd_steps` where packages are installed, and FlexAttention runs on a CPU."""
    with installed(*PACKAGES), flex_runs_on_a_cpu():
        return sgd_steps(rank, world_size, configs)


def test_tensor_parallel_steps_equal_those_of_one_process() -> None:
    grouped = KINDS["grouped"]
    (reference,) = run_ranks(sgd_steps, 1, [{**grouped, "attention_backend": "math"}])[0]
    configs = [{**grouped, "attention_backend": name, "model_parallel_size": 2} for name in (*PACKAGES, "flex")]
    assert_steps([(values, reference) for values in configs], 2, steps_anywhere)


@torch.no_grad()
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_flash_attn_is_asked_for(deterministic: bool) -> None:
    calls: list[dict[str, Any]] = []
    args = small(attention_backend="flash_attn", attention_dropout=0.25, query_pre_attn_scalar=11)
    with modules(flash_attn.modules(calls=calls)):
        stage = make_stage(args)
        calls.clear()
        torch.use_deterministic_algorithms(deterministic)
        try:
            logits, repeated_logits = (stage.train()(None, document_batch(args)) for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        dropping = list(calls)
        stage.eval()(None, document_batch(args))
    assert torch.equal(logits, repeated_logits), "the seed alone makes the mask"
    assert {call["dropout_p"] for call in dropping} == {0.25} != {call["dropout_p"] for call in calls[len(dropping) :]}
    assert {call["softmax_scale"] for call in calls} == {11**-0.5}
    assert {call["deterministic"] for call in dropping} == {deterministic}
    assert all(call["causal"] and call["window_size"] == (-1, 0) for call in calls)


def refused(backend: str, facts: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=facts):
        build_stage(small(attention_backend=backend, **keys), ParallelGroups.single())


@pytest.mark.parametrize(
    "package, pip", [("flash_attn", "flash-attn=="), ("transformer_engine", r"transformer-engine\[")]
)
def test_a_package_that_is_not_installed(package: str, pip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.neox_arguments.optional_packages.find_spec", lambda name: None)
    refused(package, f"attention_backend: {package} .*not installed.*{pip}")


def test_an_installed_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """As Transformer-Engine 2.20.2 without CUDA."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('cudnn not found')")
    monkeypatch.syspath_prepend(tmp_path)
    refused("transformer_engine", "RuntimeError: cudnn not found.*pip install")


def test_what_a_package_cannot_do_is_said_at_start() -> None:
    with modules({"flash_attn": {}}):
        refused("flash_attn", "flash-attn-4")
    with modules(flash_attn.modules(any_dtype=False)):
        refused("flash_attn", "fp16 and bf16")
        refused("flash_attn", "masks .*biases", precision="bfloat16", pos_emb="alibi")
    with installed("transformer_engine"):
        refused("transformer_engine", "compiled", compile="block")


@torch.no_grad()
def test_generation_with_a_package_installed_runs_on_another_backend() -> None:
    args = small(attention_backend="flash_attn")
    with installed("flash_attn"):
        assert re.fullmatch("flash_attn, .*from a cache flash", chosen(args).name)


def test_auto_imports_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.attention.packages.import_compiled", pytest.fail)
    assert chosen(small()).name.startswith("flash")
