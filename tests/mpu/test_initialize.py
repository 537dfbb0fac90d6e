"""What is set for torch where groups are made."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.mpu.initialize import _check_experts, allow_tf32
from megatron.neox_arguments import ConfigError
from tests.model.stages import small


def test_tf32_is_as_asked_in_every_name_torch_has_for_it() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            allow_tf32(True)
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.get_float32_matmul_precision() == "high"  # Inductor asks for it
        finally:
            allow_tf32(False)
    assert torch.get_float32_matmul_precision() == "highest"


def test_experts_are_shared_out_within_a_machine() -> None:
    """Eight ranks on machines of four, unless it is allowed."""
    moe: dict[str, Any] = {"moe_num_experts": 8, "model_parallel_size": 2, "num_kv_heads": 2}
    process: Any = SimpleNamespace(world_size=8, local_world_size=4)
    _check_experts(small(**moe, expert_parallel_size=2), process)
    with pytest.raises(ConfigError, match="tokens would travel between machines") as caught:
        _check_experts(small(**moe, expert_parallel_size=4), process)
    assert "expert_parallel_across_nodes: true" in str(caught.value)
    _check_experts(small(**moe, expert_parallel_size=4, expert_parallel_across_nodes=True), process)
    _check_experts(small(**moe, expert_parallel_size=4), SimpleNamespace(world_size=8, local_world_size=8))  # type: ignore[arg-type]
