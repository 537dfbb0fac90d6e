"""The kernels of attention: which run what, chosen once at start, and one function over all of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention.inputs import AttentionInputs, has_bias, sliding_window
from megatron.model.cache import LayerCache
from megatron.mpu import DTYPES, seeded
from megatron.mpu.random import fork_seed
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.frozen import each

# In order of preference.
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# (masked, dropping): what is said of such calls at start.
_CALLS = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_CACHED = "from a cache"
_WINDOWED = "in windows"


def takes_varlen(args: NeoXArgs, device: torch.device, window: int | None) -> bool:
    """Whether documents, and layers with a window, run without a mask: on a GPU on the varlen kernel, which is flash
    attention and knows neither biases nor fp32; on a CPU one document after another, unless there is a window, or
    compiled code, which would be made anew for each length."""
    if has_bias(args) or args.attention_dropout > 0.0:
        return False
    if has_varlen_kernel(device):
        return args.params_dtype != "fp32" and args.attention_backend in ("auto", "flash")
    return window is None and not args.compile


def has_varlen_kernel(device: torch.device) -> bool:
    """Whether torch's varlen attention runs there."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Backend:
    """The kernel of each kind of call, by name, chosen once at start.

    Calls over a single key, which cuDNN does not take, count as from a cache.
    """

    kernels: Mapping[str, str]

    def kernel(self, *, masked: bool, dropping: bool, cached: bool) -> SDPBackend:
        """The one that such a call runs on."""
        return _KERNELS[self.kernels[_CACHED if cached else _CALLS[masked, dropping]]]

    @property
    def name(self) -> str:
        """As printed at start."""
        usual = next(iter(self.kernels.values()))
        return ", ".join([usual, *(f"{call} {name}" for call, name in self.kernels.items() if name != usual)])


def choose_backend(args: NeoXArgs, device: torch.device) -> Backend:
    """The kernels behind `attention_backend`, each tried with one tiny call of its kind.

    `auto` takes the first that works of cuDNN, flash, efficient and math, on CPUs of flash and math. A named kernel
    is used for all of training, and where it takes no mask, the first that does for packed documents and generation.
    Sliding windows run on the varlen kernel where `takes_varlen`, else under a mask.
    Raises ConfigError for a named kernel that does not work on this device or for this run.
    """
    asked, place = args.attention_backend, args.origin("attention_backend")
    if device.type != "cuda" and asked in ("efficient", "cudnn"):
        raise ConfigError([f"{place}: attention_backend: {asked} needs a GPU; set attention_backend: auto"])
    order = list(_KERNELS) if device.type == "cuda" else ["flash", "math"]
    names = order if asked == "auto" else [asked, *(name for name in order if name != asked)]
    windowed, seq = sliding_window(args) is not None, min(args.seq_length, 256)
    always_masked = has_bias(args) or (windowed and "full_attention" not in (args.layer_types or ()))
    calls = [(call, masked, dropping, [(seq, seq)]) for (masked, dropping), call in _CALLS.items()]
    varlen = windowed and takes_varlen(args, device, sliding_window(args))
    kernels: dict[str, str] = {_WINDOWED: "flash"} if varlen else {}
    for call, masked, dropping, shapes in [*calls, (_CACHED, True, False, [(1, 1), (1, 9)])]:
        if (dropping and args.attention_dropout == 0.0) or (always_masked and not masked):
            continue  # this run makes no such calls
        for name in names:
            found = [_problem(name, args, device, *shape, masked, dropping) for shape in shapes]
            problem = next(filter(None, found), None)
            if problem is None:
                kernels[call] = name
                break
            if name == asked and masked == always_masked and call != _CACHED and _WINDOWED not in kernels:
                fix = "set attention_backend: auto"
                raise ConfigError([f"{place}: attention_backend: {name} cannot do this run ({problem}); {fix}"])
    return Backend(kernels)


def _problem(
    name: str, args: NeoXArgs, device: torch.device, queries: int, keys: int, masked: bool, dropping: bool
) -> str | None:
    """Why a kernel cannot do one call (and its gradient, for a whole text); None when it can."""
    dtype = DTYPES[args.params_dtype]
    least = min(each(args.kv_heads))
    kv_heads = min(least, 2)
    heads, training = kv_heads * args.num_attention_heads // least, queries == keys

    def values(seq: int, heads: int) -> Tensor:
        whole = torch.zeros(seq, 2, heads, args.head_dim, device=device, dtype=dtype, requires_grad=training)
        return whole.permute(1, 2, 0, 3)

    mask = None
    if masked:
        shape = (2, heads if has_bias(args) else 1, queries, keys)
        kind = torch.bool if training and not has_bias(args) else dtype  # masks over a cache are added, see `Stage`
        mask = torch.ones(shape, device=device, dtype=kind, requires_grad=args.pos_emb == "rpe" and training)

    def call() -> Tensor:
        return F.scaled_dot_product_attention(
            values(queries, heads), values(keys, kv_heads), values(keys, kv_heads), attn_mask=mask,
            is_causal=mask is None, dropout_p=args.attention_dropout if dropping else 0.0, enable_gqa=heads != kv_heads,
        )  # fmt: skip

    with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(training):
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(_KERNELS[name]), fork_seed(0, device):
                out = call()
            if training:
                out.sum().backward()
                if mask is not None and mask.requires_grad and mask.grad is None:
                    return "it gives no gradient to biases"
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as problem:
            # torch warns of its reasons, kernel by kernel; those of the others are that they were switched off.
            texts = [str(warning.message).split(" (Triggered")[0] for warning in said]
            reasons = [text for text in texts if "not used because" not in text and "disabled" not in text]
            return " ".join(reasons).rstrip(".") or str(problem).splitlines()[0]
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    *,
    backend: Backend,
    cache: LayerCache | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention, softmax(q k^T * scale + bias) v.

    q: `[seq, batch, heads, head_dim]`; k, v: `[seq, batch, kv_heads, head_dim]`; returns q's shape.
    scale: None for 1 / sqrt(head_dim).
    cache: takes k and v in; with `inputs.columns`, q attends to all of it that `inputs.mask` shows.
    Dropout of the probabilities is a function of `seed` alone.
    """
    if inputs.cu_seqlens is not None:
        if cache is not None:
            cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        if has_varlen_kernel(q.device):
            return _attend_varlen(q, k, v, inputs.cu_seqlens, inputs.window, scale)
        with sdpa_kernel(backend.kernel(masked=False, dropping=False, cached=False)):
            return _attend_each(q, k, v, inputs.cu_seqlens, scale)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped, mask = k.shape[1] != q.shape[1], inputs.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    if cache is not None:
        cache.put(k, v)
    cached = cache is not None and inputs.columns is not None
    single = k.shape[2] == 1 and not cached
    with sdpa_kernel(backend.kernel(masked=mask is not None, dropping=dropout_p > 0.0, cached=cached or single)):
        if cache is not None and cached:
            assert mask is not None
            outs = [
                F.scaled_dot_product_attention(
                    q[rows], keys, values, mask[rows, ..., : keys.shape[2]], enable_gqa=grouped, scale=scale
                )
                for rows, keys, values in cache.read()
            ]
            return (outs[0] if len(outs) == 1 else torch.cat(outs)).permute(2, 0, 1, 3)
        sdpa = partial(
            F.scaled_dot_product_attention,
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=mask is None, enable_gqa=grouped,
            scale=scale,
        )  # fmt: skip
        out = seeded(sdpa, seed, q.device) if dropout_p > 0.0 else sdpa()
    return out.permute(2, 0, 1, 3)


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float | None) -> Tensor:
    # Padding starts (equal to the row's end) are empty documents to the kernel, so shapes stay fixed without a sync.
    from torch.nn.attention.varlen import varlen_attn

    seq, batch, heads, head_dim = q.shape
    q, k, v = (x.transpose(0, 1).reshape(batch * seq, x.shape[2], head_dim) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, seq, seq, window_size=(window, 0), scale=scale)
    assert isinstance(out, Tensor)
    return out.view(batch, seq, heads, head_dim).transpose(0, 1)


def _attend_each(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    seq, batch, heads, head_dim = q.shape
    grouped = k.shape[2] != heads
    lengths = [length for length in cu_seqlens.diff().tolist() if length > 0]
    rows = (x.transpose(0, 1).reshape(batch * seq, -1, head_dim) for x in (q, k, v))
    flat = ([one.transpose(0, 1).unsqueeze(0) for one in x.split(lengths)] for x in rows)
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale)
        for q, k, v in zip(*flat, strict=True)
    ]
    return torch.cat([out.squeeze(0).transpose(0, 1) for out in outs]).view(batch, seq, heads, head_dim).transpose(0, 1)
