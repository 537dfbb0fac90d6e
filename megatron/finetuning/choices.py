"""Chooses how to fine-tune: all weights or adapters, precision, length of rows, batch, steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

from megatron.finetuning.formats import CHATS, JUDGED, PAIRS, TEXTS
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.methods import train_impl_of_rows
from megatron.planning.estimate import Layout, MemoryEstimator
from megatron.planning.size import model_size
from megatron.tokenizer import Tokenizer, with_vocabulary

GIB = 2**30
_RESERVED = 1.5 * GIB  # of a GPU, for what estimates leave out: CUDA itself, gaps, what kernels allocate
_USABLE = 0.85  # share of the memory that an estimate may take
_ALL_ON_CPU = 30e6  # parameters that a CPU trains whole: with adapters, larger models need a third less time
_LONGEST_ROWS = {True: 4096, False: 1024}  # on GPUs, on CPUs
_MOST_ROWS = 32  # of a step
_LEAST_STEPS, _MOST_EPOCHS = 25, 10  # few rows are read several times, so that there are so many steps
_ON_CPUS = ": CPUs are slow; 3 are common"
_COVERED = 0.995  # share of the documents that fit into a row
_STEPS = 20  # of an epoch, if it has that many rows
_LEAST_ROWS = {JUDGED: 4}  # of a step: its KL is estimated from them
_RATES = {  # learning rates: of all weights, of adapters
    CHATS: (2e-5, 2e-4), TEXTS: (2e-5, 2e-4), PAIRS: (1e-6, 1e-5), JUDGED: (1e-6, 1e-5),
}  # fmt: skip
_ADAPTERS = {"r": 16, "alpha": 32, "dropout": 0.05, "target": "all-linear"}
_QUANTIZED = {**_ADAPTERS, "quantization": "nf4", "double_quant": True}


class Documents(NamedTuple):
    """Tokenised documents. lengths: tokens of each; of pairs, of both answers with their prompts."""

    lengths: Sequence[int]

    @property
    def tokens(self) -> int:
        """The tokens of all documents."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Device:
    """The devices of a run: `ranks` of them, each with `memory` free bytes.

    name: for people. is_gpu: not the CPU. has_bf16: it computes fast in bfloat16.
    """

    name: str
    ranks: int
    memory: int
    is_gpu: bool
    has_bf16: bool


@dataclass
class Choices:
    """Keys of the configuration, and a line for each choice that tells its reason."""

    keys: dict[str, Any]
    reasons: list[str] = field(default_factory=list)

    def choose(self, reason: str, **keys: Any) -> None:
        """Sets those keys that are not set yet. The reason is told if there are any."""
        if reason and not keys.keys() <= self.keys.keys():
            self.reasons.append(reason)
        self.keys = with_defaults(self.keys, keys)


class _Candidate(NamedTuple):
    """Keys that decide about the memory. name: what is trained, for people."""

    name: str
    keys: dict[str, Any]


def with_defaults(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys with the defaults that are missing, also within sections such as `optimizer`."""
    result = dict(keys)
    for key, value in defaults.items():
        if key not in result:
            result[key] = value
        elif isinstance(value, Mapping) and isinstance(result[key], Mapping):
            result[key] = with_defaults(result[key], value)
    return result


def choose(
    model: Mapping[str, Any],
    tokenizer: Tokenizer,
    kind: str,
    train: Documents,
    valid: Documents,
    device: Device,
    user_keys: Mapping[str, Any],
) -> Choices:
    """Returns the keys of training. Raises ConfigError if no way to train fits the memory.

    model: keys of the model and the data. kind: of the rows (formats.py). user_keys: keys that are set
        already; they stay.
    """
    choices = Choices(dict(user_keys))
    _choose_rows(choices, kind, train, device, int(model["max_position_embeddings"]))
    _choose_objective(choices, kind)
    _choose_precision(choices, device)
    length = int(choices.keys["seq_length"])
    rows = max(1, math.ceil(sum(min(n, length) for n in train.lengths) / (0.9 * length)))
    args = _choose_what_fits(choices, model, tokenizer, device, max(rows // _STEPS, _LEAST_ROWS.get(kind, 1)))
    has_adapters = choices.keys.get("lora") is not None
    rate = _RATES[kind][has_adapters]
    choices.choose(
        f"learning rate {rate:g}: common for {'adapters' if has_adapters else 'all weights'} (optimizer.params.lr)",
        optimizer={"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.999], "eps": 1e-8}},
    )
    assert args.train_batch_size is not None
    epoch_steps = max(1, rows // args.train_batch_size)
    if "train_iters" not in user_keys:
        common = 3 if device.is_gpu else 1
        epochs = max(common, min(_MOST_EPOCHS, math.ceil(_LEAST_STEPS / epoch_steps)))
        reason = f": few rows, {epoch_steps} steps each" if epochs > common else "" if device.is_gpu else _ON_CPUS
        choices.choose(f"train_epochs: {epochs}{reason}", train_epochs=epochs)
    steps = int(choices.keys.get("train_iters") or epoch_steps * int(choices.keys.get("train_epochs") or 1))
    interval = max(1, steps // 6)
    # override_lr_scheduler: more epochs, written into finetune.yml later, count.
    choices.choose("", lr_decay_style="cosine", override_lr_scheduler=True, weight_decay=0.0, gradient_clipping=1.0)
    if "warmup_iters" not in user_keys:
        choices.choose("", warmup=0.1)
    validated = math.ceil(valid.tokens / (0.9 * length * args.train_batch_size))
    choices.choose("", eval_interval=interval, eval_iters=max(1, min(validated, 50)))
    if choices.keys["eval_iters"]:
        choices.choose("", save_best="validation/lm_loss")
    choices.choose("", checkpoint_factor=interval, keep_last_n_checkpoints=1)
    choices.choose("", log_interval=1 if steps <= 200 else 10)
    return choices


def memory(args: NeoXArgs) -> float:
    """Returns the bytes that a rank needs for a step, as `deepy.py plan --search` estimates them."""
    return sum(MemoryEstimator(args).memory(Layout.configured(args)))


def _choose_rows(choices: Choices, kind: str, train: Documents, device: Device, positions: int) -> None:
    longest = sorted(train.lengths)[math.ceil(_COVERED * len(train.lengths)) - 1]
    length = min(positions, _LONGEST_ROWS[device.is_gpu], max(256, -(-longest // 128) * 128))
    if kind == TEXTS:
        choices.choose(f"seq_length: {length}; texts are joined and cut into rows of it", seq_length=length)
        return
    longer = sum(n > length for n in train.lengths)
    note = f"; longer documents are truncated: {longer} of {len(train.lengths)}" if longer else ""
    choices.choose(
        f"seq_length: {length}, since the longest document has {max(train.lengths)} tokens{note}", seq_length=length
    )


def _choose_objective(choices: Choices, kind: str) -> None:
    method = train_impl_of_rows(kind)
    if method is not None:
        choices.choose(f"train_impl: {method}", train_impl=method)
    else:
        choices.choose("", reset_attention_mask=True, reset_position_ids=True)
    if kind == PAIRS:
        choices.choose("", dataset_impl="pairwise")
    choices.choose("", pack_impl="packed" if kind == TEXTS else "best_fit")


def _choose_precision(choices: Choices, device: Device) -> None:
    if not device.is_gpu:
        choices.choose("precision: fp32, for a CPU", precision="fp32")
    elif device.has_bf16:
        choices.choose("precision: bfloat16", precision="bfloat16")
    else:
        choices.choose(f"precision: fp16, since {device.name} is slow in bfloat16", precision="fp16")


def _choose_what_fits(
    choices: Choices, model: Mapping[str, Any], tokenizer: Tokenizer, device: Device, rows: int
) -> NeoXArgs:
    """Chooses what is trained, the batch and recomputation: the first candidate whose step fits the memory.

    rows: of a step, about. Returns the configuration as far as it is chosen.
    """
    budget = _USABLE * device.memory - (_RESERVED if device.is_gpu else 0)
    needed_bytes = []
    batch = min(_MOST_ROWS, 2 ** int(math.log2(rows)))
    per_rank = max(1, batch // device.ranks)
    for name, keys in _candidates(choices.keys, device, per_rank, _trains_adapters(choices, model, tokenizer, device)):
        args = _args(with_defaults({**model, **choices.keys}, keys), tokenizer, device.ranks)
        needed_bytes.append(memory(args))
        if needed_bytes[-1] <= budget:
            share = f"about {needed_bytes[-1] / GIB:.1f} of {device.memory / GIB:.1f} GiB on {device.name}"
            choices.choose("", **keys)
            choices.reasons.append(f"trained: {name}; {share}")
            choices.reasons.append(
                f"rows of a step: {args.train_batch_size} (train_micro_batch_size_per_gpu "
                f"{args.train_micro_batch_size_per_gpu}, gradient_accumulation_steps "
                f"{args.gradient_accumulation_steps}, ranks {device.ranks})"
            )
            return args
    raise ConfigError([
        f"nothing fits {device.memory / GIB:.1f} GiB on {device.name}; the smallest way needs about "
        f"{min(needed_bytes) / GIB:.1f} GiB; use more or larger GPUs, or a smaller model"
    ])  # fmt: skip


def _trains_adapters(choices: Choices, model: Mapping[str, Any], tokenizer: Tokenizer, device: Device) -> bool:
    """Returns whether all weights are too many for a CPU."""
    return not device.is_gpu and _parameters(model, choices.keys, tokenizer, device) > _ALL_ON_CPU


def _candidates(keys: Mapping[str, Any], device: Device, per_rank: int, only_adapters: bool) -> Iterator[_Candidate]:
    """Yields candidates, the best first.

    per_rank: rows of a step on each rank, in powers of two. only_adapters: not all weights are trained.
    """
    for name, lora in _ways(keys, device, only_adapters):
        # With adapters, stages 1 and 2 save nothing. Quantised weights are not sharded.
        small, large = (0, 3) if lora.get("lora") else (1, 3)
        is_quantised = (lora.get("lora") or {}).get("quantization") is not None
        for stage in [0] if device.ranks == 1 or is_quantised else [small, large]:
            for rows, recomputes in ((8, False), (4, False), (2, False), (1, False), (4, True), (1, True)):
                if rows <= per_rank:
                    yield _Candidate(name, {
                        **lora, "zero_optimization": {"stage": stage}, "checkpoint_activations": recomputes,
                        **_batch(keys, rows, per_rank),
                    })  # fmt: skip


def _ways(keys: Mapping[str, Any], device: Device, only_adapters: bool) -> list[_Candidate]:
    """Returns ways to train, the best first: all weights, adapters, adapters on quantised weights."""
    section = keys.get("lora")
    if "lora" in keys and section is None or "trainable" in keys:
        return [_Candidate("what --set says", {})]
    full = [] if only_adapters or section is not None else [_Candidate("all weights", {"lora": None})]
    loras = {"adapters (lora)": _ADAPTERS}
    if device.is_gpu and find_spec("bitsandbytes") is not None:
        loras["adapters on weights in 4 bits (lora)"] = _QUANTIZED
    if section is not None and "quantization" in section:
        loras = {"adapters (lora)": _ADAPTERS}
    return [*full, *(_Candidate(name, {"lora": with_defaults(section or {}, lora)}) for name, lora in loras.items())]


def _batch(keys: Mapping[str, Any], rows: int, per_rank: int) -> dict[str, int]:
    """Returns keys of the batch, beside those that are set."""
    rows = int(keys.get("train_micro_batch_size_per_gpu", rows))
    if "train_batch_size" in keys or "gradient_accumulation_steps" in keys:
        return {"train_micro_batch_size_per_gpu": rows}
    return {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": max(1, per_rank // rows)}


def _parameters(model: Mapping[str, Any], keys: Mapping[str, Any], tokenizer: Tokenizer, device: Device) -> int:
    batch = {} if "train_batch_size" in keys else {"train_micro_batch_size_per_gpu": 1}
    return model_size(_args(with_defaults({**model, **keys}, batch), tokenizer, device.ranks)).total


def _args(keys: Mapping[str, Any], tokenizer: Tokenizer, ranks: int) -> NeoXArgs:
    return with_vocabulary(load([], keys, origin="finetune"), tokenizer).for_world(ranks)
