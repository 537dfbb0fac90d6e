"""torch's dtypes by the names that `args.params_dtype` has."""

from types import MappingProxyType

import torch

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
