"""Speed of preprocessing: text to `.bin/.idx` against the tokenizer alone, a plain loop, and datatrove if it
is there.

    python benchmarks/data.py --input corpus.jsonl --tokenizer tokenizer.json

Every number is the best of some rounds, in a process of its own that is held to so many cores; MB are of
text. The tokenizer alone has the texts in memory already, and throws its tokens away. How the data room
scales beyond that is in data_scale.py.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

BATCH = 100  # documents given to the tokenizer alone at once


def texts(source: Path) -> Iterator[str]:
    with open(source, "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def bare(source: Path, tokenizer: str, folder: Path, cores: int) -> Callable[[], None]:
    """Returns a function that only calls `encode_batch_fast`, with its own threads if `cores` > 1."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(tokenizer)
    documents = list(texts(source))

    def work() -> None:
        for start in range(0, len(documents), BATCH * cores):
            model.encode_batch_fast(documents[start : start + BATCH * cores])

    return work


def line_by_line(source: Path, tokenizer: str, folder: Path, cores: int) -> Callable[[], None]:
    """Returns a function that tokenizes as a simple script does: line by line, into one array."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(tokenizer)

    def work() -> None:
        ids: list[int] = []
        for text in texts(source):
            ids.extend(model.encode(text).ids)
            ids.append(0)
        np.array(ids, np.uint16).tofile(folder / "plain.bin")

    return work


def this_project(source: Path, tokenizer: str, folder: Path, cores: int) -> Callable[[], None]:
    from megatron.data.preprocessing import EncodeJob, preprocess
    from megatron.tokenizer import make_tokenizer

    job = EncodeJob(make_tokenizer, ("HFTokenizer", tokenizer, None), append_eod=True)
    job.tokenizer()
    return lambda: void(preprocess([source], [folder / "ours"], job, workers=cores))


def datatrove(source: Path, tokenizer: str, folder: Path, cores: int) -> Callable[[], None]:
    """Returns a function that tokenizes with datatrove, unshuffled; each core reads a file of its own."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    parts = folder / "parts"
    parts.mkdir()
    lines = source.read_bytes().splitlines(keepends=True)
    for core in range(cores):
        (parts / f"{core}.jsonl").write_bytes(b"".join(lines[core::cores]))
    steps = [
        JsonlReader(str(parts), compression=None),
        DocumentTokenizer(
            str(folder / "tokens"), tokenizer_name_or_path=tokenizer, eos_token=None, shuffle_documents=False
        ),
    ]
    return lambda: void(
        LocalPipelineExecutor(steps, tasks=cores, workers=cores, logging_dir=str(folder / "logs")).run()
    )


def void(value: object) -> None:
    """Does nothing: it drops the result of an expression in a lambda."""


METHODS = {"bare": bare, "plain": line_by_line, "ours": this_project, "datatrove": datatrove}


def cpu_seconds() -> float:
    usages = [resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(method: str, source: Path, tokenizer: str, cores: int) -> None:
    """Runs one method in this process, held to `cores` cores, and prints its numbers as JSON.

    They are seconds, CPU seconds, and the peak MB of the largest process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if method == "bare" and cores > 1 else "false"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    with tempfile.TemporaryDirectory() as folder:
        work = METHODS[method](source, tokenizer, Path(folder), cores)
        start, cpu_s = time.perf_counter(), cpu_seconds()
        work()
        seconds, cpu_s = time.perf_counter() - start, cpu_seconds() - cpu_s
    peak = max(resource.getrusage(process).ru_maxrss for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps([seconds, cpu_s, peak / 1e3]))


def run(method: str, source: Path, tokenizer: str, cores: int, python: str) -> list[float] | None:
    words = [python, __file__, "--input", str(source), "--tokenizer", tokenizer, "--measure", method, str(cores)]
    done = subprocess.run(words, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def repeated(source: Path, target: Path, megabytes: float) -> float:
    """Writes copies of `source` to `target` until it has `megabytes` MB of text. Returns its MB of text."""
    content, size = source.read_bytes(), 0.0
    source_mb = sum(len(text.encode()) for text in texts(source)) / 1e6
    with open(target, "wb") as file:
        while size < megabytes:
            file.write(content)
            size += source_mb
    return size


def main() -> None:
    quickstart = Path("data/quickstart")
    parser = CommandParser(description=__doc__)
    parser.add_argument("--input", type=Path, default=quickstart / "corpus.jsonl", help="JSONL (the quickstart's)")
    parser.add_argument("--tokenizer", default=str(quickstart / "tokenizer.json"), help="its tokenizer.json")
    parser.add_argument("--megabytes", type=float, default=32, help="of text, by repetition (32)")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many (3)")
    parser.add_argument("--datatrove-python", default=sys.executable, help="a Python that has datatrove (this one)")
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "CORES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], options.input, options.tokenizer, int(options.measure[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        source, longer = Path(folder) / "corpus.jsonl", Path(folder) / "longer.jsonl"
        size, longer_mb = repeated(options.input, source, options.megabytes), 4 * options.megabytes
        repeated(options.input, longer, longer_mb)
        runs = [("bare", 1), ("plain", 1), ("datatrove", 1), ("ours", 1), ("bare", 2), ("datatrove", 2), ("ours", 2)]
        best: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for method, cores in runs:
                python = options.datatrove_python if method == "datatrove" else sys.executable
                if numbers := run(method, source, options.tokenizer, cores, python):
                    best[method, cores] = list(map(min, numbers, best.get((method, cores), numbers)))
        print(f"{size:.0f} MB of text, best of {options.rounds}")
        for (method, cores), (seconds, cpu_s, peak) in best.items():
            rates = (
                f"{size / seconds:7.2f} MB/s {size / seconds / cores:7.2f} per core {size / cpu_s:7.2f} per CPU second"
            )
            print(f"  {method:10} {cores} cores {rates}   {peak:6.0f} MB of memory")
        for missing in sorted({method for method, _ in runs} - {method for method, _ in best}):
            print(f"  {missing}: cannot be run here")
        for cores in (1, 2):
            wall, cpu_s = (best["bare", cores][i] / best["ours", cores][i] for i in (0, 1))
            print(f"  ours / bare, {cores} cores: {wall:.3f} by the clock, {cpu_s:.3f} by CPU time")
        print(f"  ours, one core to two: {best['ours', 1][0] / best['ours', 2][0]:.2f} times")
        if grown := run("ours", longer, options.tokenizer, 2, sys.executable):
            print(
                f"  ours, memory for {size:.0f} and {longer_mb:.0f} MB: {best['ours', 2][2]:.0f} and {grown[2]:.0f} MB"
            )


if __name__ == "__main__":
    run_command(main)
