"""Mamba by stand-ins of mamba_ssm, causal-conv1d and flash-linear-attention; what is chosen and said."""

import re
from typing import Any

import pytest
import torch

from megatron.model import block_specs, build_stage
from megatron.model.mamba import choose_scans
from megatron.mpu import ParallelGroups, gpu_kernels
from megatron.mpu.gpu_kernels import EVERY_GPU
from megatron.neox_arguments import ConfigError
from tests.model.stages import document_batch, make_stage, random_batch, random_weights, small
from tests.model.test_mamba import MODELS
from tests.stand_ins import installed

ALL = ("mamba_ssm", "causal_conv1d", "fla")
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("package", "model"),
    [("mamba_ssm", "mamba"), ("mamba_ssm", "mamba2"), ("mamba_ssm", "hybrid"), ("fla", "mamba2"), ("fla", "delta"),
     ("fla", "kimi"), ("fla", "delta and mamba 2")],
)  # fmt: skip
def test_logits_and_gradients_are_those_of_torch(package: str, model: str) -> None:
    models = {**MODELS, "delta and mamba 2": {
        **MODELS["delta"], **MODELS["mamba2"], "pos_emb": "rotary",
        "attention_config": ["gated_delta_net", "mamba2", "global", "short_conv"], "num_layers": 4,
    }}  # fmt: skip
    keys = {**models[model], **({"mamba_time_step_limit": [0.3, 0.9]} if model == "mamba2" else {})}
    weights = random_weights(small(**keys))
    for batch in (random_batch(small(**keys)), document_batch(small(**keys))):
        results = []
        for backend in ("torch", package):
            with installed(*ALL):
                stage = make_stage(small(**keys, mamba_backend=backend), weights)
                assert stage.scans.package == backend
                logits = stage(None, batch)
                logits.float().logsumexp(-1).square().mean().backward()
            results.append([logits.detach(), *(param.grad for param in stage.parameters())])
        torch.testing.assert_close(*results, rtol=1e-4, atol=5e-5 if "linear_key_head_dim" in keys else 1e-5)


RAN = {f"mamba_backend: {name}": EVERY_GPU for name in ("mamba_ssm", "fla")}


def scans_on(keys: dict[str, Any], device: str, packages: tuple[str, ...]) -> tuple[str, str]:
    """The package that is chosen, and the line that says so."""
    lines: list[str] = []
    args = small(**{**MODELS["mamba2"], **keys})
    with installed(*packages), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        scans = choose_scans(args, torch.device(device), [b.mixer for b in block_specs(args)], lines.append)
    (line,) = lines
    return scans.package, line


def test_auto_takes_no_package_that_has_run_on_no_gpu() -> None:
    package, line = scans_on({"mamba_state_fp32": False}, "cuda", ALL)
    assert package == "torch" and all(f"set mamba_backend: {name} " in line for name in ("mamba_ssm", "fla"))
    assert scans_on({"mamba_backend": "mamba_ssm"}, "cuda", ALL)[0] == "mamba_ssm"


@pytest.mark.parametrize(("packages", "keys", "device", "package", "facts"), [
    ((), {}, "cpu", "torch", "auto .*GPU"),
    (ALL, {}, "cpu", "torch", "auto .*GPU"),
    ((), {}, "cuda", "torch", "auto .*mamba_ssm: .*not installed; fla: .*mamba_state_fp32: false"),
    (("mamba_ssm",), {}, "cuda", "mamba_ssm", "auto .*torch's convolution; generation .*torch"),
    (ALL, {"mamba_backend": "mamba_ssm"}, "cpu", "mamba_ssm", "causal-conv1d; generation .*torch"),
    (ALL, {"mamba_conv_kernel": 8}, "cuda", "mamba_ssm", "auto .*torch's convolution"),
    (ALL, {"mamba_state_dim": 512}, "cuda", "torch", "auto .*mamba_state_dim .*256.*; fla: .*mamba_state_fp32"),
    (("fla",), {"mamba_state_fp32": False}, "cuda", "fla", "auto .*torch's convolution; generation .*torch"),
])  # fmt: skip
def test_what_is_chosen_is_said(
    packages: tuple[str, ...], keys: dict[str, Any], device: str, package: str, facts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Once the packages have run on GPUs."""
    monkeypatch.setattr(gpu_kernels, "RUN_ON", RAN)
    chosen, line = scans_on(keys, device, packages)
    assert chosen == package and re.match(f"mamba_backend: .*{package}.*", line) and re.search(facts, line)


@pytest.mark.parametrize(("keys", "line"), [
    ({"mamba_backend": "mamba_ssm", "mamba_state_dim": 300}, "mamba_ssm .*mamba_state_dim .*256"),
    ({"mamba_backend": "mamba_ssm"}, "mamba_backend: mamba_ssm .*mamba-ssm.* not .*torch"),
    ({"mamba_backend": "fla"}, "mamba_backend: fla .*Mamba 1.*auto"),
    ({**MODELS["delta"], "mamba_backend": "fla"}, "mamba_backend: fla .*flash-linear-attention.* not .*torch"),
    ({**MODELS["kimi"], "mamba_backend": "mamba_ssm"}, "mamba_backend: mamba_ssm .*kimi_delta_attention .*fla"),
    ({**MODELS["delta"], "mamba_backend": "fla", "context_parallel_size": 2},
     "mamba_backend: fla .*gated_delta_net .*context_parallel_size.*torch"),
])  # fmt: skip
def test_a_package_that_is_not_there_is_refused(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        args = small(**(keys if "attention_config" in keys else {**MODELS["mamba"], **keys}))
        make_stage(args)


def test_only_its_name_chooses_fla_for_delta_rules() -> None:
    """Whatever is installed; wider keys than the kernels' are refused, and generation uses torch."""
    lines: list[str] = []
    with installed(*ALL):
        for backend, kernels in (("auto", 0), ("torch", 0), ("fla", 1)):
            stage = build_stage(small(**MODELS["kimi"], mamba_backend=backend), ParallelGroups.single(), lines.append)
            assert (stage.scans.kimi_delta is not None) + (stage.scans.gated_delta is not None) == kernels
        assert [line for line in lines if "mamba_backend" in line] == [lines[-1]] and "generation" in lines[-1]
        wide = {**MODELS["delta"], "linear_key_head_dim": 257, "mamba_backend": "fla"}
        with pytest.raises(ConfigError, match=r"mamba_backend: fla .*linear_key_head_dim .*256.*257"):
            make_stage(small(**wide))


def test_a_package_runs_between_compiled_graphs() -> None:
    """The compiler cannot look into it; all else of the block is compiled."""
    args, batch = small(**MODELS["mamba2"], mamba_backend="mamba_ssm", compile="block"), random_batch(small())
    weights = random_weights(args)
    with installed(*ALL):
        compiled = make_stage(args, weights)
        eager = make_stage(small(**MODELS["mamba2"], mamba_backend="mamba_ssm"), weights)
        torch._dynamo.reset()
        for spec in compiled.blocks:
            compiled.layers[str(spec.index)].compile(backend="aot_eager")
        torch.testing.assert_close(compiled(None, batch), eager(None, batch))
