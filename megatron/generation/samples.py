"""What generate.py does: prompts in, completions as JSON lines out, or a conversation at the terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from megatron.data.files import sync, temporary
from megatron.generation.complete import Step, complete
from megatron.generation.interactive import converse
from megatron.generation.model import Model, load_model
from megatron.generation.prompts import NOT_STARTED, Prompt, problem_of, read_prompts
from megatron.generation.sampling import Sampling
from megatron.mpu import ParallelGroups, Process, configure_logging, join, mix_seed, on_rank_zero, together
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer, build_tokenizer

_TOKENS_A_FORWARD = 8192  # rows of a batch times their longest length
_SECONDS_A_LINE = 10.0  # between progress lines where there is no terminal


@dataclass(frozen=True)
class Sample:
    """A line of the output, GPT-NeoX's fields. text: without the context, None when the first token ended the document;
    length: of the text in tokens; finished: the document ended; duration_seconds: of its batch until its last token."""

    context: str
    text: str | None
    length: int
    finished: bool
    message: str | None
    duration_seconds: float


def generate(args: NeoXArgs, process: Process) -> None:
    """Write the samples that the configuration asks for, on every rank."""
    logger = configure_logging(process.rank)
    # Batches of training need not work out on this number of ranks.
    args = args.check_generation().replace(
        train_batch_size=None, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None
    )
    args = args.for_world(process.world_size)
    groups = join(args, process, logger)
    for note in _notes(args):
        logger.info(note)
    tokenizer = build_tokenizer(args)
    if args.text_gen_type == "interactive":
        converse(load_model(args, groups, tokenizer, logger))
    else:
        _write_samples(args, groups, tokenizer, logger)
    groups.barrier()
    dist.destroy_process_group()


def _write_samples(args: NeoXArgs, groups: ParallelGroups, tokenizer: Tokenizer, logger: logging.Logger) -> None:
    prompts, file = on_rank_zero(groups, lambda: (read_prompts(args, tokenizer), output_file(args)))
    model = load_model(args, groups, tokenizer, logger)
    begun = time.perf_counter()
    samples = sample(model, prompts, logger)
    text = "".join(json.dumps(asdict(one)) + "\n" for one in samples)
    on_rank_zero(groups, lambda: _write(args, file, text))
    tokens, seconds = sum(one.length for one in samples), time.perf_counter() - begun
    logger.info(f"{len(samples)} samples, {tokens} tokens in {seconds:.1f} s, are in {file}")


def _notes(args: NeoXArgs) -> list[str]:
    lines = args.notes()
    if args.temperature == 0.0 and (args.top_k > 0 or args.top_p > 0.0):
        lines.append("top_k and top_p change nothing at temperature 0, which takes the most likely token")
    if args.text_gen_type != "input-file" and args.sample_input_file is not None:
        lines.append(f"sample_input_file is not read: text_gen_type is {args.text_gen_type}, not input-file")
    if args.text_gen_type == "interactive" and args.given.get("sample_output_file") is not None:
        lines.append("sample_output_file is not written: text_gen_type is interactive")
    return lines


# -- output ------------------------------------------------------------------------------------------------------------


def output_file(args: NeoXArgs) -> Path:
    """Where samples go. Raises ConfigError now, not after an hour, when they cannot be written there."""
    file = Path(args.sample_output_file or "")
    if args.text_gen_type == "input-file" and args.given.get("sample_output_file") is None:
        file = Path(f"{args.sample_input_file}.output.jsonl")
    folder = file.parent
    reason = None
    if file.is_dir():
        reason = "is a folder; name a file"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}; make it first"
    elif not os.access(folder, os.W_OK):
        reason = f"the folder {folder} cannot be written to"
    if reason is not None:
        raise problem_of(args, "sample_output_file", f"{file}: {reason}")
    return file


def _write(args: NeoXArgs, file: Path, text: str) -> None:
    unfinished = temporary(file)
    try:
        unfinished.write_text(text, encoding="utf-8")
        sync(unfinished)
        os.replace(unfinished, file)
    except OSError as cause:
        unfinished.unlink(missing_ok=True)
        raise problem_of(args, "sample_output_file", f"{file}: {cause.strerror}") from cause


# -- generating --------------------------------------------------------------------------------------------------------


def sample(model: Model, prompts: Sequence[Prompt], logger: logging.Logger) -> list[Sample]:
    """A sample for every prompt, in order, the same on every rank and in every layout; data-parallel ranks share the
    prompts out. All ranks call it together."""
    args, groups = model.args, model.groups
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].tokens))
    own = by_length[groups.rank("data") :: groups.size("data")]
    logger.info(
        f"generating {len(prompts)} samples of at most {args.maximum_tokens} tokens, temperature {args.temperature:g}, "
        f"top_k {args.top_k}, top_p {args.top_p:g}, seed {args.seed}"
    )

    def run() -> dict[int, Sample]:
        done: dict[int, Sample] = {}
        with _Progress(len(own), args.maximum_tokens, logger, shown=groups.world_rank == 0) as progress:
            for rows in _batches(own, prompts, args.maximum_tokens):
                completions = complete(
                    model,
                    [prompts[i].tokens for i in rows],
                    sampling,
                    maximum_tokens=args.maximum_tokens,
                    seeds=[mix_seed(args.seed, "sample", i) for i in rows],
                    on_step=progress.update,
                )
                for i, completion in zip(rows, completions, strict=True):
                    text = model.tokenizer.detokenize(completion.tokens) if completion.tokens else None
                    messages = [m for m in (prompts[i].message, None if text is not None else NOT_STARTED) if m]
                    done[i] = Sample(
                        prompts[i].context,
                        text,
                        len(completion.tokens),
                        completion.finished,
                        "; ".join(messages) or None,
                        completion.seconds,
                    )
        return done

    everyone: dict[int, Sample] = {}
    for done in together(groups, run):
        everyone |= done
    return [everyone[i] for i in range(len(prompts))]


def _batches(own: Sequence[int], prompts: Sequence[Prompt], maximum_tokens: int) -> list[list[int]]:
    """Prompts that are run together, neighbours in length."""
    batches: list[list[int]] = []
    for i in own:
        longest = len(prompts[i].tokens) + maximum_tokens  # `own` is in order of length
        if batches and (len(batches[-1]) + 1) * longest <= _TOKENS_A_FORWARD:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class _Progress:
    """A bar of tokens on a terminal, now and then a line elsewhere."""

    def __init__(self, samples: int, maximum_tokens: int, logger: logging.Logger, shown: bool) -> None:
        self.samples, self.maximum_tokens, self.logger = samples, maximum_tokens, logger
        self.tokens = self.ended = 0
        self.begun = self.said = time.perf_counter()
        self.on_terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(
            total=samples * maximum_tokens, unit="token", file=sys.stderr, disable=not self.on_terminal,
            dynamic_ncols=True,
        )  # fmt: skip

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *problem: object) -> None:
        self.bar.close()

    def update(self, step: Step) -> None:
        """Count a step of a batch."""
        ended = sum(step.ended)
        self.tokens += len(step.tokens)
        self.ended += ended
        self.bar.set_postfix_str(f"{self.ended}/{self.samples} samples", refresh=False)
        self.bar.total -= ended * (self.maximum_tokens - 1 - step.number)  # what these rows need not write
        self.bar.update(len(step.tokens))
        now = time.perf_counter()
        if not self.on_terminal and now - self.said > _SECONDS_A_LINE:
            self.said = now
            speed = self.tokens / (now - self.begun)
            self.logger.info(f"{self.tokens} tokens, {self.ended} of {self.samples} samples, {speed:.1f} tokens/s")
