"""Measures speed and memory of cleaning, compared with common libraries.

Near-duplicates are compared with rensa, datasketch and datatrove, rules with datatrove. A full job shows
documents a second and resident memory.

    python benchmarks/cleaning.py                          # texts of 500 and 3,000 characters, one core
    python benchmarks/cleaning.py --documents 10000000    # a whole job on so many documents of 500 characters

Each measure is in a process of its own on one core, from texts in memory to clusters: the best of some
rounds, all tools in turn in each. `pip install rensa datasketch datatrove` for theirs. 112 hash functions on
runs of 5 words, 14 bands; every tool by its bulk interface. Texts are words drawn by Zipf's law, sentences of
twelve; one in ten is a near copy of another. In brackets: duplicates found (rensa counts both of a pair), or
documents that are dropped.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

_BANDS, _FUNCTIONS, _WORDS = 14, 112, 5
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def vocabulary(size: int = 60_000) -> tuple[list[str], list[float]]:
    """Returns `size` random words and their cumulative weights by Zipf's law, for `random.choices`."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices(_LETTERS, range(26, 0, -1), k=draw.choice((2, 3, 4, 5, 6, 7, 9)))) for _ in range(size)
    ]
    words[:12] = ["the", "of", "and", "to", "a", "in", "that", "is", "was", "with", "be", "have"]
    weights, total = [], 0.0
    for rank in range(size):
        total += 1 / (rank + 2.7)
        weights.append(total)
    return words, weights


def texts(count: int, chars: int, seed: int = 0) -> Iterator[str]:
    """Yields `count` texts of about `chars` characters; one in ten is a near copy of an earlier text."""
    words, weights = vocabulary()
    draw = random.Random(seed)
    earlier = ""
    for _ in range(count):
        if earlier and draw.random() < 0.1:
            yield earlier + " again"
            continue
        words_of_text = draw.choices(words, cum_weights=weights, k=chars // 5)
        for position in range(11, len(words_of_text), 12):
            words_of_text[position] = f"{words_of_text[position]}.{chr(10) if position % 36 == 35 else ' '}The"
        earlier = f"{' '.join(words_of_text)[: chars - 1]}."
        yield earlier


def clean_py_minhash(documents: list[str]) -> Callable[[], int]:
    import numpy as np

    from megatron.data.cleaning.minhash import MinHash, band_keys, clusters, hashed_shingles, pairs_of, signatures
    from megatron.data.cleaning.shingles import WordHashes

    method = MinHash()

    def work() -> int:
        hashes, keys = WordHashes(), []
        for start in range(0, len(documents), 400):
            batch = documents[start : start + 400]
            keys.append(band_keys(signatures(*hashed_shingles(batch, hashes, _WORDS), method), method))
        edges = []
        for band in np.concatenate(keys).T:
            order = np.argsort(band, kind="stable")
            edges.append(pairs_of(band[order], order.astype(np.uint64), False))
        nodes, roots = clusters(np.concatenate(edges))
        return int((nodes != roots).sum())

    return work


def _runs(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)]


def rensa_bulk(documents: list[str]) -> Callable[[], int]:
    from rensa import RMinHash, RMinHashLSH

    def work() -> int:
        duplicates = 0
        index = RMinHashLSH(threshold=0.72, num_perm=_FUNCTIONS, num_bands=_BANDS)
        for start in range(0, len(documents), 1000):
            sets = [_runs(text) for text in documents[start : start + 1000]]
            matrix = RMinHash.digest_matrix_from_token_sets(sets, _FUNCTIONS, 1)
            duplicates += sum(index.insert_matrix_and_query_duplicate_flags(matrix, start))
        return duplicates

    return work


def datasketch_bulk(documents: list[str]) -> Callable[[], int]:
    from datasketch import MinHash, MinHashLSH

    def work() -> int:
        index, duplicates = MinHashLSH(num_perm=_FUNCTIONS, params=(_BANDS, _FUNCTIONS // _BANDS)), 0
        encoded = ([run.encode() for run in _runs(text)] for text in documents)
        for number, signature in enumerate(MinHash.generator(encoded, num_perm=_FUNCTIONS)):
            duplicates += bool(index.query(signature))
            index.insert(number, signature)
        return duplicates

    return work


def datatrove_signatures(documents: list[str]) -> Callable[[], int]:
    """Returns a function that computes datatrove's signatures, its first stage, without writing files.

    Later stages are not measured. SHA-1 is used, because its default hash does not work with xxhash 4.
    """
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    step = MinhashDedupSignature(tempfile.mkdtemp(), MinhashConfig(hash_config=HashConfig(hash_fc="sha1")))

    def work() -> int:
        for text in documents:
            shingles = step.get_shingles(text)
            if shingles.size:
                step.get_signature(shingles)
        return 0

    return work


def clean_py_rules(documents: list[str]) -> Callable[[], int]:
    from megatron.data.cleaning.recipe import Cleaner, Edits, Recipe, rules_of

    def work() -> int:
        cleaner = Cleaner(Recipe(normalize=(), rules=rules_of(["gopher", "c4", "fineweb"])))
        return sum(cleaner.clean(text, Edits())[1] is not None for text in documents)

    return work


def datatrove_rules(documents: list[str]) -> Callable[[], int]:
    from datatrove.data import Document
    from datatrove.pipeline import filters

    rules = [
        filters.GopherRepetitionFilter(), filters.GopherQualityFilter(), filters.C4QualityFilter(),
        filters.FineWebQualityFilter(),
    ]  # fmt: skip

    def work() -> int:
        dropped = 0
        for text in documents:
            document = Document(text=text, id="")
            dropped += not all(rule.filter(document) is True for rule in rules)
        return dropped

    return work


MEASURES: dict[str, dict[str, Callable[[list[str]], Callable[[], int]]]] = {
    "near-duplicates": {
        "clean.py": clean_py_minhash, "rensa": rensa_bulk, "datasketch": datasketch_bulk,
        "datatrove (signatures alone)": datatrove_signatures,
    },
    "rules gopher, c4, fineweb": {"clean.py": clean_py_rules, "datatrove": datatrove_rules},
}  # fmt: skip


def measure(measure_name: str, tool: str, count: int, chars: int) -> None:
    """Runs one measure of one tool, and prints JSON: documents per second, and duplicates it found."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    documents = list(texts(count, chars))
    work = MEASURES[measure_name][tool](documents)
    start = time.process_time()
    duplicates = work()
    print(json.dumps({"rate": count / (time.process_time() - start), "duplicates": duplicates}))


def table(rounds: int, counts: dict[int, int]) -> None:
    """Prints a Markdown table for each measure.

    Each tool runs `rounds` times for each text length in `counts`; the fastest counts. counts: number of
    documents by their length in characters."""
    for measure_name, tools in MEASURES.items():
        print(
            f"\n| {measure_name}, documents/s of a core | "
            + " | ".join(f"{chars:,} characters" for chars in counts)
            + " |"
        )
        print("|---|" + "---|" * len(counts))
        best: dict[str, dict[int, tuple[float, int]]] = {tool: {} for tool in tools}
        for _ in range(rounds):
            for chars, count in counts.items():
                for tool in tools:
                    slow = measure_name.startswith("rules") or tool.startswith("datatrove")
                    words = [
                        sys.executable,
                        __file__,
                        "--one",
                        measure_name,
                        tool,
                        str(count // 5 if slow else count),
                        str(chars),
                    ]
                    done = subprocess.run(words, capture_output=True, text=True)
                    if done.returncode:
                        sys.stderr.write(f"{tool}: {done.stderr.strip().splitlines()[-1]}\n")
                        continue
                    measured = json.loads(done.stdout.splitlines()[-1])
                    best[tool][chars] = max(best[tool].get(chars, (0.0, 0)), (measured["rate"], measured["duplicates"]))
        for tool, rates in best.items():
            cells = (f"{rates[chars][0]:,.0f} ({rates[chars][1]})" if chars in rates else "-" for chars in counts)
            print(f"| {tool} | " + " | ".join(cells) + " |")


def run_job(documents: int, folder: Path, workers: int, flags: list[str]) -> None:
    """Cleans `documents` texts with clean.py, and prints time, speed and peak memory of all processes."""
    source = folder / "raw.jsonl"
    if not source.exists():
        with open(source.with_suffix(".part"), "w") as file:
            for number, text in enumerate(texts(documents, 500)):
                file.write(json.dumps({"id": number, "text": text}) + "\n")
        source.with_suffix(".part").rename(source)
    tool = Path(__file__).resolve().parents[1] / "tools" / "datasets" / "clean.py"
    words = [sys.executable, str(tool), str(source), str(folder / "out"), "--workers", str(workers), *flags]
    start, peak = time.monotonic(), 0
    process = subprocess.Popen(words)
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.5)
    seconds = time.monotonic() - start
    print(
        f"{documents:,} documents, {workers} workers, {' '.join(flags)}: {seconds:,.0f} s, "
        f"{documents / seconds / workers:,.0f} documents/s of a worker, at most {peak / 2**30:.2f} GiB resident"
    )


def resident(pid: int) -> int:
    """Returns the resident bytes of a process and its children. Pages that they share count several times."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if pid in (int(fields["Pid"]), int(fields["PPid"])):
            total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    return total


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, help="of a whole job")
    parser.add_argument("--folder", type=Path, help="for it (a temporary one)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--flags", nargs="+", default=["--exact", "document", "--minhash"], help="of clean.py")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_name, tool, count, chars = options.one
        return measure(measure_name, tool, int(count), int(chars))
    if options.documents is None:
        return table(options.rounds, {500: 20_000, 3000: 5_000})
    with tempfile.TemporaryDirectory() as temporary:
        run_job(options.documents, options.folder or Path(temporary), options.workers, options.flags)


if __name__ == "__main__":
    run_command(main)
