"""The ways of benchmarks/decoding.py, on a CPU."""

import pytest
import torch

from benchmarks.decoding import batcher_way
from benchmarks.generation import neox_model, transformers_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_generates_in_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    model = neox_model(transformers_model("1M", torch.device("cpu"), dtype))
    assert model.stage.dtype == dtype
    assert [len(text) for text in batcher_way(model, False)([[5, 9, 2], [7, 3, 4]], 4)] == [4, 4]
