"""FP8: the matrix products of linear layers with 8-bit floating-point operands and scales, for each FP8
recipe.

casting.py casts matrices to FP8. products.py multiplies them, grouped.py those of experts. delayed.py keeps
the history that delayed scaling needs. transformer_engine.py uses the kernels of Transformer-Engine instead.
"""

from megatron.mpu.fp8.casting import Formats
from megatron.mpu.fp8.delayed import DelayedProduct, DelayedScaling
from megatron.mpu.fp8.grouped import GroupedScaledProduct
from megatron.mpu.fp8.products import MXProduct, RowwiseProduct, TensorwiseProduct
