"""Implements `text_gen_type: score`: writes the log-probability of each token of texts in a JSON-lines
file."""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from megatron.data.files import sync
from megatron.distributed import on_rank_zero
from megatron.generation.batching.memory_budget import forward_budget
from megatron.generation.model import Model
from megatron.generation.scoring.logprobs import ContinuationScore, ScoreRequest, rolling_windows, score_texts
from megatron.generation.scoring.partial_file import job_fingerprint, partial_file
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.process.progress import ProgressBar
from megatron.process.run_files import to_json
from megatron.tokenizer import Tokenizer

_LINES_AT_ONCE = 2048  # lines per data-parallel rank between two writes; an interruption loses at most these


@dataclass(frozen=True)
class ScoredLine:
    """The output for one line of the input.

    tokens: ids of the scored tokens: those of the completion, or of the full text.
    logprobs: the log-probability of each token, in nats; null if the line was skipped.
    sum: the sum of `logprobs`. perplexity: exp of the negative mean of `logprobs`.
    greedy: whether every token was the model's most likely token.
    message: a text that says what was truncated or skipped; null if nothing was.
    """

    tokens: list[int]
    logprobs: list[float] | None
    sum: float | None
    perplexity: float | None
    greedy: bool
    message: str | None


def write_scores(model: Model, file: Path, logger: logging.Logger) -> None:
    """Scores the lines of `sample_input_file` and writes a line of scores for each to `file`.

    In a line {"text": ...} every token is scored; the first token is scored after a token that begins a
    document (`first_token`). In a line {"prompt": ..., "completion": ...} only the completion is scored.
    Raises ConfigError for other lines.

    All ranks call this function together. A later call continues an interrupted one.
    """
    args, groups = model.args, model.groups
    source = Path(str(args.sample_input_file))
    total = on_rank_zero(groups, lambda: _check(args, source))
    fingerprint = on_rank_zero(groups, lambda: job_fingerprint(args, model.folders, [source]))
    growing = partial_file(file, fingerprint) if groups.world_rank == 0 else file
    done = on_rank_zero(groups, lambda: _count_complete_lines(growing))
    if done:
        logger.info(f"{file}: an interrupted run is continued, going on after {done} of {total} lines")
    inputs = islice(_lines(args, source), done, None) if groups.world_rank == 0 else iter(())
    budget = forward_budget(model, None if args.eval_batch_size == "auto" else args.eval_batch_size)
    with ProgressBar("scoring", total, "line", logger, done=done, visible=groups.world_rank == 0) as progress:
        while done < total:
            texts = on_rank_zero(groups, lambda: _requests(inputs, model, _LINES_AT_ONCE * groups.size("data")))
            report = partial(progress.advance_to_share, done, len(texts))
            scored = score_texts(model, texts, overlong=args.eval_overlong, budget=budget, on_progress=report)
            lines = [_line(*text) for text in zip(texts, scored, strict=True)]
            on_rank_zero(groups, partial(_append, args, growing, lines))
            done += len(texts)
            progress.advance_to(done)
    on_rank_zero(groups, lambda: _finish(args, growing, file))
    logger.info(f"{total} lines of scores are in {file}")


def _lines(args: ModelArgs, file: Path) -> Iterator[dict[str, Any]]:
    with open(file, encoding="utf-8") as opened:
        for number, text in enumerate(opened, 1):
            if not text.strip():
                continue
            try:
                row = parse_json(text)
            except ValueError as cause:
                raise args.error("sample_input_file", f"{file}:{number}: is not valid JSON ({cause})") from cause
            keys = ("text",) if isinstance(row, dict) and "text" in row else ("prompt", "completion")
            if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
                expected = 'expected {"text": STRING} or {"prompt": STRING, "completion": STRING}'
                raise args.error("sample_input_file", f"{file}:{number}: {expected}")
            if not row[keys[-1]]:
                raise args.error(
                    "sample_input_file", f"{file}:{number}: {keys[-1]} is empty, so there is nothing to score"
                )
            yield row


def _check(args: ModelArgs, file: Path) -> int:
    """Returns the number of lines to score. Raises ConfigError if a line is invalid or the file has no
    lines."""
    try:
        total = sum(1 for _ in _lines(args, file))
    except OSError as cause:
        raise args.error("sample_input_file", f"{file}: cannot be read ({cause.strerror})") from cause
    except UnicodeDecodeError as cause:
        raise args.error("sample_input_file", f"{file}: is not UTF-8 text (byte {cause.start} is invalid)") from cause
    if not total:
        raise args.error("sample_input_file", f"{file}: holds no texts to score; write one JSON object per line")
    return total


def _count_complete_lines(file: Path) -> int:
    """Returns the number of complete lines of a partial file. Removes an incomplete last line from the
    file."""
    if not file.is_file():
        return 0
    with open(file, "rb+") as opened:
        count = end = 0
        for line in opened:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
        opened.truncate(end)
    return count


def _requests(inputs: Iterator[dict[str, Any]], model: Model, count: int) -> list[list[ScoreRequest]]:
    """Returns a list of requests for each of the next `count` lines: one request, or several if the line's
    text is long.

    inputs: the lines as JSON objects.
    """
    return [
        _windows(row["text"], model) if "text" in row else [_pair(row["prompt"], row["completion"], model.tokenizer)]
        for row in islice(inputs, count)
    ]


def first_token(tokenizer: Tokenizer) -> int:
    """Returns the token id to put before the first token of a document: BOS, or end-of-document if the
    tokenizer has no BOS."""
    return tokenizer.eod if tokenizer.bos is None else tokenizer.bos


def _windows(text: str, model: Model) -> list[ScoreRequest]:
    tokens, prefix = model.tokenizer.tokenize(text), first_token(model.tokenizer)
    has_prefix = len(tokens) > 1 and tokens[0] == prefix  # the tokenizer has added it
    return rolling_windows(tokens[has_prefix:], prefix, model.positions)


def _pair(prompt: str, completion: str, tokenizer: Tokenizer) -> ScoreRequest:
    """Returns the token ids of the prompt and of the completion. White space at the end of the prompt is
    counted as part of the completion."""
    stripped = prompt.rstrip()
    context = tokenizer.tokenize(stripped) if stripped else []
    tokens = tokenizer.tokenize(prompt + completion)
    return context or [first_token(tokenizer)], tokens[len(context) :]


def _line(requests: Sequence[ScoreRequest], scored: Sequence[ContinuationScore]) -> ScoredLine:
    tokens = [token for _, continuation in requests for token in continuation]
    if any(score.skipped for score in scored):
        return ScoredLine(
            tokens, None, None, None, False, "skipped: longer than the model's positions (eval_overlong: skip)"
        )
    logprobs = [value for score in scored for value in score.logprobs]
    num_truncated = sum(score.truncated for score in scored)
    message = None
    if num_truncated:
        message = f"the first {num_truncated} tokens of the prompt were left out, to fit the model's positions"
    total = math.fsum(logprobs)
    greedy = all(is_greedy for text_score in scored for is_greedy in text_score.greedy)
    perplexity = math.exp(min(-total / max(1, len(tokens)), 700.0))
    return ScoredLine(tokens, [round(value, 6) for value in logprobs], total, perplexity, greedy, message)


def _append(args: ModelArgs, file: Path, lines: Sequence[ScoredLine]) -> None:
    try:
        with open(file, "a", encoding="utf-8") as opened:
            opened.writelines(to_json(asdict(line)) + "\n" for line in lines)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as cause:
        raise args.error("sample_output_file", f"{file}: {cause.strerror}") from cause


def _finish(args: ModelArgs, growing: Path, file: Path) -> None:
    try:
        os.replace(growing, file)
        sync(file.parent)
    except OSError as cause:
        raise args.error("sample_output_file", f"{file}: {cause.strerror}") from cause
