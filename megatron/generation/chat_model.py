"""Loads a model and its chat template by name, in one process.

The name is a HuggingFace folder, a name on the Hub, an adapter's folder or a folder of checkpoints.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpointing import CheckpointError, find_checkpoint
from megatron.checkpointing.adapters import PeftFolder, is_peft
from megatron.checkpointing.huggingface import HF_SUBFOLDER, find_hf, is_hf
from megatron.checkpointing.layout import LATEST, is_tag, step_of
from megatron.checkpointing.saved_config import checkpoint_args
from megatron.distributed import Process
from megatron.generation.complete import Completion, complete
from megatron.generation.from_huggingface import hf_model_keys, tokenizer_keys
from megatron.generation.model import Model, load_model
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.generation.prompts.questions import Question, all_tokens
from megatron.generation.sampling import SamplingParams
from megatron.mpu import init_model_parallel, mix_seed
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.tokenizer import build_tokenizer

_TOKENIZERS_FROM_FILES = ("HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer")


@dataclass(frozen=True)
class ChatModel:
    """A model with the chat template that renders its prompts. name: the model's name, as the user wrote
    it."""

    name: str
    model: Model
    template: ChatTemplate

    def answer(
        self, questions: Sequence[Question], sampling: SamplingParams, maximum_tokens: int, seed: int
    ) -> list[Completion]:
        """Returns an answer to each question, in order.

        An answer depends only on its question, the question's index and `seed`. Raises RequestError for a
        question that is too long or that the chat template rejects.

        maximum_tokens: most tokens of an answer.
        """
        max_prompt_tokens = self.model.positions - maximum_tokens
        return complete(
            self.model,
            all_tokens(questions, self.model.tokenizer, self.template, max_prompt_tokens),
            sampling,
            maximum_tokens=maximum_tokens,
            seeds=[mix_seed(seed, "sample", i) for i in range(len(questions))],
            stop_token_ids=(*self.model.stop_token_ids, *self.template.stop_token_ids),
        )


def chat_model_args(name: str, iteration: int | None = None) -> NeoXArgs:
    """Returns the configuration of the model `name`, for one tensor rank and one pipeline stage.

    For a checkpoint it is the configuration saved in the checkpoint. If `vocab_file` no longer exists, the
    tokenizer saved in the checkpoint is used. Raises ConfigError, CheckpointError.

    name: a HuggingFace folder, ORG/NAME on the Hub, an adapter's folder in peft's format, or a folder of
        checkpoints or of a single one (`global_stepN`).
    iteration: the checkpoint to take from a folder of checkpoints; None: the latest.
    """
    path = Path(name)
    if is_peft(path):
        return _peft_args(path, iteration)
    if path.is_dir() and not is_hf(path):
        return _checkpoint_args(path, iteration)
    if iteration is not None:
        raise CheckpointError(
            f"{name}: is no folder of checkpoints; correct the path, or leave out --iteration for a HuggingFace model"
        )
    find_hf(name)
    return load([], hf_model_keys(name), origin="--model")


def _checkpoint_args(path: Path, iteration: int | None) -> NeoXArgs:
    if is_tag(path.name) and not (path / LATEST).exists():
        path, iteration = path.parent, step_of(path)
    checkpoint = find_checkpoint(path, iteration)
    args = checkpoint_args(checkpoint)
    tokenizer: dict[str, str] = {}
    if args.tokenizer_type in _TOKENIZERS_FROM_FILES and not (args.vocab_file and Path(args.vocab_file).exists()):
        tokenizer = tokenizer_keys(checkpoint / ("tokenizer" if (checkpoint / "tokenizer").is_dir() else HF_SUBFOLDER))
    return args.replace(
        **tokenizer, load=str(path), iteration=step_of(checkpoint),
        model_parallel_size=1, pipe_parallel_size=1, context_parallel_size=1, expert_parallel_size=1,
        sequence_parallel=False, train_batch_size=None, train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=None, distributed_backend="auto",
    )  # fmt: skip


def with_options(args: NeoXArgs, adapter: Sequence[str], precision: str | None) -> NeoXArgs:
    """Returns the configuration with more adapters and another precision.

    Raises CheckpointError if adapters are to be added to a checkpoint that already holds adapters.

    adapter: paths to append to the configuration key `adapter`. precision: None: the configuration's own.
    """
    if adapter and args.lora is not None:
        raise CheckpointError(
            f"{args.load}: this checkpoint holds adapters itself; name its base model instead, and every adapter by "
            "--adapter"
        )
    if adapter:
        args = args.replace(adapter=[*args.adapter, *adapter])
    return args if precision is None else args.replace(precision=precision, fp16=None, bf16=None)


def _peft_args(path: Path, iteration: int | None) -> NeoXArgs:
    """Returns the configuration for an adapter's folder in peft's format: the base model with this adapter
    merged."""
    base = PeftFolder(path).base
    if base is None:
        raise CheckpointError(
            f"{path}: this adapter does not name its base model; name the base model instead, with --adapter {path}"
        )
    args = chat_model_args(base if Path(base).exists() or base.startswith("/") else f"hf://{base}", iteration)
    tokenizer = tokenizer_keys(path) if (path / "tokenizer.json").is_file() else {}
    return args.replace(**tokenizer, adapter=[str(path)])


def load_chat_model(
    name: str,
    process: Process,
    logger: logging.Logger,
    *,
    iteration: int | None = None,
    chat_template: str | None = None,
    precision: str | None = None,
    adapter: Sequence[str] = (),
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> ChatModel:
    """Loads a model and its chat template in a single process.

    Raises ConfigError, CheckpointError, TokenizerError.

    name, iteration: as in `chat_model_args`.
    chat_template: path of a template file; None: the model's own template.
    precision: precision to load the weights in; None: the model's own.
    adapter: adapters to merge into the weights, as in the configuration key `adapter`.
    keys: other keys of the configuration.
    """
    args = chat_model_args(name, iteration)
    if args.score_head:
        raise CheckpointError(f"{name}: this is a reward model, which gives scores and no text; use tools/score.py")
    args = with_options(args, adapter, precision).replace(**keys)
    if chat_template is not None:
        args = args.replace(chat_template=chat_template)
    args = args.for_world(process.world_size)
    tokenizer = build_tokenizer(args)
    try:
        template = find_template(args, tokenizer)
    except ConfigError as problem:
        raise ConfigError([f"{name}: {problem} (or pass --chat-template FILE)"]) from problem
    return ChatModel(name, load_model(args, init_model_parallel(args, process, logger), tokenizer, logger), template)
