"""FP8: the matrix products of linear layers with 8-bit floating-point operands and scales, by recipe.

`casting.py` casts matrices to FP8, `products.py` multiplies them, `delayed.py` keeps the history of delayed
scaling, `transformer_engine.py` multiplies with that library.
"""

from megatron.mpu.fp8.casting import Formats
from megatron.mpu.fp8.delayed import DelayedProduct, DelayedScaling
from megatron.mpu.fp8.products import MXProduct, RowwiseProduct, TensorwiseProduct
