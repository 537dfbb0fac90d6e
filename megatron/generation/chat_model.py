"""Models with their chat templates, by name and in one process: HuggingFace folders, names on the Hub,
checkpoints."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """A model with the chat template that renders its prompts. name: the model's name as the user gave it."""

    name: str
    model: Model
    template: ChatTemplate

    def answer(
        self, questions: Sequence[Question], sampling: SamplingParams, maximum_tokens: int, seed: int
    ) -> list[Completion]:
        """Returns an answer to each question, in order. An answer depends only on its question, its index and
        `seed`.

        maximum_tokens: most tokens of an answer. Raises RequestError for a question that is too long or that
            the template refuses.
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

    name: a HuggingFace folder, ORG/NAME on the Hub, an adapter's folder in peft's format, or a folder of
        checkpoints (also a single `global_stepN`). A checkpoint's configuration is the one saved in it, with
        the tokenizer saved in it if `vocab_file` is gone.
    iteration: which checkpoint of a folder; None: the latest.

    Raises ConfigError, CheckpointError.
    """
    path = Path(name)
    if is_peft(path):
        return _peft_args(path, iteration)
    if path.is_dir() and not is_hf(path):
        return _checkpoint_args(path, iteration)
    if iteration is not None:
        raise CheckpointError(f"{name}: is a HuggingFace model, which has no iterations; leave out --iteration")
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
        model_parallel_size=1, pipe_parallel_size=1, sequence_parallel=False, train_batch_size=None,
        train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None, distributed_backend="auto",
    )  # fmt: skip


def with_options(args: NeoXArgs, adapter: Sequence[str], precision: str | None) -> NeoXArgs:
    """Returns the configuration with `adapter` appended to its key `adapter`, and with another precision
    unless that is None. Raises CheckpointError if the checkpoint already holds adapters."""
    if adapter and args.lora is not None:
        raise CheckpointError(f"{args.load}: has its own adapters; name its base model, and all adapters by --adapter")
    if adapter:
        args = args.replace(adapter=[*args.adapter, *adapter])
    return args if precision is None else args.replace(precision=precision, fp16=None, bf16=None)


def _peft_args(path: Path, iteration: int | None) -> NeoXArgs:
    """Returns the configuration of a folder in peft's format: its base model with its adapter."""
    base = PeftFolder(path).base
    if base is None:
        raise CheckpointError(f"{path}: does not name its base model; name that model, with --adapter {path}")
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
) -> ChatModel:
    """Loads a model and its chat template, in this process alone. Raises ConfigError, CheckpointError,
    TokenizerError.

    name, iteration: as in `chat_model_args`.
    chat_template: file of a template, instead of the model's own.
    precision: instead of the model's own.
    adapter: adapters to merge into the weights, as in the configuration key `adapter`.
    """
    args = chat_model_args(name, iteration)
    if args.score_head:
        raise CheckpointError(f"{name}: is a reward model, which gives scores and no text; use tools/score.py")
    args = with_options(args, adapter, precision)
    if chat_template is not None:
        args = args.replace(chat_template=chat_template)
    args = args.for_world(process.world_size)
    tokenizer = build_tokenizer(args)
    try:
        template = find_template(args, tokenizer)
    except ConfigError as problem:
        raise ConfigError([f"{name}: {problem} (or --chat-template FILE)"]) from problem
    return ChatModel(name, load_model(args, init_model_parallel(args, process, logger), tokenizer, logger), template)
