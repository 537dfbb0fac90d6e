"""The table of kernels that have run on GPUs, and what `auto` is told of the others."""

import json
import re

import pytest

from megatron.model.attention.backend_choice import _backends
from megatron.mpu.gpu_kernels import RUN_ON, Capability, not_run_on
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from tests.launch.runs import ROOT


@pytest.mark.parametrize(("setting", "capability", "facts"), [
    ("attention_backend: cudnn", (9, 0), None),
    ("attention_backend: cudnn", (10, 0), "compute capability 9.0"),
    ("attention_backend: flash", (8, 6), None),
    ("precision_fp8: tensorwise", (8, 9), "compute capability 9.0"),
    ("precision_fp8: mxfp8", (10, 0), "no GPU"),
    ("apex: true", (9, 0), "no GPU"),
    ("apex: true", None, None),
])  # fmt: skip
def test_what_auto_is_told(setting: str, capability: Capability | None, facts: str | None) -> None:
    problem = not_run_on(setting, capability)
    assert (problem is None) == (facts is None)
    assert problem is None or (facts is not None and facts in problem and f"set {setting} " in problem)


# Of each row a test that compares it, by a part of its name.
TEST_BY_KERNEL = {
    "attention_backend: math": "test_kernel_equals_math", "attention_backend: flash": "equals_math[flash-",
    "attention_backend: cudnn": "equals_math[cudnn-", "attention_backend: efficient": "equals_math[efficient-",
    "attention_backend: flex": "test_flex_attention_equals_its_mask",
    "compile: block": "test_compiled_blocks_equal_eager_ones[neox bf16]", "compile: block-max": "[block-max bf16]",
    "fused_update: true": "test_steps_are_those_of_torchs_kernel",
    "precision_fp8: tensorwise": "test_losses_with_bf16[tensorwise]",
    "precision_fp8: rowwise": "test_losses_with_bf16[rowwise]",
    "precision_fp8: te": "test_losses_with_bf16[te]",
}  # fmt: skip


def test_what_has_run_has_passed_in_a_table() -> None:
    tables = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    passed = {row["name"] for table in tables for part in table["parts"] for row in part["tests"]
              if row["outcome"] == "passed"}  # fmt: skip
    assert {row for row in RUN_ON if not any(TEST_BY_KERNEL[row] in name for name in passed)} == set()


def test_rows_are_settings() -> None:
    for row in RUN_ON:
        key, value = row.split(": ")
        words = re.findall(r"[\w-]+", str(keys_of(NeoXArgs)[key].type))
        assert ("bool" if value == "true" else value) in words, row


def test_untested_attention_runs_only_by_name() -> None:
    ran = {row.removeprefix("attention_backend: ") for row in RUN_ON}
    assert {b.name for b in _backends() if b.opt_in} == {b.name for b in _backends()} - ran
