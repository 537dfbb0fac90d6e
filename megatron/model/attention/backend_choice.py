"""Choosing, once at start, which attention backend runs which kind of call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from megatron.model.attention.backends import AttentionBackend, AttentionCall, AttentionOptions
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.specs import AttentionSpec
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.attention import ATTENTION_BACKENDS

# (masked, dropping) -> the words for such calls in the line that is printed at start.
_DENSE = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_CACHED, _WINDOWED, _DOCUMENTS = "from a cache", "in windows", "over documents"


@dataclass(frozen=True)
class AttentionBackends:
    """The attention backend that was chosen for each kind of call of some layers.

    Calls with a single key, which cuDNN does not take, count as from a cache.
    seq_length: number of queries of a row in training. other_lengths: for kinds of calls whose backend plans
    anew for every shape, the one that other numbers of queries run on.
    """

    by_kind: Mapping[str, AttentionBackend]
    seq_length: int = 0
    other_lengths: Mapping[str, AttentionBackend] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The text that is printed at start: the usual backend, then the kinds of calls that run on
        another."""
        names = [(kind, backend.name) for kind, backend in self.by_kind.items() if kind != _DOCUMENTS]
        first = names[0][1]
        others = ", ".join(dict.fromkeys(backend.name for backend in self.other_lengths.values()))
        at_others = [f"at other lengths than {self.seq_length} {others}"] if others else []
        return ", ".join([first, *(f"{kind} {name}" for kind, name in names if name != first), *at_others])

    def supports_varlen(self, window: int | None) -> bool:
        """Whether layers with this window attend within documents without a mask, from
        `AttentionInputs.cu_seqlens`."""
        return (_DOCUMENTS if window is None else _WINDOWED) in self.by_kind

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        """Attention by the backend that was chosen for such calls; new keys and values are first put into the
        cache.

        Arguments and result are those of `AttentionBackend.run`.
        """
        if options.cache is not None:
            options.cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        if inputs.cu_seqlens is not None:
            kind = _DOCUMENTS if inputs.window < 0 else _WINDOWED
        elif k.shape[0] == 1 or inputs.columns is not None:
            kind = _CACHED
        else:
            kind = _DENSE[inputs.mask is not None, options.dropout_p > 0.0]
        backend = self.by_kind[kind]
        if q.shape[0] != self.seq_length:
            backend = self.other_lengths.get(kind, backend)
        return backend.run(q, k, v, inputs, options)


def choose_backends(
    args: NeoXArgs,
    device: torch.device,
    specs: Sequence[AttentionSpec],
    log: Callable[[str], None] | None = None,
) -> dict[str, AttentionBackends]:
    """Choose the backends of all layers, by `AttentionSpec.backend`; each is tried with one tiny call of each
    kind.

    `auto` takes the first of `ATTENTION_BACKENDS` that works, but cuDNN only where it is the fastest: on GPUs
    of compute capability 9.0 and later, for rows of seq_length (it plans anew, for long, for every shape, as
    generation and scoring have them). A named one is used for all of training, and where it takes no mask,
    the first that does for packed documents and generation. One that `attention_config` names for some layers
    is used where it can do the run, else `attention_backend`. Documents, and layers with a window, run under
    a mask where none takes them without: biases need one, and `math`. On a CPU only one that is asked for
    takes them.
    Raises ConfigError for a named one that does not work on this device or for this run.
    """
    here = [backend for backend in _backends() if device.type == "cuda" or not backend.needs_gpu]
    by_name = {}
    for asked in dict.fromkeys(spec.backend for spec in specs):
        key = "attention_backend" if asked == args.attention_backend else "attention_config"
        place, fix = f"{args.origin(key)}: {key}: {asked}", "set attention_backend: auto"
        chosen, instead = (
            dict[str, AttentionBackend](),
            [b for b in here if args.attention_backend in ("auto", b.name)],
        )
        named = [backend for backend in here if asked in ("auto", backend.name)]
        if asked == "auto" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
            named = [backend for backend in named if not backend.plans_shapes]
        if not named:
            raise ConfigError([f"{place} needs a GPU; {fix}"])
        other_lengths: dict[str, AttentionBackend] = {}
        calls = _calls(args, device, list(dict.fromkeys(spec for spec in specs if spec.backend == asked)))
        for kind, tries in calls.items():
            # On a GPU no mask for documents, but for the plain mathematics, which others are compared with.
            only_named = tries[0].documents and (device.type == "cpu" or asked == "math")
            allowed = named if only_named else [*named, *instead, *here]
            fitting = (backend for backend in allowed if _problem(backend, tries) is None)
            backend = next(fitting, None)
            trained = kind in _DENSE.values() and tries[0].masked == (_DENSE[False, False] not in calls)
            if trained and key == "attention_backend" and backend not in named and _WINDOWED not in chosen:
                raise ConfigError([f"{place} cannot do this run ({_problem(named[-1], tries)}); {fix}"])
            if backend is not None:
                chosen[kind] = backend
            if asked == "auto" and backend is not None and backend.plans_shapes:
                other_lengths[kind] = next((b for b in fitting if not b.plans_shapes), backend)
        by_name[asked] = AttentionBackends(chosen, args.seq_length, other_lengths)
        if log is not None and by_name[asked].name != asked:
            log(f"{key}: {asked} chose {by_name[asked].name}")
    return by_name


def _backends() -> list[AttentionBackend]:
    places = [(name, *place.split(".")) for name, place in ATTENTION_BACKENDS]
    return [getattr(import_module(f"megatron.model.attention.{file}"), cls)(name) for name, file, cls in places]


def _problem(backend: AttentionBackend, calls: Sequence[AttentionCall]) -> str | None:
    return next(filter(None, map(backend.supports, calls)), None)


def _calls(args: NeoXArgs, device: torch.device, specs: Sequence[AttentionSpec]) -> dict[str, list[AttentionCall]]:
    """The kinds of calls that layers with these specs make; for each the tiny calls to try a backend with."""
    seq, dtype, compiled = min(args.seq_length, 256), DTYPES[args.params_dtype], bool(args.compile)
    near = [spec for spec in specs if spec.window is not None]
    always_masked, dropping = specs[0].biased or len(near) == len(specs), specs[0].dropout > 0.0

    def tries(specs: Iterable[AttentionSpec], *lengths: tuple[int, int], **holds: bool) -> list[AttentionCall]:
        lengths = lengths or ((seq, seq),)
        return [AttentionCall(spec, device, dtype, *n, compiled=compiled, **holds) for spec in specs for n in lengths]

    made = {_WINDOWED: tries(near, documents=True)}
    for (masked, drops), kind in _DENSE.items():
        if masked >= always_masked and dropping >= drops:
            made[kind] = tries(specs, masked=masked, dropping=drops)
    made[_CACHED] = tries(specs, (1, 1), (1, 9), masked=True)
    made[_DOCUMENTS] = tries([spec for spec in specs if spec not in near], documents=True)
    return {kind: calls for kind, calls in made.items() if calls}
