"""What is set for torch where groups are made."""

import warnings

import torch

from megatron.mpu.initialize import allow_tf32


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
