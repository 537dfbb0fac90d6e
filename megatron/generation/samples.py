"""Implements generate.py: writes completions of prompts to a file, or answers prompts at the terminal."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.checkpointing.huggingface import find_hf, is_hf
from megatron.data.files import replace_text
from megatron.distributed import Process, configure_logging, on_rank_zero, rendezvous_and_check, run_on_all_ranks
from megatron.generation.batching.requests import Event
from megatron.generation.complete import complete
from megatron.generation.interactive import converse
from megatron.generation.model import Model, load_model, start_inference
from megatron.generation.prompts.files import NOT_STARTED, Prompt, read_prompts
from megatron.generation.sampling import SamplingParams
from megatron.generation.scoring.precompute import precompute
from megatron.generation.scoring.score_file import write_scores
from megatron.mpu import ParallelGroups, mix_seed
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.process.progress import ProgressBar
from megatron.process.run_files import to_json
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class GeneratedSample:
    """A generated text, which is one line of the output file. The fields have GPT-NeoX's names.

    context: the prompt.
    text: the generated text; None if the first token ended the document or the prompt was skipped.
    length: number of generated tokens.
    finished: whether a stop token or a stop string ended the text.
    message: a warning, such as that the prompt was truncated; None: no warning.
    duration_seconds: time from the start of generation to this sample's last token.
    logprobs: with `return_logprobs`, for each token {"token": id, "logprob": value, "top": (id,
        log-probability) pairs of the most likely tokens}.
    """

    context: str
    text: str | None
    length: int
    finished: bool
    message: str | None
    duration_seconds: float
    logprobs: list[dict[str, Any]] | None = None

    def line(self) -> str:
        """Returns this sample as a JSON line of the output file."""
        fields = asdict(self)
        if self.logprobs is None:
            del fields["logprobs"]
        return to_json(fields) + "\n"


def generate(args: NeoXArgs, process: Process) -> None:
    """Does what `text_gen_type` says: writes samples, scores or log-probabilities to files, or answers typed
    prompts.

    All ranks call this function together. Raises ConfigError, CheckpointError, TokenizerError, DataError.
    """
    logger = configure_logging(process.rank)
    args = args.check_generation().for_inference(process.world_size)
    store = rendezvous_and_check(args, process, logger)
    if args.load is not None and is_hf(args.load):
        find_hf(args.load)  # may download
    args, groups, tokenizer = start_inference(args, process, logger, store)
    _log_unused_keys(args, logger)
    if args.text_gen_type == "score":
        file = on_rank_zero(groups, lambda: output_file(args))
        write_scores(load_model(args, groups, tokenizer, logger), file, logger)
    elif args.text_gen_type == "precompute":
        precompute(load_model(args, groups, tokenizer, logger), logger)
    elif args.text_gen_type == "interactive":
        converse(load_model(args, groups, tokenizer, logger))
    else:
        _write_samples(args, groups, tokenizer, logger)
    groups.barrier()
    dist.destroy_process_group()


def _write_samples(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> None:
    prompts, file = on_rank_zero(groups, lambda: (read_prompts(args, tokenizer), output_file(args)))
    model = load_model(args, groups, tokenizer, logger)
    start_time = time.perf_counter()
    samples = generate_samples(model, prompts, logger)
    text = "".join(sample.line() for sample in samples)
    on_rank_zero(groups, lambda: _write(args, file, text))
    tokens, seconds = sum(sample.length for sample in samples), time.perf_counter() - start_time
    logger.info(f"{len(samples)} samples, {tokens} tokens in {seconds:.1f} s, are in {file}")


def _log_unused_keys(args: NeoXArgs, logger: logging.Logger) -> None:
    if args.temperature == 0.0 and (args.top_k > 0 or args.top_p > 0.0):
        logger.info("top_k and top_p change nothing at temperature 0, which takes the most likely token")
    if args.text_gen_type not in ("input-file", "score") and args.sample_input_file is not None:
        logger.info(f"sample_input_file is not read: text_gen_type is {args.text_gen_type}, not input-file")
    if args.text_gen_type in ("interactive", "precompute") and args.user_values.get("sample_output_file") is not None:
        logger.info(f"sample_output_file is not written: text_gen_type is {args.text_gen_type}")


# -- output --------------------------------------------------------------------------------------------------


def output_file(args: NeoXArgs) -> Path:
    """Returns the path of the output file for samples or scores.

    Call it before generation starts, because it raises ConfigError if the file cannot be written.
    """
    file = Path(args.sample_output_file or "")
    ending = {"input-file": "output", "score": "scores"}.get(str(args.text_gen_type))
    if ending is not None and args.user_values.get("sample_output_file") is None:
        file = Path(f"{args.sample_input_file}.{ending}.jsonl")
    folder = file.parent
    problems = {
        "is a folder; name a file": file.is_dir(),
        f"there is no folder {folder}; make it first": not folder.is_dir(),
        f"the folder {folder} cannot be written to": not os.access(folder, os.W_OK),
    }
    reason = next((problem for problem, applies in problems.items() if applies), None)
    if reason is not None:
        raise args.error("sample_output_file", f"{file}: {reason}")
    return file


def _write(args: ModelArgs, file: Path, text: str) -> None:
    try:
        replace_text(file, text)
    except OSError as cause:
        raise args.error("sample_output_file", f"{file}: cannot be written ({cause.strerror})") from cause


# -- generating ----------------------------------------------------------------------------------------------


def generate_samples(
    model: Model,
    prompts: Sequence[Prompt],
    logger: logging.Logger,
    stop_token_ids: tuple[int, ...] | None = None,
    look_for_stop: Callable[[Event], None] = lambda event: None,
) -> list[GeneratedSample]:
    """Generates a sample for every prompt and returns the samples in order.

    The samples are the same on every rank and in every parallel layout. Data-parallel ranks share the prompts
    between them. All ranks call this function together.

    stop_token_ids: tokens that end a text; None: the model's.
    look_for_stop: called with every event. If it raises an exception on one rank, all ranks raise it.
    """
    args, groups = model.args, model.groups
    rank, size = (0, 1) if model.lockstep else (groups.rank("data"), groups.size("data"))
    local_prompts = [i for i, prompt in enumerate(prompts) if prompt.tokens][rank::size]
    logger.info(
        f"generating {len(prompts)} samples of at most {args.maximum_tokens} tokens, temperature {args.temperature:g}, "
        f"top_k {args.top_k}, top_p {args.top_p:g}, seed {args.seed}"
    )

    def run() -> dict[int, GeneratedSample]:
        def take(event: Event) -> None:
            progress.update(event)
            look_for_stop(event)

        with _SampleProgress(
            len(local_prompts), args.maximum_tokens, logger, visible=groups.world_rank == 0
        ) as progress:
            completions = complete(
                model,
                [prompts[i].tokens for i in local_prompts],
                SamplingParams.from_args(args),
                maximum_tokens=args.maximum_tokens,
                seeds=[mix_seed(args.seed, "sample", i) for i in local_prompts],
                stop=args.stop_strings,
                stop_token_ids=stop_token_ids,
                logprobs=args.return_logprobs,
                on_event=take,
            )
        samples: dict[int, GeneratedSample] = {}
        for i, completion in zip(local_prompts, completions, strict=True):
            text = completion.text if completion.tokens else None
            messages = [m for m in (prompts[i].message, None if text is not None else NOT_STARTED) if m]
            samples[i] = GeneratedSample(
                prompts[i].context,
                text,
                len(completion.tokens),
                completion.finished,
                "; ".join(messages) or None,
                completion.seconds,
                None if args.return_logprobs is None else [logprob._asdict() for logprob in completion.logprobs],
            )
        return samples

    all_samples = {
        i: GeneratedSample(prompt.context, None, 0, False, prompt.message, 0.0)
        for i, prompt in enumerate(prompts)
        if not prompt.tokens
    }
    for samples in run_on_all_ranks(groups, run):
        all_samples |= samples
    return [all_samples[i] for i in range(len(prompts))]


class _SampleProgress(ProgressBar):
    """A progress bar in tokens, which also shows how many samples have ended."""

    def __init__(self, samples: int, maximum_tokens: int, logger: logging.Logger, visible: bool) -> None:
        super().__init__("", samples * maximum_tokens, "token", logger, visible=visible)
        self.samples, self.maximum_tokens, self.num_ended = samples, maximum_tokens, 0
        self.written: dict[int, int] = {}  # number of tokens of each sample so far

    def update(self, event: Event) -> None:
        """Adds the tokens of an event to the progress, and counts the sample if the event ends it."""
        count = len(event.tokens)
        self.written[event.id] = self.written.get(event.id, 0) + count
        if event.finish_reason is not None:
            self.num_ended += 1
            self.bar.set_postfix_str(f"{self.num_ended}/{self.samples} samples", refresh=False)
            self.bar.total -= self.maximum_tokens - self.written[event.id]  # tokens that this sample did not need
        self.advance_to(self.done + count)

    def line(self, speed: float) -> str:
        return f"{self.done} tokens, {self.num_ended} of {self.samples} samples, {speed:.1f} tokens/s"
