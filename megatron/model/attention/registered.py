"""FlashAttention 3 and 4 in the place of torch's own FlashAttention 2: torch knows both by name, packages
have the kernels (`torch.nn.attention.activate_flash_attention_impl`)."""

from importlib import import_module
from typing import ClassVar

from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
)

from megatron.model.attention.backends import AttentionBackend, AttentionCall, Flash, Varlen


class _Registered(AttentionBackend):
    """A kernel that torch runs, for the whole process, where it else runs its own FlashAttention 2: through
    `scaled_dot_product_attention` and `varlen_attn`.

    implementation: torch's name. module: what torch imports for it. install: how to get it.
    """

    needs_gpu = by_name_only = True
    implementation: ClassVar[str]
    module: ClassVar[str]
    install: ClassVar[str]

    def missing(self) -> str | None:
        if self.implementation not in list_flash_attention_impls():
            return f"a torch that knows {self.implementation} (2.11 does)"
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
    """For Hopper (arXiv 2407.08608)."""

    implementation, module = "FA3", "flash_attn_interface"
    install = "compile the folder hopper of https://github.com/Dao-AILab/flash-attention"


class _Flash4(_Registered):
    """For Hopper and Blackwell, compiled by CuTe when it is first called."""

    implementation, module = "FA4", "flash_attn.cute.interface"
    install = "pip install flash-attn-4"


class Flash3(_Flash3, Flash):
    """Rows of equal length."""


class Flash3Varlen(_Flash3, Varlen):
    """Documents and windows."""


class Flash4(_Flash4, Flash):
    """Rows of equal length."""


class Flash4Varlen(_Flash4, Varlen):
    """Documents and windows."""
