"""Choosing, once at start, which attention backend runs which kind of call."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model.attention.backends import AttentionBackend, AttentionCall, AttentionOptions
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.specs import AttentionSpec
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.attention import ATTENTION_BACKENDS
from megatron.neox_arguments.values.losses import least_prefix_saving

# (masked, dropping) -> the words for such calls in the table that is printed at start.
_DENSE = {
    (False, False): "plain",
    (True, False): "with a mask",
    (False, True): "with dropout",
    (True, True): "with a mask and dropout",
}
_PLAIN = _DENSE[False, False]
_CACHED, _WINDOWED, _DOCUMENTS, _SHARED = "from a cache", "in windows", "over documents", "with shared prompts"


@dataclass(frozen=True)
class AttentionBackends:
    """The attention backend that was chosen for each kind of call of some layers.

    Calls with a single key, which cuDNN does not take, count as from a cache.
    seq_length: number of queries of a row in training. other_lengths: for kinds of calls whose backend plans
    anew for every shape, the one that other numbers of queries run on. passed_over: for each kind of call why
    backends that rank before the chosen one were not taken.
    """

    by_kind: Mapping[str, AttentionBackend]
    seq_length: int = 0
    other_lengths: Mapping[str, AttentionBackend] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The usual backend, then the kinds of calls that run on another."""
        names = [(kind, backend.name) for kind, backend in self.by_kind.items() if kind != _DOCUMENTS]
        first = names[0][1]
        others = ", ".join(dict.fromkeys(backend.name for backend in self.other_lengths.values()))
        at_others = [f"at other lengths than {self.seq_length} {others}"] if others else []
        return ", ".join([first, *(f"{kind} {name}" for kind, name in names if name != first), *at_others])

    def table(self) -> str:
        """What is printed at start, a line for each kind of calls: its backend, and why those that rank
        before it do not run it; one name where there is no more to say."""
        if len({backend.name for backend in (*self.by_kind.values(), *self.other_lengths.values())}) == 1:
            return next(iter(self.by_kind.values())).name
        rows = []
        for kind, backend in self.by_kind.items():
            other = self.other_lengths.get(kind, backend)
            also = "" if other == backend else f", at other lengths than {self.seq_length} {other.name}"
            rows.append((kind, backend.name + also, self.passed_over.get(kind, "")))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = (f"  {kind:<{widths[0]}}  {name:<{widths[1]}}  {why}".rstrip() for kind, name, why in rows)
        return "\n".join(["(kind of call, backend, why not one before it)", *lines])

    def form(self, batch: Batch, window: int | None) -> str | None:
        """What `AttentionInputs` are to hold for texts from their beginning in layers with this window: a
        backend's `form`; None: a mask, or nothing where attention is plainly causal."""
        kind = _PLAIN if batch.cu_seqlens is None else _DOCUMENTS
        kind = kind if window is None else _WINDOWED
        kind = kind if batch.prefixes is None or _SHARED not in self.by_kind else _SHARED
        if kind not in self.by_kind:
            return None
        form = self._backend(kind, batch.tokens.shape[1]).form
        return None if kind == _PLAIN and form == "cu_seqlens" else form

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        """Attention by the backend that was chosen for such calls; new keys and values are first put into the
        cache.

        Arguments and result are those of `AttentionBackend.run`.
        """
        if options.cache is not None:
            options.cache.put(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
        if inputs.blocks is not None:
            backend = next(backend for backend in self.by_kind.values() if backend.form == "blocks")
            return backend.run(q, k, v, inputs, options)
        if inputs.cu_seqlens is not None:
            kind = _DOCUMENTS if inputs.window < 0 else _WINDOWED
        elif k.shape[0] == 1 or inputs.columns is not None:
            kind = _CACHED
        else:
            kind = _DENSE[inputs.mask is not None, options.dropout_p > 0.0]
        backend = self._backend(kind, q.shape[0])
        if inputs.written_out is None or inputs.own is None:
            return backend.run(q, k, v, inputs, options)
        # Documents are written out for the kernel alone: all else is computed once for the prefix that they
        # share.
        shape = q.transpose(0, 1).shape
        q, k, v = (_flat(x).index_select(0, inputs.written_out).unsqueeze(1) for x in (q, k, v))
        out = backend.run(q, k, v, inputs, options)
        return _flat(out).index_select(0, inputs.own).view(shape).transpose(0, 1)

    def _backend(self, kind: str, queries: int) -> AttentionBackend:
        backend = self.by_kind[kind]
        return backend if queries == self.seq_length else self.other_lengths.get(kind, backend)


def _flat(x: Tensor) -> Tensor:
    """The tokens of all rows one after another: `[seq, batch, heads, head_dim]` to `[batch * seq, heads,
    head_dim]`."""
    return x.transpose(0, 1).flatten(0, 1)


def choose_backends(
    args: NeoXArgs,
    device: torch.device,
    specs: Sequence[AttentionSpec],
    log: Callable[[str], None] | None = None,
    capability: tuple[int, int] | None = None,
) -> dict[str, AttentionBackends]:
    """Choose the backends of all layers, by `AttentionSpec.backend`; each is tried with one tiny call of each
    kind.

    `auto` takes the first of `ATTENTION_BACKENDS` that works and is not `unasked` there: cuDNN on Hopper, for
    rows of seq_length (it plans anew, for long, for every shape, as generation and scoring have them), flash
    on other GPUs and for other lengths; torch's varlen, else FlexAttention, for documents and windows;
    FlexAttention for shared prompts. What has run on no such GPU (`not_run_on`) it leaves out. A named one is
    used for all of training, and where it takes no mask, the first that does for packed documents and
    generation. One that `attention_config` names for some layers is used where it can do the run, else
    `attention_backend`. Documents, shared prompts, and layers with a window run under a mask where none takes
    them without: biases need one, and `math`. On a CPU only one that is asked for takes them.
    capability: compute capability of the GPU; None: it is asked for. It has no meaning on a CPU.
    Raises ConfigError for a named one that is not installed, or does not work on this device or for this run.
    """
    if device.type != "cuda":
        capability = None
    elif capability is None:
        capability = torch.cuda.get_device_capability(device)
    names = {args.attention_backend, *(spec.backend for spec in specs)}
    backends = [b for b in _backends() if b.name in names or not b.by_name_only]
    here = [b for b in backends if (device.type == "cuda" or not b.needs_gpu) and b.missing() is None]
    by_name = {}
    for asked in dict.fromkeys(spec.backend for spec in specs):
        key = "attention_backend" if asked == args.attention_backend else "attention_config"
        place, fix = f"{args.origin(key)}: {key}: {asked}", "set attention_backend: auto"
        named = [backend for backend in here if backend.name == asked]
        if asked != "auto" and not named:
            of_name = [backend for backend in backends if backend.name == asked]
            absent = next(filter(None, (backend.missing() for backend in of_name)), None)
            needed = "a GPU" if absent is None or (device.type == "cpu" and of_name[0].needs_gpu) else absent
            raise ConfigError([f"{place} needs {needed}; or {fix}"])
        asked_for = [*named, *(b for b in here if b.name == args.attention_backend)]
        chosen: dict[str, AttentionBackend] = {}
        other_lengths, passed_over = dict[str, AttentionBackend](), dict[str, str]()
        calls = _calls(args, device, list(dict.fromkeys(spec for spec in specs if spec.backend == asked)))
        for kind, tries in calls.items():
            # On a GPU no mask for documents, but for the plain mathematics, which others are compared with.
            maskless = tries[0].documents or tries[0].contexts
            only_named = asked != "auto" and maskless and (device.type == "cpu" or asked == "math")
            ranked = [b for b in (named if only_named else [*asked_for, *here]) if b.handles(tries[0])]
            problems = _Problems(tries, asked_for, capability)
            backend = next((b for b in ranked if problems[b] is None), None)
            trained = kind in _DENSE.values() and tries[0].masked == (_PLAIN not in calls)
            named_runs = asked == "auto" or backend in named or _WINDOWED in chosen
            if trained and key == "attention_backend" and not named_runs:
                raise ConfigError([f"{place} cannot do this run ({problems[named[-1]]}); {fix}"])
            if backend is None:
                continue
            chosen[kind], passed_over[kind] = backend, problems.words(backend)
            # Generation turns compilers off, without which FlexAttention keeps all scores.
            if backend.plans_shapes and (backend not in named or backend.form == "blocks"):
                other_lengths[kind] = next((b for b in ranked if not b.plans_shapes and problems[b] is None), backend)
        by_name[asked] = AttentionBackends(chosen, args.seq_length, other_lengths, passed_over)
        text = by_name[asked].table()
        if log is not None and text != asked:
            log(f"{key}: {asked} chose {text}")
    return by_name


class _Problems(dict[AttentionBackend, str | None]):
    """Why backends cannot run some calls, or are not to without being named; None where one can. Each is
    tried when it is first looked up."""

    def __init__(
        self, calls: Sequence[AttentionCall], asked_for: Sequence[AttentionBackend], capability: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.calls, self.asked_for, self.capability = calls, asked_for, capability

    def __missing__(self, backend: AttentionBackend) -> str | None:
        unasked = None if backend in self.asked_for else backend.unasked(self.calls[0], self.capability)
        found = (problem for problem in map(backend.supports, self.calls) if problem is not None)
        self[backend] = next(found, None) if unasked is None else unasked
        return self[backend]

    def words(self, chosen: AttentionBackend) -> str:
        """What is known of those that were looked at before the chosen one."""
        problems: dict[str, str] = {}
        for backend, problem in self.items():
            if problem:
                problems.setdefault(backend.name, problem)
        return "; ".join(f"{name}: {problem}" for name, problem in problems.items() if name != chosen.name)


def _backends() -> list[AttentionBackend]:
    places = [(name, *place.split(".")) for name, place in ATTENTION_BACKENDS]
    return [getattr(import_module(f"megatron.model.attention.{file}"), cls)(name) for name, file, cls in places]


def _calls(args: NeoXArgs, device: torch.device, specs: Sequence[AttentionSpec]) -> dict[str, list[AttentionCall]]:
    """The kinds of calls that layers with these specs make; for each the tiny calls to try a backend with."""
    seq, dtype, compiled = min(args.seq_length, 256), DTYPES[args.params_dtype], args.compile not in (False, "auto")
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
    if least_prefix_saving(args) is not None:
        made[_SHARED] = tries(specs, contexts=True)
    return {kind: calls for kind, calls in made.items() if calls}
