"""`te_backend`: whose kernels compute, what is said of it, and runs by Transformer-Engine, which a stand-in
with its signatures replaces, beside runs by torch."""

from typing import Any

import pytest
import torch

from megatron.model import build_stage
from megatron.model.norm_functions import TORCH_NORMS
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.fp8 import use_fp8
from megatron.training.precision_policy import choose_precision
from megatron.training.transformer_engine import choose_te_backend, use_transformer_engine_norms
from tests.pool import run_ranks
from tests.stand_ins import installed
from tests.training.runs import ADAMW, LLAMA, NEOX, config, curves, furthest, whole

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "precision": "bfloat16"}


def _args(**more: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(LLAMA, WIDE, {"padded_vocab_size": 384}, **more)).for_world(1)


def _said(**more: Any) -> tuple[set[str], str]:
    """The classes of the products of a model, and the line about FP8."""
    args, lines, groups = _args(**more), list[str](), ParallelGroups.single()
    stage = build_stage(args, groups)
    use_fp8(stage, choose_precision(args, CPU), args, groups, lines.append)
    return {type(module.product).__name__ for module in stage.modules() if hasattr(module, "product")}, lines[0]


def test_auto_takes_the_package_for_delayed_scaling_where_it_works() -> None:
    with installed("transformer_engine"):
        made, line = _said(precision_fp8="te")
        assert "EngineDelayedProduct" in made and "; te_backend: auto chose transformer_engine; blocks" in line
        made, line = _said(te_fp8_mha=True)
        assert "EngineDelayedProduct" in made
        for other in ({"precision_fp8": "tensorwise"}, {"precision_fp8": "te", "te_backend": "native"}):
            made, line = _said(**other)
            assert not any(name.startswith("Engine") for name in made) and "te_backend" not in line
        made, line = _said(precision_fp8="te", compile="block")
        assert "DelayedProduct" in made and "auto chose native, the other would need compile: false" in line
    made, line = _said(precision_fp8="te")
    assert "DelayedProduct" in made and "auto chose native, the other would need Transformer-Engine, which is" in line


@pytest.mark.parametrize("recipe, product", [("te", "EngineDelayedProduct"), ("mxfp8", "EngineProduct")])
def test_a_named_package_multiplies(recipe: str, product: str) -> None:
    with installed("transformer_engine"):
        made, line = _said(precision_fp8=recipe, te_backend="transformer_engine")
    assert made == {product, "PlainProduct"} and "; multiplied by Transformer-Engine (te_backend); blocks" in line


@pytest.mark.parametrize(
    "keys, there, words",
    [
        ({"precision_fp8": "te"}, False, "Transformer-Engine, which is not installed: pip install"),
        ({"precision_fp8": "rowwise"}, True, "precision_fp8: te, tensorwise, mxfp8 or off, not rowwise"),
        ({"precision_fp8": "te", "compile": "block"}, True, "compile: false, not block"),
    ],
)
def test_refusals(keys: dict[str, Any], there: bool, words: str) -> None:
    args = _args(**keys, te_backend="transformer_engine")
    with installed(*["transformer_engine"][:there]), pytest.raises(ConfigError) as caught:
        choose_te_backend(args, args.precision_fp8, CPU)
    assert f"te_backend: transformer_engine needs {words}" in str(caught.value)
    assert str(caught.value).endswith("; or write te_backend: native")


def test_norms_are_the_packages_where_it_is_named() -> None:
    for backend in ("native", "transformer_engine"):
        stage, lines = build_stage(_args(te_backend=backend), ParallelGroups.single()), list[str]()
        with installed("transformer_engine"):
            use_transformer_engine_norms(stage, _args(te_backend=backend), None, lines.append)
        norms = {module.functions for module in stage.modules() if hasattr(module, "functions")}
        assert (norms == {TORCH_NORMS}) is (backend == "native") is (not lines)


def test_norms_of_a_package_that_is_not_there_are_refused() -> None:
    args = _args(te_backend="transformer_engine")
    with pytest.raises(ConfigError, match="te_backend: transformer_engine needs Transformer-Engine, which is not inst"):
        use_transformer_engine_norms(build_stage(args, ParallelGroups.single()), args, None)
    args = _args(te_backend="transformer_engine", apex=True)
    with pytest.raises(ConfigError, match="apex: te_backend .* has the norms; remove one of both"):
        use_transformer_engine_norms(build_stage(args, ParallelGroups.single()), args, None)


def _curves(rank: int, world_size: int, configs: list[dict[str, Any]]) -> Any:
    with installed("transformer_engine"):
        return curves(rank, world_size, configs, steps=3)


@pytest.mark.parametrize("model", [NEOX, LLAMA], ids=["layernorm", "rmsnorm"])
def test_tensor_parallel_runs_equal_those_by_torch(model: dict[str, Any]) -> None:
    """In fp32 the norms; in bf16 FP8 with a scale a matrix, whose bits are nearly the same."""
    exact = config(ADAMW, model, engine="native", train_micro_batch_size_per_gpu=4, model_parallel_size=2)
    rounded = {**exact, **WIDE, "precision_fp8": "tensorwise", "first_last_layers_bf16": False}
    pairs = [(values, {**values, "te_backend": "transformer_engine"}) for values in (exact, rounded)]
    ranks = run_ranks(_curves, 2, [values for pair in pairs for values in pair])
    for i, bound in ((0, 1e-5), (2, 5e-3)):
        torchs, theirs = (whole([parts[j] for parts in ranks], pairs[i // 2][0]) for j in (i, i + 1))
        loss, norm, weights = furthest(theirs, torchs)
        assert loss < bound and norm < 20 * bound and weights > 0.0
