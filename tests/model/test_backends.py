"""Attention backends: names, and layers that ask for one. A new one: tests/guide/test_recipes.py."""

import inspect
import re
import sys
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import list_flash_attention_impls

from megatron.model import build_stage
from megatron.model.attention import AttentionBackends, AttentionInputs, choose_backends, registered
from megatron.model.attention.backends import AttentionBackend, AttentionOptions, Flash, Sdpa, Varlen
from megatron.model.attention.flex import Flex
from megatron.model.build_specs import attention_spec
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError
from tests.fake.layouts import PACKED_DPO as PAIRS
from tests.model.stages import document_batch, make_stage, random_batch, small
from tests.model.test_attention import no_gpu_is_tried

KERNEL = "aten::_scaled_dot_product_"
MIXED: dict[str, Any] = {"num_layers": 4, "attention_config": [[["flash", "global"], 1], [["global", "flash"], 1]]}
HOPPER, BLACKWELL, AMPERE, ADA = (9, 0), (10, 3), (8, 0), (8, 9)
NEWER = [("flash3", "FA3", "flash_attn_interface"), ("flash4", "FA4", "flash_attn.cute.interface")]


@torch.no_grad()
@pytest.mark.parametrize("config, backend, kernels", [
    (MIXED["attention_config"], "math", ["flash", "math", "math", "flash"]),
    (MIXED["attention_config"], "flash", ["flash"] * 4),
    ([[["flash"], 4]], "math", ["math"] * 4),  # all the same: the key decides, as ever
    (None, "math", ["math"] * 4),
])  # fmt: skip
def test_a_layer_runs_what_attention_config_names(config: Any, backend: str, kernels: list[str]) -> None:
    args, log_lines = small(num_layers=4, attention_config=config, attention_backend=backend), list[str]()
    build_stage(args, ParallelGroups.single(), log=log_lines.append)
    assert not log_lines, "each is what was asked for"
    stage = make_stage(args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stage(None, random_batch(args))
    ran = [event.name for event in profile.events() or () if event.name.startswith(KERNEL)]
    assert ["flash" if "flash" in name else "math" for name in ran] == kernels


def test_on_a_gpu_layers_of_one_kind_may_mask_what_others_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu_is_tried(monkeypatch)
    args, log_lines = small(**MIXED, attention_backend="math", precision="bfloat16"), list[str]()
    specs = [attention_spec(args, block) for block in range(4)]
    chosen = choose_backends(args, torch.device("cuda"), specs, log_lines.append)
    batch = document_batch(args)
    forms = [chosen[spec.backend].form(batch, spec.window) for spec in specs]
    assert forms == ["cu_seqlens", None, None, "cu_seqlens"]
    assert specs[0].inputs == specs[3].inputs != specs[1].inputs == specs[2].inputs


def on_gpu(capability: tuple[int, int], log_lines: list[str] | None = None, **changes: Any) -> AttentionBackends:
    """Chooses backends as on a GPU that supports all of them."""
    args = small(**{"precision": "bfloat16", **changes})
    spec, log = attention_spec(args, 0), None if log_lines is None else log_lines.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionBackend, "supports", lambda self, call: None)
        return choose_backends(args, torch.device("cuda"), [spec], log, capability)[spec.backend]


@pytest.mark.parametrize("capability, changes, expected", [
    (HOPPER, {}, {"plain": "Cudnn", "over documents": "Varlen"}),
    (BLACKWELL, {}, {"plain": "Flash", "over documents": "Varlen"}),
    (BLACKWELL, {"attention_backend": "cudnn"}, {"plain": "Cudnn", "over documents": "Varlen"}),
    (AMPERE, {}, {"plain": "Flash", "over documents": "Varlen", "from a cache": "Flash"}),
    (ADA, {}, {"plain": "Flash", "over documents": "Varlen"}),
    (HOPPER, {"sliding_window_width": 4}, {"in windows": "Varlen", "with a mask": "Cudnn"}),
    (HOPPER, {"attention_dropout": 0.1}, {"with dropout": "Cudnn", "over documents": "EfficientVarlen"}),
    (HOPPER, {"precision": "fp32"}, {"over documents": "EfficientVarlen"}),
    (HOPPER, {"pos_emb": "alibi"}, {"with a mask": "Cudnn"}),
    (HOPPER, PAIRS, {"plain": "Cudnn", "over documents": "Varlen", "with shared prompts": "Flex"}),
    (AMPERE, PAIRS, {"plain": "Flash", "over documents": "Varlen", "with shared prompts": "Flex"}),
    (HOPPER, {"attention_backend": "cudnn"}, {"plain": "Cudnn", "over documents": "Varlen"}),
    (AMPERE, {"attention_backend": "cudnn"}, {"plain": "Cudnn", "over documents": "Varlen"}),
    (HOPPER, {"attention_backend": "flex"}, {"plain": "Flex", "over documents": "Flex", "with a mask": "Cudnn"}),
    (HOPPER, {"attention_backend": "math", **PAIRS}, {"plain": "Math"}),
])  # fmt: skip
def test_the_choice_by_gpu_and_kind_of_call(
    capability: tuple[int, int], changes: dict[str, Any], expected: dict[str, str]
) -> None:
    backends = on_gpu(capability, **changes)
    kinds = {kind: type(backend).__name__ for kind, backend in backends.backend_by_kind.items()}
    assert {kind: kinds[kind] for kind in expected} == expected
    maskless = {"over documents", "in windows", "with shared prompts"}
    assert maskless & set(kinds) == maskless & set(expected), "else under a mask"


def test_flex_runs_rows_of_training_alone() -> None:
    """Generation runs without a compiler."""
    chosen = on_gpu(HOPPER, attention_backend="flex")
    assert chosen.form(random_batch(small()), None) == "blocks"
    assert chosen.form(random_batch(small(), seq=9), None) is None
    assert isinstance(chosen.other_lengths["plain"], Flash)


def test_flex_takes_the_documents_that_varlen_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As heads of more than 256."""
    monkeypatch.setattr(Varlen, "supports", lambda self, call: "head_dim is too large")
    chosen = on_gpu(HOPPER)
    assert isinstance(chosen.backend_by_kind["over documents"], Flex)
    assert chosen.passed_over["over documents"] == "flash: head_dim is too large"
    batch = document_batch(small())
    assert chosen.form(batch, None) == "blocks" and chosen.form(random_batch(small()), None) is None
    shorter = random_batch(small(), seq=9)
    assert chosen.form(replace(shorter, documents=batch.documents), None) == "cu_seqlens", "compiled for no length"


def test_the_table_at_start() -> None:
    """Each kind of call, its backend, and why none before that."""
    log_lines: list[str] = []
    on_gpu(HOPPER, log_lines, **PAIRS)
    on_gpu(AMPERE, log_lines, precision="fp32")
    rows = [
        ["plain +cudnn.* 16 flash", "over documents +flash", "with shared prompts +flex"],
        [
            r"plain +flash +cudnn: .*9\.0.*attention_backend: cudnn",
            "over documents +efficient +flash: .*16.*; flex: .*16",
        ],
    ]
    for logged, expected in zip(log_lines, rows, strict=True):
        assert logged.startswith("attention_backend: auto")
        for row in expected:
            assert re.search(f"^ +{row}", logged, re.MULTILINE), logged


@pytest.mark.parametrize("setting, capability, at_length, at_others", [
    ("auto", HOPPER, "Cudnn", "Flash"), ("auto", AMPERE, "Flash", "Flash"), ("cudnn", HOPPER, "Cudnn", "Cudnn"),
    ("cudnn", AMPERE, "Cudnn", "Cudnn"),
])  # fmt: skip
def test_cudnn_runs_rows_of_training_on_gpus_it_is_fast_on(
    setting: str, capability: tuple[int, int], at_length: str, at_others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, ran = on_gpu(capability, attention_backend=setting), list[str]()
    monkeypatch.setattr(Sdpa, "run", lambda self, q, *_: ran.append(type(self).__name__) or q)
    for length in (16, 15):
        x = torch.zeros(length, 1, 4, 8)
        backends.attend(x, x, x, AttentionInputs(), AttentionOptions())
    assert ran == [at_length, at_others]


@pytest.mark.parametrize("name, implementation, module", NEWER)
def test_newer_flash_attention_is_activated_where_it_is_named(
    name: str, implementation: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert implementation in list_flash_attention_impls(), "torch's own registry knows it"
    source = import_module(f"torch.nn.attention._fa{implementation[-1]}")
    register = getattr(source, f"register_flash_attention_fa{implementation[-1]}")
    assert inspect.signature(register).parameters["module_path"].default == module
    active: list[str] = []
    for part in (module.rsplit(".", depth)[0] for depth in range(module.count("."), -1, -1)):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setattr(registered, "activate_flash_attention_impl", active.append)
    on_gpu(HOPPER)
    assert not active
    backends = on_gpu(HOPPER, attention_backend=name)
    assert {kind: backend.name for kind, backend in backends.backend_by_kind.items()} == {
        "plain": name, "with a mask": name, "from a cache": name, "over documents": name
    }  # fmt: skip
    assert set(active) == {implementation}
    assert isinstance(backends.backend_by_kind["over documents"], Varlen) and isinstance(
        backends.backend_by_kind["plain"], Flash
    )


@pytest.mark.parametrize("name, implementation, module", NEWER)
def test_newer_flash_attention_that_is_not_installed(name: str, implementation: str, module: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*{module}.*not installed .*(pip|compile) .*auto"):
        on_gpu(HOPPER, attention_backend=name)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_layer_that_cannot_have_its_kernel_has_that_of_the_others(backend: str) -> None:
    log_lines: list[str] = []
    build_stage(
        small(**MIXED, attention_dropout=0.1, attention_backend=backend), ParallelGroups.single(), log_lines.append
    )
    (logged,) = (line for line in log_lines if line.startswith("attention_config: flash chose"))
    assert re.search(r"\n  with dropout +math .*flash: .*dropout", logged) and re.search(r"\n  plain +flash\n", logged)
