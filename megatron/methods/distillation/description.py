"""Describes the model of `distillation.teacher` without loading it.

Reads the teacher's configuration, and checks that teacher and student share a tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, read_manifest
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.huggingface import HFFolder, find_hf, is_hf, reads_same_tokens
from megatron.checkpointing.layout import is_tag
from megatron.methods.distillation.keys import distillation_keys
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.fp8 import FP8Keys
from megatron.neox_arguments.model_args import MODEL_SECTIONS
from megatron.tokenizer import Tokenizer
from megatron.training.checkpoint.source import CheckpointSource, mask_padding, real_rows

# Model keys that say how to compute the model, and at what length: the teacher takes their values from the
# run, not from its own configuration
_RUN_KEYS = (
    "seq_length", "attention_backend", "mamba_backend", "mamba_chunk_size", "linear_chunk_size", "apex", "compile",
    "padded_vocab_size", "make_vocab_size_divisible_by",
)  # fmt: skip
_KEY = "distillation.teacher"


@dataclass(frozen=True)
class TeacherDescription:
    """The teacher of a run, before it is loaded.

    source: location of its weights.
    keys: the model keys of its own configuration; None stands for a key's default.
    rows: number of vocabulary rows in its softmax; None: all.
    """

    source: CheckpointSource
    keys: Mapping[str, Any]
    rows: int | None

    @property
    def path(self) -> Path:
        """The folder of the teacher's weights."""
        assert self.source.path is not None
        return self.source.path


def describe_teacher(args: ModelArgs, tokenizer: Tokenizer) -> TeacherDescription:
    """Returns the description of the run's teacher.

    Raises ConfigError if the teacher's files cannot be read, or if its tokenizer differs from the student's.
    """
    try:
        return _describe(args, tokenizer)
    except CheckpointError as problem:
        raise args.error(_KEY, str(problem)) from problem


def _describe(args: ModelArgs, tokenizer: Tokenizer) -> TeacherDescription:
    name = distillation_keys(args)["teacher"]
    if is_hf(name):
        path = find_hf(name)
        folder = HFFolder(path)
        source = CheckpointSource(path, False, is_hf=True)
        keys: Mapping[str, Any] = from_hf(folder.config, folder.get)[0]
        is_same_tokenizer, rows = reads_same_tokens(path, tokenizer), real_rows(source, tokenizer.vocab_size)
    else:
        path = Path(name) if is_tag(Path(name).name) else find_checkpoint(name)
        source, manifest = CheckpointSource(path, False), read_manifest(path)
        saved, _ = load_checkpoint_args(path)
        keys, rows = saved.user_values, saved.softmax_rows
        if saved.mask_padded_vocab == "auto":
            rows = real_rows(source, tokenizer.vocab_size)
        is_same_tokenizer = manifest is None or manifest.tokenizer in (None, tokenizer.fingerprint())
    if not is_same_tokenizer:
        raise args.error(
            _KEY,
            f"the teacher {path} has another tokenizer than the student, vocab_file {args.cite('vocab_file')}; "
            "distillation needs the same tokenizer",
        )
    if keys.get("score_head") or keys.get("train_impl") == "rm":
        raise args.error(_KEY, f"{path} is a reward model, which has no next-token distribution; set a language model")
    if keys.get("lora") is not None:
        raise args.error(
            _KEY,
            f"{path} has LoRA adapters; merge them with tools/ckpts/adapter.py merge, and set the merged checkpoint",
        )
    model_keys = [
        key for key, declaration in keys_of(type(args)).items()
        if declaration.owner in MODEL_SECTIONS and declaration.standing.startswith("honoured") and key not in _RUN_KEYS
    ]  # fmt: skip
    return TeacherDescription(source, {key: thaw(keys.get(key)) for key in model_keys}, rows)


def with_common_rows(args: NeoXArgs, teacher: TeacherDescription, real: int | None, tokenizer: Tokenizer) -> NeoXArgs:
    """Returns the student's configuration with the softmax limited to vocabulary rows that both models have.

    real: number of the student's vocabulary rows that stand for tokens, from `real_rows`; None: not known.
    Raises ConfigError if the student's softmax would still have more rows than the teacher's, or too few for
    `top_k`.
    """
    row_counts = [rows for rows in (real, teacher.rows) if rows is not None]
    args = mask_padding(args, min(row_counts, default=None), tokenizer.vocab_size)
    student_rows = args.softmax_rows or args.padded_vocab_size or 0
    if (distillation_keys(args)["top_k"] or 0) >= student_rows:
        raise args.error(
            "distillation.top_k",
            f"must be below the {student_rows} rows of the vocabulary; lower top_k, or remove it to compare all tokens",
        )
    if teacher.rows is not None and student_rows > teacher.rows:
        raise args.error(
            "mask_padded_vocab", f"the student's softmax has {student_rows} vocabulary rows, but the teacher "
            f"{teacher.path} has {teacher.rows}; remove mask_padded_vocab, or set it to {teacher.rows}"
        )  # fmt: skip
    return args


def teacher_args(args: NeoXArgs, teacher: TeacherDescription) -> NeoXArgs:
    """Returns the configuration to run the teacher with: its own model, and the student's layout, precision
    and kernels.

    The student's adapters, `trainable`, FP8 and NEFTune are turned off.
    args: the student's configuration, with `padded_vocab_size` and `softmax_rows` resolved.
    Raises ConfigError if the teacher cannot run in this layout, at this sequence length, or with this split
    of the vocabulary.
    """
    positions = teacher.keys["max_position_embeddings"] - (teacher.keys["opt_pos_emb_offset"] or 0)
    if args.seq_length > positions:
        raise args.error(
            _KEY, f"the teacher {teacher.path} reads at most {positions} tokens, but seq_length is "
            f"{args.cite('seq_length')}; lower seq_length, or set another teacher"
        )  # fmt: skip
    fp8 = {name: None for name, key in keys_of(type(args)).items() if key.owner == FP8Keys.__name__}
    model_values = {**teacher.keys, "mask_padded_vocab": args.softmax_rows or False}
    try:
        return args.replace(
            **fp8, **model_values, distillation=None, lora=None, qat=None, trainable=None, neftune_noise_alpha=None,
            pipeline_layers=None,
        )  # fmt: skip
    except ConfigError as problem:
        raise args.error(
            _KEY, f"the teacher {teacher.path} cannot run with this run's layout and precision: {problem}"
        ) from problem
