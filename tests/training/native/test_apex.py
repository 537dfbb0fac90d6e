"""NVIDIA's apex, replaced by a stand-in with its signatures, beside torch's Adam and norms."""

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.apex import apex_problem, use_apex_norms, uses_apex
from megatron.training.native.apex_adam import ApexAdam
from tests.pool import run_ranks
from tests.stand_ins import apex, installed, modules
from tests.training.checkpoint.test_resume import losses
from tests.training.native.in_turn import to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, assert_alike, config, curves, curves_of, full_curve

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-2}


def _groups() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2), (0,))]
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _step(optimizer: Any, gradients: list[torch.Tensor], scale: float, skip: bool, lr: float) -> None:
    for param, gradient in zip(_params(optimizer), gradients, strict=True):
        param.grad = torch.full_like(gradient, torch.inf) if skip else gradient.clone()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(skip))
    optimizer.step()


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    keys, params = ("step", "exp_avg", "exp_avg_sq"), _params(optimizer)
    return [*params, *(optimizer.state[param][key].float() for param in params for key in keys)]


@pytest.mark.parametrize("skipped", [(), (0, 1), (2,)])
def test_apex_adam_clips_skips_and_counts_as_torch(skipped: tuple[int, ...]) -> None:
    """Learning rate and scale change as in a run; a skipped step changes nothing, the first one too."""
    generator = torch.Generator().manual_seed(1)
    with installed("apex"):
        apex_adam, torch_adam = ApexAdam(_groups(), **OPTIONS), torch.optim.AdamW(_groups(), **OPTIONS, fused=True)
        for i in range(5):
            gradients = [torch.randn(param.shape, generator=generator) for param in _params(torch_adam)]
            for optimizer in (apex_adam, torch_adam):
                _step(optimizer, gradients, 1.0 + 0.5 * i, i in skipped, 0.1 / (1 + i))
            torch.testing.assert_close(_state(apex_adam), _state(torch_adam), rtol=2e-5, atol=1e-6)
        assert {float(state["step"]) for state in apex_adam.state.values()} == {5.0 - len(skipped)}


def test_parameters_at_different_steps_are_refused() -> None:
    with installed("apex"):
        groups = _groups()
        optimizer = ApexAdam(groups, **OPTIONS)
        for i, param in enumerate(groups[0]["params"]):
            moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            optimizer.state[param] = {"step": torch.tensor(3.0 + i), **moments}
        with pytest.raises(ConfigError, match="steps.*all parameters.*apex: false"):
            _step(optimizer, [torch.ones_like(param) for param in _params(optimizer)], 1.0, False, 0.1)


def _curves(rank: int, world_size: int, configs: list[dict[str, Any]]) -> Any:
    unused = AssertionError("apex was asked for")
    with installed("apex"), patch("torch.optim.AdamW", side_effect=unused), patch.object(F, "rms_norm", unused):
        return curves(rank, world_size, configs, steps=3)


def test_runs_with_apex_equal_those_with_torch() -> None:
    overlapped = {"overlap_optimizer_with_forward": True}  # a FusedAdam for each layer
    cells = [(NEOX, {"zero_optimization": {"stage": 1}}), (LLAMA, {"model_parallel_size": 2, **overlapped})]
    torch_values = [config(ADAMW, model, engine="native", train_micro_batch_size_per_gpu=4) for model, _ in cells]
    apex_values = [{**values, **layout, "apex": True} for values, (_, layout) in zip(torch_values, cells, strict=True)]
    rank_parts = run_ranks(_curves, 2, apex_values)
    apex_curves = {i: full_curve([parts[i] for parts in rank_parts], values) for i, values in enumerate(apex_values)}
    assert_alike(apex_curves, curves_of(dict(enumerate(torch_values)), 3), norms=1e-4)


def _in_turn(rank: int, world_size: int, configs: list[dict[str, Any]]) -> None:
    with installed("apex"):
        to_their_ends(rank, world_size, configs)


def test_checkpoints_go_on_with_the_other_adam(tmp_path: Path) -> None:
    """A step each by torch and apex, two by torch: the losses are those of torch alone."""
    common = config(ADAMW, LLAMA, engine="native", train_micro_batch_size_per_gpu=4, train_iters=4, checkpoint_factor=9)
    turns = {**common, "save": str(tmp_path / "turns"), "load": str(tmp_path / "turns")}
    parts = [
        {**turns, "apex": apex_value, "exit_interval": last} for apex_value, last in ((False, 1), (True, 2), (False, 4))
    ]
    run_ranks(_in_turn, 2, [{**common, "save": str(tmp_path / "torch"), "apex": False}, *parts])
    expected, actual = losses(tmp_path / "torch"), losses(tmp_path / "turns")
    assert len(actual) == 4 and actual == pytest.approx(expected, rel=1e-5)


def _asks(apex_value: Any, **keys: Any) -> NeoXArgs:
    return NeoXArgs.from_dict(config(LLAMA, keys, apex=apex_value, padded_vocab_size=384))


def test_without_apex() -> None:
    assert not uses_apex(_asks("auto"), CPU)
    with pytest.raises(ConfigError, match="apex: true .*not installed"):
        uses_apex(_asks(True), CPU)


def test_the_other_package_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """apex 0.9.10dev of PyPI, a toolkit for web applications: `apex/lib`, `apex/ext`."""
    for folder in ("apex", "apex/lib", "apex/ext"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="apex.*another project.*pip uninstall apex"):
        uses_apex(_asks(True), CPU)
    del sys.modules["apex"]


def test_an_apex_without_its_extensions() -> None:
    """As it is after a plain `pip install .`: imports go well, constructors raise."""

    class Bare(apex.FusedAdam):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")

    with modules({**apex.modules(), "apex.optimizers": {"FusedAdam": Bare}}):
        problem = apex_problem(CPU)
        assert problem is not None and "requires cuda extensions" in problem
        assert not uses_apex(_asks("auto"), CPU)


@pytest.mark.parametrize(("keys", "chosen"), [
    ({}, {"FusedLayerNorm", "FusedRMSNorm", "FusedAdam"}),
    ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, {"FusedLayerNorm", "FusedRMSNorm"}),
    ({"compile": "block"}, {"FusedAdam"}),
])  # fmt: skip
def test_the_choice_of_auto_is_reported(keys: dict[str, Any], chosen: set[str]) -> None:
    args, lines = _asks("auto", **keys), list[str]()
    stage = build_stage(args, ParallelGroups.single())
    stage.compiled = args.compile == "block"
    with installed("apex"):
        use_apex_norms(stage, args, "native", lines.append)
    use_apex_norms(stage, args, "native", lines.append)
    assert [set(re.findall(r"Fused\w+", line)) for line in lines] == [chosen, set()]
    assert lines[0].startswith("apex: ") and "not installed" in lines[1]
