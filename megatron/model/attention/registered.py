"""FlashAttention 3 and 4, which replace torch's own FlashAttention 2.

torch knows both by name (`torch.nn.attention.activate_flash_attention_impl`); installed packages provide the
kernels.
"""

from importlib import import_module
from typing import ClassVar

from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
)

from megatron.model.attention.backends import AttentionBackend, AttentionCall, Flash, Varlen


class _Registered(AttentionBackend):
    """A kernel that replaces torch's own FlashAttention 2 in the whole process.

    It runs when `scaled_dot_product_attention` or `varlen_attn` is called.

    implementation: torch's name of the kernel, such as FA3. module: the package that torch imports. install:
        how to install it.
    """

    needs_gpu = opt_in = True
    implementation: ClassVar[str]
    module: ClassVar[str]
    install: ClassVar[str]

    def missing(self) -> str | None:
        if self.implementation not in list_flash_attention_impls():
            return f"a torch release that supports {self.implementation}, such as 2.11"
        try:
            import_module(self.module)
        except ModuleNotFoundError as problem:
            return f"{self.module}, which is not installed ({problem}): {self.install}"
        except Exception as problem:  # compiled for another torch or CUDA
            reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
            return f"{self.module}, which is installed and cannot be imported ({reason}): {self.install}"
        return None

    def supports(self, call: AttentionCall) -> str | None:
        if current_flash_attention_impl() != self.implementation:
            activate_flash_attention_impl(self.implementation)
        return super().supports(call)


class _Flash3(_Registered):
    """FlashAttention 3, for Hopper GPUs (arXiv 2407.08608)."""

    implementation, module = "FA3", "flash_attn_interface"
    install = "compile the folder hopper of https://github.com/Dao-AILab/flash-attention"


class _Flash4(_Registered):
    """FlashAttention 4, for Hopper and Blackwell GPUs. CuTe compiles it at its first call."""

    implementation, module = "FA4", "flash_attn.cute.interface"
    install = "pip install flash-attn-4"


class Flash3(_Flash3, Flash):
    """FlashAttention 3 for rows of equal length."""


class Flash3Varlen(_Flash3, Varlen):
    """FlashAttention 3 for documents and windows."""


class Flash4(_Flash4, Flash):
    """FlashAttention 4 for rows of equal length."""


class Flash4Varlen(_Flash4, Varlen):
    """FlashAttention 4 for documents and windows."""
