"""The table of kernels that have run on GPUs, and what `auto` is told of the others."""

import re

import pytest

from megatron.model.attention.backend_choice import _backends
from megatron.mpu.gpu_kernels import RUN_ON, Capability, not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of


@pytest.mark.parametrize(("setting", "capability", "facts"), [
    ("attention_backend: cudnn", (9, 0), None),
    ("attention_backend: cudnn", (10, 0), "9.0 alone"),
    ("attention_backend: flash", (8, 6), None),
    ("precision_fp8: tensorwise", (8, 9), "9.0 alone"),
    ("precision_fp8: mxfp8", (10, 0), "no GPU"),
    ("apex: true", (9, 0), "no GPU"),
    ("apex: true", None, None),
])  # fmt: skip
def test_what_auto_is_told(setting: str, capability: Capability | None, facts: str | None) -> None:
    told = not_run_on(setting, capability)
    assert (told is None) == (facts is None)
    assert told is None or (facts is not None and facts in told and f"set {setting} " in told)


def test_rows_are_settings() -> None:
    for row in RUN_ON:
        key, value = row.split(": ")
        words = re.findall(r"[\w-]+", str(keys_of(NeoXArgs)[key].type))
        assert ("bool" if value == "true" else value) in words, row


def test_attention_that_has_run_nowhere_runs_by_name_alone() -> None:
    ran = {row.removeprefix("attention_backend: ") for row in RUN_ON}
    assert {b.name for b in _backends() if b.by_name_only} == {b.name for b in _backends()} - ran
