"""Cleans and deduplicates raw text before it is tokenised, and counts every dropped document by reason.

    python tools/datasets/clean.py raw/*.jsonl.zst clean --recipe gopher,c4,fineweb --workers 8
    python tools/datasets/clean.py raw clean --language en --recipe gopher,fineweb --set c4.min_num_sentences=3 \\
        --exact document,line --minhash --keep longest --decontaminate piqa.jsonl arc/ --validation 0.005
    python tools/datasets/preprocess_data.py --input clean --split train --output-prefix data/mine ...

It can repair texts, apply quality rules, drop exact and near duplicates and contaminated documents, and split
off a validation set. Without --recipe, --exact and --minhash it only repairs texts. OUT gets train-*-of-*
(and validation-*), report.html and metadata.json. The result does not depend on --workers, on --device, or on
how documents are distributed over input files. An interrupted job resumes when you run the same command
again. docs/cleaning.md explains each rule.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.cleaning.exact import SCOPES  # noqa: E402
from megatron.data.cleaning.job import CleaningResult, PassProgress, Resources, clean  # noqa: E402
from megatron.data.cleaning.language import Language  # noqa: E402
from megatron.data.cleaning.minhash import MinHash  # noqa: E402
from megatron.data.cleaning.normalization import NORMALIZATIONS  # noqa: E402
from megatron.data.cleaning.plan import CleaningOptions  # noqa: E402
from megatron.data.cleaning.recipe import RULES, Recipe, rules_of  # noqa: E402
from megatron.data.cleaning.row_files import FORMATS  # noqa: E402
from megatron.data.preprocessing.inputs import resolve  # noqa: E402
from megatron.neox_arguments.values.integers import parse_integer  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import INPUT_HELP, add_choice_flags  # noqa: E402

_TELL_S = 5.0
_MB = 1 << 20


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("input", nargs="+", metavar="IN", help=INPUT_HELP.replace("separated by commas", "several"))
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for the result, created if missing")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="key or column that holds the text (default: text)"
    )
    add_choice_flags(parser)
    per_document = parser.add_argument_group("each document by itself")
    per_document.add_argument(
        "--normalize", type=_names, default=tuple(NORMALIZATIONS), metavar="NAMES",
        help=f"repairs to make: {','.join(NORMALIZATIONS)} (wrongly decoded text, Unicode normal form C, control "
        "characters; default: all), or none",
    )  # fmt: skip
    per_document.add_argument(
        "--language", type=_names, metavar="CODES", help="drop documents in other languages than these, such as en,de"
    )
    per_document.add_argument(
        "--language-threshold", type=_share, default=Language().threshold, metavar="P",
        help=f"drop documents whose language is less probable than P (default: {Language().threshold})",
    )  # fmt: skip
    per_document.add_argument(
        "--recipe", type=_names, default=(), metavar="NAMES",
        help=f"quality rules to apply, in this order: gopher (both gopher rules), {', '.join(RULES)}",
    )  # fmt: skip
    per_document.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="RULE.KEY=VALUE", help="change thresholds of rules"
    )
    per_document.add_argument(
        "--word-language", default="en", metavar="CODE", help="language whose spaCy rules split words (default: en)"
    )
    per_document.add_argument(
        "--mask-personal", action="store_true", help="replace e-mail addresses and public IPv4 addresses"
    )
    per_document.add_argument(
        "--decontaminate", nargs="+", metavar="IN", help="drop documents that share an n-gram of words with these sets"
    )
    per_document.add_argument(
        "--decontaminate-ngrams",
        type=_count,
        default=13,
        metavar="N",
        help="words of an n-gram for --decontaminate (default: 13)",
    )
    deduplication = parser.add_argument_group("all documents together")
    deduplication.add_argument(
        "--exact", type=_names, default=(), metavar="SCOPES", help=f"drop exact duplicates of {','.join(SCOPES)}"
    )
    deduplication.add_argument(
        "--exact-min-chars", type=_count, default=20, metavar="N",
        help="paragraphs and lines with fewer characters are never duplicates (default: 20)",
    )  # fmt: skip
    deduplication.add_argument(
        "--minhash", action="store_true", help="drop near-duplicates, found by MinHash of n-grams of words"
    )
    method = MinHash()
    for key, words in (
        ("ngrams", "words of an n-gram"), ("bands", "bands of a signature"), ("rows", "values of a band"),
        ("seed", "seed of the hash functions"),
    ):  # fmt: skip
        value = getattr(method, key)
        deduplication.add_argument(
            f"--minhash-{key}", type=_count, default=value, metavar="N", help=f"{words} (default: {value})"
        )
    deduplication.add_argument(
        "--keep",
        choices=["first", "longest", "best"],
        default="first",
        help="which document of a cluster of near-duplicates stays (default: first)",
    )
    deduplication.add_argument(
        "--score", metavar="KEY", help="for --keep best: key of a number; the document with the largest number stays"
    )
    deduplication.add_argument(
        "--jaccard",
        type=_share,
        metavar="S",
        help="compute the true Jaccard similarity of each pair; below S they are no duplicates",
    )
    deduplication.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="device that computes MinHash signatures: cpu (numpy), cuda or cuda:1 (torch)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--validation", type=_share, default=0.0, metavar="P", help="share of documents for validation-* (default: 0)"
    )
    output.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the choice of validation documents, by a hash of the text (default: 0)",
    )
    output.add_argument(
        "--format", choices=FORMATS, default="jsonl.zst", help="format of the written files (default: jsonl.zst)"
    )
    output.add_argument(
        "--file-mb", type=_count, default=1024, metavar="N", help="text per file, in 2^20 characters (default: 1024)"
    )
    output.add_argument(
        "--keep-rejected", action="store_true", help="write dropped documents to OUT/rejected, with the reason"
    )
    output.add_argument("--overwrite", action="store_true", help="replace the result of another job in OUT")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=_count, default=1, metavar="N", help="number of processes (default: 1)")
    work.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop",
        help="for a row that cannot be read: stop the job, or skip and count the row (default: stop)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part and part != "none")


def _count(text: str) -> int:
    if not (number := parse_integer(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return number


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 1")
    return share


def options_of(flags: argparse.Namespace) -> CleaningOptions:
    """Returns the cleaning options that the command-line flags describe.

    Raises DataError for flags that contradict each other."""
    for flag, requested, choices in (("normalize", flags.normalize, NORMALIZATIONS), ("exact", flags.exact, SCOPES)):
        wrong = [name for name in requested if name not in choices]
        if wrong:
            raise DataError(f"--{flag}: unknown name {', '.join(wrong)}; choose from {', '.join(choices)}")
    if (flags.keep == "best") != (flags.score is not None):
        raise DataError("--keep best and --score KEY need each other; give both or neither")
    if not flags.minhash and (flags.keep != "first" or flags.jaccard is not None or flags.device != "cpu"):
        raise DataError("--keep, --jaccard and --device apply to near-duplicates only: add --minhash")
    if flags.language is not None and not flags.language:
        raise DataError("--language: the value is empty; write a language such as en, or remove the flag")
    if flags.set and not flags.recipe:
        raise DataError("--set changes thresholds of a recipe: add --recipe")
    if flags.minhash_seed >= 1 << 32 or flags.file_mb >= 1 << 20:
        raise DataError("--minhash-seed must be below 2^32, and --file-mb below 2^20")
    if flags.validation >= 1:
        raise DataError("--validation 1 leaves nothing to train on; give less than 1")
    minhash = None
    if flags.minhash:
        minhash = MinHash(
            flags.minhash_ngrams, flags.minhash_bands, flags.minhash_rows, flags.minhash_seed, flags.keep, flags.score,
            flags.jaccard,
        )  # fmt: skip
    return CleaningOptions(
        recipe=Recipe(
            normalize=tuple(name for name in NORMALIZATIONS if name in flags.normalize),
            language=Language(flags.language, flags.language_threshold) if flags.language else None,
            rules=rules_of(flags.recipe, flags.set),
            word_language=flags.word_language,
            mask_personal=flags.mask_personal,
            decontaminate=flags.decontaminate_ngrams if flags.decontaminate else None,
        ),
        text_key=flags.text_key,
        exact=tuple(scope for scope in SCOPES if scope in flags.exact),
        exact_min_chars=flags.exact_min_chars,
        minhash=minhash,
        validation=flags.validation,
        seed=flags.seed,
        format=flags.format,
        file_chars=flags.file_mb * _MB,
        keep_rejected=flags.keep_rejected,
        skip_bad_rows=flags.on_error == "skip",
    )


def resources_of(flags: argparse.Namespace) -> Resources:
    """Returns the number of workers and the device from the flags. Raises DataError if torch cannot use the
    device."""
    if flags.device == "cpu":
        return Resources(flags.workers)
    import torch

    try:
        torch.zeros(1, device=flags.device)
    except (RuntimeError, AssertionError) as problem:
        raise DataError(f"--device {flags.device}: torch cannot use it ({str(problem).splitlines()[0]})") from None
    return Resources(flags.workers, flags.device)


class Progress:
    """Prints progress, rate and remaining time of a cleaning job every few seconds, when called.

    On a terminal it rewrites the line in place."""

    def __init__(self) -> None:
        self._name, self._started_at, self._printed_at = "", 0.0, 0.0
        self._terminal = sys.stdout.isatty()

    def __call__(self, progress: PassProgress) -> None:
        now = time.monotonic()
        if progress.name != self._name:
            self._name, self._started_at, self._printed_at = progress.name, now, now
            return
        ends = progress.done >= progress.total
        if now - self._printed_at < (0.2 if self._terminal else _TELL_S) and not ends:
            return
        self._printed_at = now
        seconds = max(now - self._started_at, 1e-9)
        share, resumed_share = progress.done / max(progress.total, 1), progress.resumed_done / max(progress.total, 1)
        left = max(1 - share, 0) * seconds / max(share - resumed_share, 1e-9)
        parts = [f"{min(share, 1):.0%}"]
        if progress.documents:
            rate = (progress.documents - progress.resumed) / seconds
            parts = [f"{progress.documents:,} documents", *parts, f"{rate:,.0f} documents/s"]
        parts += [f"{time.strftime('%H:%M:%S', time.gmtime(left))} left"]
        parts += [f"{progress.resumed:,} from an earlier run"] if progress.resumed else []
        line = f"{progress.name}: {', '.join(parts)}"
        print(f"\r{line}\033[K" if self._terminal else line, end="\n" if ends or not self._terminal else "", flush=True)


def report(result: CleaningResult, output: Path) -> None:
    """Prints the result of a cleaning job: counts of kept and dropped documents, notes, path of the
    report."""
    if result.existed:
        print(f"{output}: nothing to do: the same command has already written the result")
    for name, count in result.documents.items():
        if count:
            print(f"{name}: {count:,} documents, {result.chars[name]:,} characters")
    for reason, count in result.account.dropped.most_common():
        print(f"dropped, {reason}: {count:,}")
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{output}/report.html shows what was dropped, with examples")


def main(argv: Sequence[str] | None = None) -> None:
    flags = parse(argv)
    try:
        options, resources = options_of(flags), resources_of(flags)
        for item in (*flags.input, *(flags.decontaminate or ())):
            if Path(item).is_dir() and flags.output.resolve().is_relative_to(Path(item).resolve()):
                raise DataError(
                    f"{flags.output}: OUT is inside the input {item}, so a next run would read it; choose another OUT"
                )
        files = resolve(flags.input, flags.split, flags.subset)
        evaluation = resolve(flags.decontaminate, "all") if flags.decontaminate else []
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(flags).items()}
        result = clean(files, flags.output, options, resources, evaluation, arguments, flags.overwrite, Progress())
    except DataError as problem:
        sys.exit(f"clean.py: error: {problem}")
    except KeyboardInterrupt:
        sys.exit("clean.py: stopped; run the same command again to continue")
    report(result, flags.output)


if __name__ == "__main__":
    run_command(main)
