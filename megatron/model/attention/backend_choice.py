"""Chooses, once at start, the attention backend for each kind of attention call, such as with a mask or from
a cache."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.data.context_parts import ContextLayout
from megatron.model.attention.backends import AttentionBackend, AttentionCall, AttentionOptions, rows_in_one
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.specs import AttentionSpec
from megatron.mpu import DTYPES
from megatron.mpu.gpu_kernels import capability_of
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.attention import ATTENTION_BACKENDS
from megatron.neox_arguments.values.losses import least_prefix_saving

# (masked, dropping) -> the name of this kind of call in the table that is printed at start.
_DENSE = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_CAUSAL = _DENSE[False, False]
_CACHED, _WINDOWED, _DOCUMENTS, _SHARED = "from a cache", "in windows", "over documents", "with shared prompts"


@dataclass(frozen=True)
class AttentionBackends:
    """The attention backend chosen for each kind of call, for all layers with the same
    `AttentionSpec.backend`.

    Calls with a single key, which cuDNN does not support, count as calls from a cache.

    backend_by_kind: the backend of each kind of call, such as "plain" or "over documents".
    seq_length: number of queries of a row in training.
    other_lengths: the backend for rows of other lengths; only for kinds whose backend is slow at each new
        shape.
    passed_over: for each kind, why backends that rank before the chosen one were not chosen.
    """

    backend_by_kind: Mapping[str, AttentionBackend]
    seq_length: int = 0
    other_lengths: Mapping[str, AttentionBackend] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The backend of most calls, then the kinds of calls that run on another backend, as one line for
        logs.

        Example: "cudnn, from a cache flash".
        """
        names = [(kind, backend.name) for kind, backend in self.backend_by_kind.items() if kind != _DOCUMENTS]
        usual = names[0][1]
        other_names = ", ".join(dict.fromkeys(backend.name for backend in self.other_lengths.values()))
        at_others = [f"at other lengths than {self.seq_length} {other_names}"] if other_names else []
        return ", ".join([usual, *(f"{kind} {name}" for kind, name in names if name != usual), *at_others])

    def table(self) -> str:
        """Returns the table printed at start: each kind of call, its backend, and why higher-ranked backends
        were not chosen.

        If one backend runs all kinds, returns only its name.
        """
        if len({backend.name for backend in (*self.backend_by_kind.values(), *self.other_lengths.values())}) == 1:
            return next(iter(self.backend_by_kind.values())).name
        rows = []
        for kind, backend in self.backend_by_kind.items():
            other_backend = self.other_lengths.get(kind, backend)
            suffix = (
                "" if other_backend == backend else f", at other lengths than {self.seq_length} {other_backend.name}"
            )
            rows.append((kind, backend.name + suffix, self.passed_over.get(kind, "")))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = (f"  {kind:<{widths[0]}}  {name:<{widths[1]}}  {reason}".rstrip() for kind, name, reason in rows)
        return "\n".join(["(kind of call, chosen backend, why higher-ranked backends were not chosen)", *lines])

    def form(self, batch: Batch, window: int | None) -> str | None:
        """Returns which field of `AttentionInputs` tells the backend the visible keys of full texts:
        cu_seqlens or blocks.

        Returns None if it is the mask, or if attention is only causal and needs no field.

        window: of the layers for which the batch is prepared; None: no window.
        """
        keys = None if batch.context is None else batch.context.keys
        # The queries of a context rank that gathers keys are runs within texts, as documents are.
        kind = _CAUSAL if batch.documents is None and keys is None else _DOCUMENTS
        kind = kind if window is None else _WINDOWED
        shares_prefixes = batch.documents is not None and batch.documents.prefixes is not None
        if shares_prefixes and _SHARED in self.backend_by_kind:
            kind = _SHARED
        if kind not in self.backend_by_kind:
            return None
        backend = self._backend(kind, batch.tokens.shape[1] if keys is None else len(keys.queries))
        is_maskless = kind != _CAUSAL if keys is None else backend.takes_runs and not shares_prefixes
        return None if backend.form == "cu_seqlens" and not is_maskless else backend.form

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        """Computes attention with the backend chosen for this kind of call.

        New keys and values are first written to the cache, if there is one. Arguments and result are as in
        `AttentionBackend.run`.
        """
        if options.cache is not None:
            options.cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        if inputs.blocks is not None:
            backend = next(backend for backend in self.backend_by_kind.values() if backend.form == "blocks")
            return backend.attend(q, k, v, inputs, options)
        if inputs.cu_seqlens is not None:
            kind = _DOCUMENTS if inputs.window < 0 else _WINDOWED
        elif k.shape[0] == 1 or inputs.columns is not None:
            kind = _CACHED
        else:
            kind = _DENSE[inputs.mask is not None, options.dropout_p > 0.0]
        backend = self._backend(kind, q.shape[0])
        if inputs.written_out is None or inputs.own_places is None:
            return backend.attend(q, k, v, inputs, options)
        # Shared prefixes are repeated for the kernel only; everything else is computed once per shared
        # prefix.
        rows = q.transpose(0, 1).shape[:2]
        q, k, v = (rows_in_one(x).index_select(0, inputs.written_out).unsqueeze(1) for x in (q, k, v))
        out = backend.attend(q, k, v, inputs, options)
        return rows_in_one(out).index_select(0, inputs.own_places).unflatten(0, rows).transpose(0, 1)

    def _backend(self, kind: str, queries: int) -> AttentionBackend:
        backend = self.backend_by_kind[kind]
        return backend if queries == self.seq_length else self.other_lengths.get(kind, backend)


def choose_backends(
    args: NeoXArgs,
    device: torch.device,
    specs: Sequence[AttentionSpec],
    log: Callable[[str], None] | None = None,
    capability: tuple[int, int] | None = None,
) -> dict[str, AttentionBackends]:
    """Chooses the backend for each kind of call, by trying candidates with tiny calls. Returns them by
    `AttentionSpec.backend`.

    `auto` takes the first of `ATTENTION_BACKENDS` that works and for which `unasked` returns None:
    - rows of seq_length on Hopper: cuDNN (it plans anew for every shape, which generation and scoring would
    wait for);
    - other GPUs and other lengths: flash;
    - documents and windows: torch's varlen, else FlexAttention;
    - shared prompts: FlexAttention.
    It leaves out backends that have not been tested on such a GPU (`not_run_on`).

    A backend that the user names must support the training calls that need no documents or windows; otherwise
    ConfigError is raised. Calls that it does not support, such as packed documents or generation with a mask,
    use the first backend that supports them. A backend that `attention_config` names for some layers is used
    for the calls it supports, `attention_backend` for the others.

    Documents, shared prompts and windows run with a mask if no backend supports them without one. Position
    biases and `math` always need a mask. If a backend is named on a CPU, only it is tried without a mask.

    log: gets a line or table with the choices.
    capability: compute capability of the GPU; None: read from the device. Ignored on a CPU.
    Raises ConfigError if a named backend is not installed, or does not work on this device or for this run.
    """
    capability = None if device.type != "cuda" else capability or capability_of(device)
    names = {args.attention_backend, *(spec.backend for spec in specs)}
    backends = [b for b in _backends() if b.name in names or not b.opt_in]
    usable = [b for b in backends if (device.type == "cuda" or not b.needs_gpu) and b.missing() is None]
    backends_by_name = {}
    for requested in dict.fromkeys(spec.backend for spec in specs):
        key = "attention_backend" if requested == args.attention_backend else "attention_config"
        place, fix = f"{args.origin(key)}: {key}: {requested}", "set attention_backend: auto"
        requested_backends = [backend for backend in usable if backend.name == requested]
        if requested != "auto" and not requested_backends:
            unusable = [backend for backend in backends if backend.name == requested]
            absent = next(filter(None, (backend.missing() for backend in unusable)), None)
            requirement = "a GPU" if absent is None or (device.type == "cpu" and unusable[0].needs_gpu) else absent
            raise ConfigError([f"{place} needs {requirement}; or {fix}"])
        asked_for = [*requested_backends, *(b for b in usable if b.name == args.attention_backend)]
        chosen: dict[str, AttentionBackend] = {}
        other_lengths, passed_over = dict[str, AttentionBackend](), dict[str, str]()
        calls = _calls(args, device, list(dict.fromkeys(spec for spec in specs if spec.backend == requested)))
        for kind, tries in calls.items():
            # On a GPU documents run without a mask, except with `math`, with which other backends are
            # compared.
            maskless = tries[0].documents or tries[0].contexts
            only_named = requested != "auto" and maskless and (device.type == "cpu" or requested == "math")
            ranked = [b for b in (requested_backends if only_named else [*asked_for, *usable]) if b.handles(tries[0])]
            problems = _Problems(tries, asked_for, capability)
            backend = next((b for b in ranked if problems[b] is None), None)
            trained = kind in _DENSE.values() and tries[0].masked == (_CAUSAL not in calls)
            named_runs = requested == "auto" or backend in requested_backends or _WINDOWED in chosen
            if trained and key == "attention_backend" and not named_runs:
                raise ConfigError([f"{place} does not support this run ({problems[requested_backends[-1]]}); {fix}"])
            if backend is None:
                continue
            chosen[kind], passed_over[kind] = backend, problems.words(backend)
            # Generation runs uncompiled. FlexAttention would then hold all attention scores in memory.
            if backend.plans_shapes and (backend not in requested_backends or backend.form == "blocks"):
                other_lengths[kind] = next((b for b in ranked if not b.plans_shapes and problems[b] is None), backend)
        queries = ContextLayout.from_args(args).num_queries(args.seq_length)
        backends_by_name[requested] = AttentionBackends(chosen, queries, other_lengths, passed_over)
        text = backends_by_name[requested].table()
        if log is not None and text != requested:
            log(f"{key}: {requested} chose {text}")
    return backends_by_name


class _Problems(dict[AttentionBackend, str | None]):
    """Maps each backend to the reason why it cannot run some calls, or why `auto` should not choose it.

    The value is None if the backend can run the calls. A backend is tried when it is first looked up.
    """

    def __init__(
        self, calls: Sequence[AttentionCall], asked_for: Sequence[AttentionBackend], capability: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.calls, self.asked_for, self.capability = calls, asked_for, capability

    def __missing__(self, backend: AttentionBackend) -> str | None:
        unasked = None if backend in self.asked_for else backend.unasked(self.calls[0], self.capability)
        problems = (problem for problem in map(backend.supports, self.calls) if problem is not None)
        self[backend] = next(problems, None) if unasked is None else unasked
        return self[backend]

    def words(self, chosen: AttentionBackend) -> str:
        """Returns the problems of all backends that were tried, except of `chosen`, such as "cudnn: it
        supports ...; flex: ..."."""
        problems: dict[str, str] = {}
        for backend, problem in self.items():
            if problem:
                problems.setdefault(backend.name, problem)
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items() if name != chosen.name)


def _backends() -> list[AttentionBackend]:
    places = [(name, *place.split(".")) for name, place in ATTENTION_BACKENDS]
    return [getattr(import_module(f"megatron.model.attention.{file}"), cls)(name) for name, file, cls in places]


def _calls(args: NeoXArgs, device: torch.device, specs: Sequence[AttentionSpec]) -> dict[str, list[AttentionCall]]:
    """Returns the kinds of calls that layers with these specs make, each with the tiny calls that try a
    backend."""
    seq, dtype, compiled = min(args.seq_length, 256), DTYPES[args.params_dtype], args.compile not in (False, "auto")
    windowed = [spec for spec in specs if spec.window is not None]
    always_masked, dropping = specs[0].biased or len(windowed) == len(specs), specs[0].dropout > 0.0

    def tries(specs: Iterable[AttentionSpec], *lengths: tuple[int, int], **holds: bool) -> list[AttentionCall]:
        lengths = lengths or ((seq, seq),)
        return [AttentionCall(spec, device, dtype, *n, compiled=compiled, **holds) for spec in specs for n in lengths]

    calls_by_kind = {_WINDOWED: tries(windowed, documents=True)}
    for (masked, drops), kind in _DENSE.items():
        if masked >= always_masked and dropping >= drops:
            calls_by_kind[kind] = tries(specs, masked=masked, dropping=drops)
    calls_by_kind[_CACHED] = tries([spec.cached for spec in specs], (1, 1), (1, 9), masked=True)
    calls_by_kind[_DOCUMENTS] = tries([spec for spec in specs if spec not in windowed], documents=True)
    if least_prefix_saving(args) is not None:
        calls_by_kind[_SHARED] = tries(specs, contexts=True)
    return {kind: calls for kind, calls in calls_by_kind.items() if calls}
