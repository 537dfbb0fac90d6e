"""Which backend runs which calls of attention: chosen once at start, and one function over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron.model.attention.backends import Backend, Call, Options, Sdpa, Varlen
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.cache import LayerCache
from megatron.model.specs import AttentionSpec
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, NeoXArgs

# In order of preference.
BACKENDS: tuple[Backend, ...] = (
    Varlen(),
    Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION, needs_gpu=True),
    Sdpa("flash", SDPBackend.FLASH_ATTENTION),
    Sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, needs_gpu=True),
    Sdpa("math", SDPBackend.MATH),
)
# (masked, dropping): what is said of such calls at start.
_DENSE = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_CACHED, _WINDOWED, _DOCUMENTS, _COMPILED = "from a cache", "in windows", "documents", "documents, compiled"


@dataclass(frozen=True)
class Backends:
    """The backend of each kind of call, chosen once at start.

    Calls over a single key, which cuDNN does not take, count as from a cache.
    """

    by_kind: Mapping[str, Backend]

    @property
    def names(self) -> dict[str, str]:
        """By what is said of the calls at start."""
        return {kind: backend.name for kind, backend in self.by_kind.items() if not kind.startswith(_DOCUMENTS)}

    @property
    def name(self) -> str:
        """As printed at start."""
        usual = next(iter(self.names.values()))
        return ", ".join([usual, *(f"{kind} {name}" for kind, name in self.names.items() if name != usual)])

    def takes_documents(self, window: int | None, compiled: bool) -> bool:
        """Whether documents, and layers with a window, run without a mask: from `AttentionInputs.cu_seqlens`."""
        return (_WINDOWED if window is not None else _COMPILED if compiled else _DOCUMENTS) in self.by_kind


def choose_backends(
    args: NeoXArgs, device: torch.device, mixers: Iterable[AttentionSpec], log: Callable[[str], None] | None = None
) -> dict[str, Backends]:
    """The backends of all layers, by `AttentionSpec.backend`, each tried with one tiny call of its kind.

    `auto` takes the first that works of `BACKENDS`. A named one is used for all of training, and where it takes no
    mask, the first that does for packed documents and generation. Documents, and layers with a window, run under a
    mask where no backend that is asked for takes them.
    Raises ConfigError for a named backend that does not work on this device or for this run.
    """
    groups: dict[str, list[AttentionSpec]] = {}
    for mixer in mixers:
        groups.setdefault(mixer.backend, []).append(mixer)
    chosen = {}
    for asked, group in groups.items():
        own = asked == args.attention_backend
        key = "attention_backend" if own else "attention_config"
        place, fix = f"{args.origin(key)}: {key}", "set attention_backend: auto" if own else "write global instead"
        chosen[asked] = _choose(asked, _calls(args, device, group), device, place, fix)
        if log is not None and chosen[asked].name != asked:
            log(f"{key}: {asked} chose {chosen[asked].name}")
    return chosen


def _choose(asked: str, calls: Mapping[str, Sequence[Call]], device: torch.device, place: str, fix: str) -> Backends:
    here = [backend for backend in BACKENDS if device.type == "cuda" or not backend.needs_gpu]
    named = [backend for backend in here if asked in ("auto", backend.name)]
    if not named:
        raise ConfigError([f"{place}: {asked} needs a GPU; {fix}"])
    others = [backend for backend in here if backend not in named]
    chosen: dict[str, Backend] = {}
    for kind, tries in calls.items():
        found, problem = _first(named, tries)
        usual = kind in _DENSE.values() and tries[0].masked == (_DENSE[False, False] not in calls)
        if found is None and usual and _WINDOWED not in chosen:
            raise ConfigError([f"{place}: {asked} cannot do this run ({problem}); {fix}"])
        if found is None and not tries[0].documents:
            found, _ = _first(others, tries)
        if found is not None:
            chosen[kind] = found
    return Backends(chosen)


def _first(backends: Iterable[Backend], tries: Sequence[Call]) -> tuple[Backend | None, str | None]:
    """The first backend that supports all of these calls; for none, the problem of the last."""
    problem = None
    for backend in backends:
        problem = next(filter(None, map(backend.supports, tries)), None)
        if problem is None:
            return backend, None
    return None, problem


def _calls(args: NeoXArgs, device: torch.device, mixers: Sequence[AttentionSpec]) -> dict[str, list[Call]]:
    """What to try for each kind of call that these layers make."""
    windowed, dropout = [mixer.window is not None for mixer in mixers], mixers[0].dropout
    always_masked, seq = mixers[0].biased or all(windowed), min(args.seq_length, 256)
    bias = args.pos_emb if mixers[0].biased else None
    shapes = dict.fromkeys((mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in mixers)
    made: dict[str, list[Call]] = {}

    def add(kind: str, *lengths: tuple[int, int], **holds: bool) -> None:
        made[kind] = [
            Call(device, DTYPES[args.params_dtype], *shape, *tokens, bias, dropout, **holds)
            for shape in shapes
            for tokens in lengths or [(seq, seq)]
        ]

    if any(windowed):
        add(_WINDOWED, documents=True, windowed=True)
    for (masked, dropping), kind in _DENSE.items():
        if masked >= always_masked and (dropout > 0.0 or not dropping):
            add(kind, masked=masked, dropping=dropping)
    add(_CACHED, (1, 1), (1, 9), masked=True)
    if not all(windowed):
        add(_DOCUMENTS, documents=True)
        add(_COMPILED, documents=True, compiled=True)
    return made


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    *,
    backends: Backends,
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
    if cache is not None:
        cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
    read = cache if inputs.columns is not None else None
    if inputs.cu_seqlens is not None:
        kind = _DOCUMENTS if inputs.window < 0 else _WINDOWED
    elif read is not None or k.shape[0] == 1:
        kind = _CACHED
    else:
        kind = _DENSE[inputs.mask is not None, dropout_p > 0.0]
    return backends.by_kind[kind].run(q, k, v, inputs, Options(read, dropout_p, seed, scale))
