"""Which model `distillation.teacher` names: its configuration in this run's layout, and whether the two
models' vocabularies are one. Nothing is loaded yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, read_manifest
from megatron.checkpointing.families import from_hf
from megatron.checkpointing.huggingface import HFFolder, find_hf, is_hf, reads_same_tokens
from megatron.checkpointing.layout import is_tag
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.architectures import (
    MambaKeys,
    MoEKeys,
    MuPKeys,
    OtherArchitectureKeys,
    TransformerEngineKeys,
)
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.fp8 import FP8Keys
from megatron.neox_arguments.keys.model import ModelKeys
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.source import CheckpointSource, mask_padding, real_rows

_OWNERS = tuple(
    c.__name__ for c in (ModelKeys, TransformerEngineKeys, MoEKeys, MambaKeys, OtherArchitectureKeys, MuPKeys)
)
# Of the model's keys those that say how and of what length it is computed here, which are the run's
_OF_RUN = (
    "seq_length", "attention_backend", "mamba_backend", "mamba_chunk_size", "apex", "compile", "padded_vocab_size",
    "make_vocab_size_divisible_by",
)  # fmt: skip
_KEY = "distillation.teacher"


@dataclass(frozen=True)
class TeacherDescription:
    """source: where its weights are. keys: of its model, as its own configuration has them; None: the
    default. rows: of its vocabulary that take part in its softmax; None: all."""

    source: CheckpointSource
    keys: Mapping[str, Any]
    rows: int | None

    @property
    def path(self) -> Path:
        """The folder of its weights."""
        assert self.source.path is not None
        return self.source.path


def describe_teacher(args: NeoXArgs, tokenizer: Tokenizer) -> TeacherDescription:
    """The teacher of a run. Raises ConfigError where its files cannot be read, and for one that reads text
    otherwise than the student."""
    try:
        return _describe(args, tokenizer)
    except CheckpointError as problem:
        raise args.error(_KEY, str(problem)) from problem


def _describe(args: NeoXArgs, tokenizer: Tokenizer) -> TeacherDescription:
    assert args.distillation is not None
    name = args.distillation["teacher"]
    if is_hf(name):
        path = find_hf(name)
        folder = HFFolder(path)
        source = CheckpointSource(path, False, is_hf=True)
        keys: Mapping[str, Any] = from_hf(folder.config, folder.get)[0]
        same, rows = reads_same_tokens(path, tokenizer), real_rows(source, tokenizer.vocab_size)
    else:
        path = Path(name) if is_tag(Path(name).name) else find_checkpoint(name)
        source, manifest = CheckpointSource(path, False), read_manifest(path)
        saved, _ = load_checkpoint_args(path)
        keys, rows = saved.user_values, saved.softmax_rows
        if saved.mask_padded_vocab == "auto":
            rows = real_rows(source, tokenizer.vocab_size)
        same = manifest is None or manifest.tokenizer in (None, tokenizer.fingerprint())
    if not same:
        raise args.error(_KEY, f"{path} was trained with another tokenizer than vocab_file {args.cite('vocab_file')}")
    if keys.get("score_head") or keys.get("train_impl") == "rm":
        raise args.error(_KEY, f"{path} is a reward model, which gives scores and no text")
    if keys.get("lora") is not None:
        raise args.error(_KEY, f"{path} has adapters (lora); merge them into its weights, and name that checkpoint")
    own = [
        key for key, about in keys_of(type(args)).items()
        if about.owner in _OWNERS and about.standing.startswith("honoured") and key not in _OF_RUN
    ]  # fmt: skip
    return TeacherDescription(source, {key: thaw(keys.get(key)) for key in own}, rows)


def with_common_rows(args: NeoXArgs, teacher: TeacherDescription, real: int | None, tokenizer: Tokenizer) -> NeoXArgs:
    """`mask_padding` such that both models' softmax has the same rows. real: of `real_rows` of the student.

    Raises ConfigError where the student's would have more than the teacher knows.
    """
    both = [rows for rows in (real, teacher.rows) if rows is not None]
    args = mask_padding(args, min(both, default=None), tokenizer.vocab_size)
    own = args.softmax_rows or args.padded_vocab_size or 0
    assert args.distillation is not None
    if (args.distillation["top_k"] or 0) >= own:
        raise args.error("distillation.top_k", f"all {own} rows of the vocabulary would be among them; leave it out")
    if teacher.rows is not None and own > teacher.rows:
        raise args.error(
            "mask_padded_vocab", f"{own} rows take part in the softmax, but {teacher.path} knows {teacher.rows}; "
            "remove it, or write that"
        )  # fmt: skip
    return args


def teacher_args(args: NeoXArgs, teacher: TeacherDescription) -> NeoXArgs:
    """The teacher's configuration in this run: its model, and all else as the student's. args: the student's,
    with `padded_vocab_size` and `softmax_rows` known.

    Raises ConfigError for a teacher that cannot run in this layout or at this length, or whose rows of
    vocabulary are cut otherwise.
    """
    positions = teacher.keys["max_position_embeddings"] - (teacher.keys["opt_pos_emb_offset"] or 0)
    if args.seq_length > positions:
        raise args.error(
            _KEY, f"{teacher.path} reads {positions} tokens, but seq_length is {args.cite('seq_length')}; lower that"
        )  # fmt: skip
    fp8 = {name: None for name, key in keys_of(type(args)).items() if key.owner == FP8Keys.__name__}
    theirs = {**teacher.keys, "mask_padded_vocab": args.softmax_rows or False}
    try:
        return args.replace(**fp8, **theirs, distillation=None, lora=None, trainable=None, neftune_noise_alpha=None)
    except ConfigError as problem:
        raise args.error(_KEY, f"{teacher.path} cannot run beside this model: {problem}") from problem
