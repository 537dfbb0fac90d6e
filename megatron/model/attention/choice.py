"""Which backend runs which calls of attention, chosen once at start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from megatron.model.attention.backends import Backend, Call, Options
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.specs import AttentionSpec
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.attention import ATTENTION_BACKENDS

# (masked, dropping): what is said of such calls at start.
_DENSE = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_CACHED, _WINDOWED, _DOCUMENTS = "from a cache", "in windows", "over documents"


@dataclass(frozen=True)
class Backends:
    """The backend of each kind of call of some layers.

    Calls over a single key, which cuDNN does not take, count as from a cache.
    """

    by_kind: Mapping[str, Backend]

    @property
    def name(self) -> str:
        """What is printed at start: the usual backend, then the kinds of calls that run on another."""
        names = [(kind, backend.name) for kind, backend in self.by_kind.items() if kind != _DOCUMENTS]
        return ", ".join([names[0][1], *(f"{kind} {name}" for kind, name in names if name != names[0][1])])

    def takes_documents(self, window: int | None) -> bool:
        """Whether documents, and layers with a window, run without a mask: from `AttentionInputs.cu_seqlens`."""
        return (_DOCUMENTS if window is None else _WINDOWED) in self.by_kind

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: Options) -> Tensor:
        """`Backend.run` of the one that was chosen for such calls; keys and values are put into the cache."""
        if options.cache is not None:
            options.cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        if inputs.cu_seqlens is not None:
            kind = _DOCUMENTS if inputs.window < 0 else _WINDOWED
        elif k.shape[0] == 1 or inputs.columns is not None:
            kind = _CACHED
        else:
            kind = _DENSE[inputs.mask is not None, options.dropout_p > 0.0]
        return self.by_kind[kind].run(q, k, v, inputs, options)


def choose_backends(
    args: NeoXArgs, device: torch.device, specs: Sequence[AttentionSpec], log: Callable[[str], None] | None = None
) -> dict[str, Backends]:
    """Choose the backends of all layers, by `AttentionSpec.backend`; each is tried with one tiny call of each kind.

    `auto` takes the first of `ATTENTION_BACKENDS` that works. A named one is used for all of training, and where it
    takes no mask, the first that does for packed documents and generation. One that `attention_config` names for some
    layers is used where it can do the run, else `attention_backend`. Documents, and layers with a window, run under a
    mask where none that is asked for takes them without.
    Raises ConfigError for a named one that does not work on this device or for this run.
    """
    here = [backend for backend in _backends() if device.type == "cuda" or not backend.needs_gpu]
    found = {}
    for asked in dict.fromkeys(spec.backend for spec in specs):
        key = "attention_backend" if asked == args.attention_backend else "attention_config"
        place, fix = f"{args.origin(key)}: {key}: {asked}", "set attention_backend: auto"
        chosen, instead = dict[str, Backend](), [b for b in here if args.attention_backend in ("auto", b.name)]
        named = [backend for backend in here if asked in ("auto", backend.name)]
        if not named:
            raise ConfigError([f"{place} needs a GPU; {fix}"])
        calls = _calls(args, device, list(dict.fromkeys(spec for spec in specs if spec.backend == asked)))
        for kind, tries in calls.items():
            allowed = named if tries[0].documents else [*named, *instead, *here]
            backend = next((backend for backend in allowed if _problem(backend, tries) is None), None)
            trained = kind in _DENSE.values() and tries[0].masked == (_DENSE[False, False] not in calls)
            if trained and key == "attention_backend" and backend not in named and _WINDOWED not in chosen:
                raise ConfigError([f"{place} cannot do this run ({_problem(named[-1], tries)}); {fix}"])
            if backend is not None:
                chosen[kind] = backend
        found[asked] = Backends(chosen)
        if log is not None and found[asked].name != asked:
            log(f"{key}: {asked} chose {found[asked].name}")
    return found


def _backends() -> list[Backend]:
    places = [(name, *place.split(".")) for name, place in ATTENTION_BACKENDS]
    return [getattr(import_module(f"megatron.model.attention.{file}"), cls)(name) for name, file, cls in places]


def _problem(backend: Backend, calls: Sequence[Call]) -> str | None:
    return next(filter(None, map(backend.supports, calls)), None)


def _calls(args: NeoXArgs, device: torch.device, specs: Sequence[AttentionSpec]) -> dict[str, list[Call]]:
    """The kinds of calls that layers with these specs make, each with the tiny calls that a backend is tried with."""
    seq, dtype, compiled = min(args.seq_length, 256), DTYPES[args.params_dtype], bool(args.compile)
    near = [spec for spec in specs if spec.window is not None]
    always_masked, dropping = specs[0].biased or len(near) == len(specs), specs[0].dropout > 0.0

    def tries(specs: Iterable[AttentionSpec], *lengths: tuple[int, int], **holds: bool) -> list[Call]:
        lengths = lengths or ((seq, seq),)
        return [Call(spec, device, dtype, *n, compiled=compiled, **holds) for spec in specs for n in lengths]

    made = {_WINDOWED: tries(near, documents=True)}
    for (masked, drops), kind in _DENSE.items():
        if masked >= always_masked and dropping >= drops:
            made[kind] = tries(specs, masked=masked, dropping=drops)
    made[_CACHED] = tries(specs, (1, 1), (1, 9), masked=True)
    made[_DOCUMENTS] = tries([spec for spec in specs if spec not in near], documents=True)
    return {kind: calls for kind, calls in made.items() if calls}
