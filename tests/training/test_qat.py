"""Quantisation-aware training: rounding by tables of formats, straight-through gradients, layouts, export."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import find_checkpoint, load_checkpoint_args
from megatron.checkpointing.huggingface import export_hf
from megatron.model import build_stage
from megatron.model.init import stage_parameters
from megatron.model.moe.experts import Experts
from megatron.mpu import Linear, ParallelGroups, linear
from megatron.mpu.fake_quantized import FakeQuantizedGroupedProduct, FakeQuantizedProduct, Format, fake_quantize
from megatron.mpu.grouped import grouped_linear
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.qat import use_qat
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.methods.preferences.test_reference import first_losses
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import ADAMW, LLAMA, TABLE, begin, cells, config, curves, run_to_end

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "padded_vocab_size": 384}
EXPERTS: dict[str, Any] = {
    "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32,
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def table_values(weight: Tensor, name: str) -> Tensor:
    """A matrix `[out, in]` in a format and back, in fp64: each number by its distance to all of E2M1."""
    matrix = weight.double().numpy()
    blocks = matrix.reshape(len(matrix), -1, {"mxfp4": 32, "nvfp4": 16}[name])
    largest = np.abs(blocks).max(2, keepdims=True)
    if name == "mxfp4":
        scales = 2.0 ** (np.floor(np.log2(largest)) - 2)
    else:
        global_scale = 6 * 448 / largest.max()
        scales = (
            torch.from_numpy(largest / 6 * global_scale).float().to(torch.float8_e4m3fn).double().numpy() / global_scale
        )
    distances = np.abs(np.minimum(np.abs(blocks / scales), 6)[..., None] - E2M1)
    # Of two as near the one with the even code.
    codes = np.where(np.arange(8) % 2, distances + 1e-9, distances).argmin(-1)
    return torch.from_numpy((np.sign(blocks) * E2M1[codes] * scales).reshape(matrix.shape))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_rounding_is_the_table_of_the_format(name: Format) -> None:
    weight = numbers(48, 96) * torch.logspace(-2, 1, 48)[:, None]
    torch.testing.assert_close(fake_quantize(weight, name).double(), table_values(weight, name), rtol=1e-5, atol=0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, 4.0, 0.0, 2.0, 3.0, 1.0])
    halves = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -1.0, -4.0, 4.0, 0.0, 2.0, 3.0, 1.0]
    assert fake_quantize(ties.repeat(2, 2), name).equal(torch.tensor(halves).repeat(2, 2))
    rounded = fake_quantize(weight, name)
    assert fake_quantize(rounded, name).allclose(rounded), "what was rounded stays"
    assert (
        not fake_quantize(torch.zeros(2, 32), name).any()
        and fake_quantize(weight.bfloat16(), name).dtype == torch.bfloat16
    )
    stacked = torch.stack([weight, 100 * weight])
    assert fake_quantize(stacked, name)[0].equal(fake_quantize(weight, name)), "each expert has its own scale"


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_gradients_are_straight_through_ones(name: Format) -> None:
    """Gradients equal those of torch's autograd with the rounding as a constant added to the weight."""
    ends, grad = torch.tensor([3, 3, 10], dtype=torch.int32), numbers(10, 64, seed=2)
    for stacked in (False, True):
        shape = (3, 64, 32) if stacked else (64, 32)
        results = []
        for is_product in (True, False):
            x, weight = numbers(10, 32).requires_grad_(), numbers(*shape, seed=1).requires_grad_()
            constant = (fake_quantize(weight.detach(), name) - weight.detach()).detach()
            if not stacked:
                out = linear(x, weight, None, FakeQuantizedProduct(name)) if is_product else x @ (weight + constant).t()
            elif is_product:
                product = FakeQuantizedGroupedProduct(name)
                out = grouped_linear(x, weight, ends, lambda w: w.transpose(1, 2), product, None)
            else:
                matrices = (weight + constant).transpose(1, 2)
                out = torch.cat([x[:3] @ matrices[0], x[3:] @ matrices[2]])
            out.backward(grad)
            results.append((out, x.grad, weight.grad))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def values(name: str | None, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return config(LLAMA, ADAMW, SIZES, {"train_micro_batch_size_per_gpu": 4, "qat": name}, *parts, **overrides)


def test_linears_and_experts_of_blocks_are_rounded() -> None:
    args = NeoXArgs.from_dict(values("mxfp4", EXPERTS)).for_world(1)
    stage, lines = build_stage(args, ParallelGroups.single()), list[str]()
    use_qat(stage, args, lines.append)
    products = {n: type(m.product).__name__ for n, m in stage.named_modules() if isinstance(m, (Linear, Experts))}
    rounded = {name for name, product in products.items() if product.startswith("FakeQuantized")}
    assert all(name.startswith("layers.8") for name in products.keys() - rounded), "the head is no block"
    assert any(name.endswith("experts.mlp") for name in rounded) and f"{len(rounded)} linears" in lines[0]


@pytest.mark.parametrize(("keys", "facts"), [
    ({"lora": {"r": 4}}, "lora"), ({"precision_fp8": "tensorwise", "precision": "bfloat16"}, "precision_fp8"),
    ({"engine": "deepspeed"}, "engine: native"), ({"model_parallel_size": 2}, "nvfp4.*model_parallel_size.*mxfp4"),
])  # fmt: skip
def test_keys_that_do_not_go_with_it_are_named(keys: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=f"program: qat: .*{facts}"):
        NeoXArgs.from_dict(values("nvfp4", keys)).check_training()


def test_blocks_that_ranks_would_split_are_refused() -> None:
    args = NeoXArgs.from_dict(values("mxfp4", hidden_size=48, num_attention_heads=4)).for_world(1)
    with pytest.raises(ConfigError, match=r"qat: mxfp4 .*multiples of 32.*query_key_value 48"):
        use_qat(build_stage(args, ParallelGroups.single()), args, [].append)


@cache
def losses(name: str | None, layout: str, experts: bool = True) -> list[float]:
    ranks, keys = LAYOUTS[layout]
    return run_ranks(curves, ranks, [values(name, EXPERTS if experts else {}, keys)], 4)[0][0].losses


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), **{name: TABLE[name] for name in ("tp2 sp", "zero3", "pp2")},
    "ep2": (2, {"expert_parallel_size": 2, "train_micro_batch_size_per_gpu": 2}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), cells(
    [("mxfp4", "tp2 sp"), ("nvfp4", "ep2")],
    [("nvfp4", "zero3"), ("mxfp4", "pp2")],
    [("mxfp4", "ep2"), ("nvfp4", "pp2")],
))  # fmt: skip
def test_layouts_train_alike(name: str, layout: str) -> None:
    one_process, unrounded = losses(name, "one"), losses(None, "one")
    # A number between two of the format may round differently after an update that differs by its last bit.
    assert losses(name, layout) == pytest.approx(one_process, rel=2e-3)
    assert losses(name, layout)[0] == pytest.approx(one_process[0], rel=1e-5)
    assert one_process != pytest.approx(unrounded, rel=1e-4) and one_process[-1] < one_process[0] - 0.1


def logprobs_of_rounded(rank: int, world_size: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """For the pool, after two steps: log-probabilities of training, of weights rounded by the table, and not.

    Fused projections are rounded as one matrix.
    """
    training = begin(values(name))
    batches = batches_of(training)
    for _ in range(2):
        training.engine.train_step(next(batches), 1e-3)
    weights, batch = training.engine.weights(), next(batches)
    results = [training.engine.token_logprobs(batch)]
    linears = ("query_key_value.weight", "dense.weight", "linear1.weight", "linear2.weight")
    for is_rounded in (True, False):
        unrounded = begin(values(None)).engine
        for layer, key, param in stage_parameters(unrounded.stage):
            weight = weights[layer][key]
            in_format = is_rounded and key.endswith(linears)
            param.data.copy_(table_values(weight.float(), name) if in_format else weight)
        results.append(unrounded.token_logprobs(batch))
    return tuple(torch.cat([values.flatten() for values in parts]) for parts in results)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_saved_weights_quantised_by_the_format_are_those_of_training(name: str) -> None:
    trained, quantised, unrounded = run_ranks(logprobs_of_rounded, 1, name)[0]
    torch.testing.assert_close(trained, quantised, rtol=1e-5, atol=1e-5)
    assert (trained - unrounded).abs().max() > 1e-3


def logprobs_of_training(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """For the pool: trains two steps, saves; tokens, labels and log-probabilities of the last batch."""
    training = begin(values)
    batches = batches_of(training)
    for _ in range(2):
        batch = next(batches)
        training.engine.train_step(batch, 1e-3)
    run_to_end(rank, world_size, values)
    (logprobs,) = training.engine.token_logprobs(batch[:1])
    return batch[0].tokens, batch[0].labels, logprobs


def test_an_exported_model_in_the_format_has_the_logits_of_training(tmp_path: Path) -> None:
    """transformers' model, each of its linears by the table."""
    model = {"make_vocab_size_divisible_by": 1, "padded_vocab_size": 384, "no_weight_tying": True, "train_iters": 2}
    run = values("mxfp4", model, train_batch_size=4, save=str(tmp_path / "run"), checkpoint_factor=2)
    tokens, labels, expected = run_ranks(logprobs_of_training, 1, run)[0]
    checkpoint = find_checkpoint(tmp_path / "run", None)
    export_hf(checkpoint, load_checkpoint_args(checkpoint)[0], tmp_path / "hf")
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    linears = [module for name, module in hf.named_modules() if name.endswith("proj")]
    assert len(linears) == 4 * 7

    def logprobs() -> Tensor:
        logits = hf(tokens).logits.log_softmax(-1)
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    places = expected != 0
    with torch.no_grad():
        unrounded = logprobs()
        for module in linears:
            module.weight.copy_(table_values(module.weight, "mxfp4"))
        torch.testing.assert_close(logprobs()[places], expected[places], rtol=1e-4, atol=1e-4)
    assert (unrounded - expected)[places].abs().max() > 1e-3


def test_reference_models_are_rounded(tmp_path: Path) -> None:
    """DPO begins at ln 2 by a copy and by cached scores, which are not those of weights without rounding."""
    cached = {"dpo_reference": "cache", "reference_cache_dir": str(tmp_path / "scores")}
    common = {"pack_impl": "best_fit", "num_layers": 3}
    runs = [
        pairwise(pairs(tmp_path), common, SIZES, reference, qat=name, train_micro_batch_size_per_gpu=2)
        for name, reference in ((None, cached), ("mxfp4", cached), ("mxfp4", {"dpo_reference": "on_the_fly"}))
    ]
    assert run_ranks(first_losses, 1, runs)[0] == pytest.approx([math.log(2)] * 3, abs=1e-5)
    assert len(list((tmp_path / "scores").iterdir())) == 2
