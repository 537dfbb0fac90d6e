"""TORCH_CUDA_ARCH_LIST against DeepSpeed's own parser."""

import os

import pytest
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder

from megatron.launch.cuda_driver import is_readable_arch_list, set_arch_list

NAME = "TORCH_CUDA_ARCH_LIST"


def deepspeed_reads(monkeypatch, value: str) -> str:
    """What DeepSpeed's builder makes of the variable when it compiles on first use."""
    monkeypatch.setenv(NAME, value)
    builder = FusedAdamBuilder()
    builder.jit_mode = True
    builder.compute_capability_args()
    return os.environ[NAME]


@pytest.mark.parametrize("value", ["9.0a", "10.0a", "8.0;9.0a", "Hopper", "8.0 Hopper"])
def test_what_deepspeed_cannot_read_becomes_that_of_the_device(monkeypatch, value):
    with pytest.raises(ValueError):
        deepspeed_reads(monkeypatch, value)
    env = {NAME: value}
    message = set_arch_list(env, lambda: [(9, 0), (9, 0)])
    assert env == {NAME: "9.0"}
    assert value in message and "set to 9.0" in message
    assert deepspeed_reads(monkeypatch, env[NAME]) == "9.0+PTX"


@pytest.mark.parametrize("value", ["9.0", "8.0;9.0", "8.0 9.0+PTX", "8.6;10.0"])
def test_what_it_reads_stays(monkeypatch, value):
    env = {NAME: value}
    assert set_arch_list(env, lambda: [(9, 0)]) is None
    assert env == {NAME: value}
    deepspeed_reads(monkeypatch, value)


def test_other_devices_and_none():
    env = {NAME: "9.0a"}
    set_arch_list(env, lambda: [(10, 0), (8, 0)])
    assert env == {NAME: "8.0;10.0"}
    unset: dict[str, str] = {}
    assert set_arch_list(unset, lambda: [(9, 0)]) is None and unset == {}
    kept = {NAME: "9.0a"}
    assert set_arch_list(kept, lambda: []) is None and kept == {NAME: "9.0a"}
    assert is_readable_arch_list("") and not is_readable_arch_list("9.0,8.0")
