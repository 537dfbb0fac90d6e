"""How the data room scales: index maps of 100 million documents, blends of thousands of sets, a step with its
loader.

python benchmarks/data_scale.py [index_maps] [blend] [sets] [loader]     # all of them without a name
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data import (  # noqa: E402
    IndexedDataset,
    IndexedDatasetWriter,
    build_blend,
    build_datasets,
    build_packed,
    data_fingerprint,
)
from megatron.data.index_cache import ensure_cached, load_cached
from megatron.data.index_maps import IndexKey, IndexMaps, Packing
from megatron.data.indexed_dataset import data_path, index_path, write_index
from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.training import start
from megatron.training.loop import steps_of
from megatron.training.method import StepData

BLOCK = 1 << 20


@contextmanager
def measured(label: str) -> Iterator[None]:
    """Prints the seconds spent in the context, and by how much its memory peak exceeded the start.

    Only memory of the process itself counts, not mapped files."""
    base_bytes, peak, done = _own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        done.set()
        thread.join()
    print(f"  {label:58} {seconds:8.2f} s  {max(0, peak[0] - base_bytes) / 1e6:8.0f} MB", flush=True)


def _own_memory() -> int:
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def index_maps(documents: int, seq_length: int = 2048) -> None:
    """Measures building, writing and opening the index maps of one epoch.

    documents: number of documents, of about 500 tokens each. The `.bin` is a sparse file."""
    print(f"index maps of {documents:,} documents, seq_length {seq_length}")
    with tempfile.TemporaryDirectory() as folder:
        prefix, tokens = Path(folder) / "x", 0

        def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            random = np.random.default_rng(0)
            for begin in range(0, documents, BLOCK):
                sizes = random.lognormal(5.7, 1, min(BLOCK, documents - begin)).astype(np.int64) + 1
                yield sizes, np.arange(1, len(sizes) + 1)

        for sizes, _ in blocks():
            tokens += int(sizes.sum())
        write_index(index_path(prefix), np.dtype(np.uint16), blocks)
        with open(data_path(prefix), "wb") as file:
            file.truncate(2 * tokens)
        print(f"  {tokens:,} tokens, {index_path(prefix).stat().st_size / 1e9:.2f} GB of .idx")
        with measured("the rank that writes: open and check the pair"):
            indexed = IndexedDataset(prefix)
        with measured("its SHA-256 of the .idx"):
            digest = indexed.index_sha256
        samples = (tokens - 1) // seq_length
        key = IndexKey(digest, 0, documents, samples, seq_length, 1234, Packing())
        with measured("its build of the maps"):
            maps = build_packed(indexed.sizes, 0, documents, samples, seq_length, 1234)
        print(f"  {samples:,} samples, maps of {sum(array.nbytes for array in vars(maps).values()) / 1e6:.0f} MB")
        with measured("its writing of them"):
            ensure_cached(Path(folder), {key: partial(IndexMaps, **vars(maps))})
        with measured("its check of their checksums, at a later start"):
            ensure_cached(Path(folder), {key: partial(IndexMaps, **vars(maps))})
        with measured("each other rank: open the pair and the maps"):
            IndexedDataset(prefix, digest)
            load_cached(Path(folder), [key]).maps(key, IndexMaps)


def blend(sets: int, samples: int) -> None:
    print(f"blend of {sets:,} sets")
    weights = np.random.default_rng(0).random(sets) + 0.01
    with measured(f"order of {samples:,} samples"):
        build_blend(weights.tolist(), samples)


def sets(count: int) -> None:
    """Measures a first and a later start of one rank with a blend of `count` data sets of 100 documents."""
    print(f"start with a blend of {count:,} sets")
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        paths = [f"{folder}/{i}" for i in range(count)]
        for path in paths:
            with IndexedDatasetWriter(path, np.uint16) as writer:
                sizes = random.integers(50, 500, 100)
                writer.add_documents(random.integers(0, 250, sizes.sum()).astype(np.uint16), sizes)
        args = NeoXArgs.from_dict({
            "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 64, "pos_emb": "rotary",
            "max_position_embeddings": 64, "train_micro_batch_size_per_gpu": 8, "train_iters": 4 * count,
            "eval_iters": 0, "train_data_paths": paths, "tokenizer_type": "CharLevelTokenizer",
            "index_cache_dir": f"{folder}/cache",
        })  # fmt: skip
        for start_kind in ("first", "later", "later"):
            maps = _memory_maps()
            with measured(f"{start_kind} start: sets, their maps and fingerprints"):
                datasets = build_datasets(args, train_batch_size=8, on_one_rank=lambda work: work())
                data_fingerprint(args)
            assert datasets.train is not None
            files = len(list(Path(args.index_cache_dir or "").iterdir()))
            print(f"  {_memory_maps() - maps:,} memory maps, {files:,} cache entries")
            del datasets


def _memory_maps() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def loader(pairs: int, steps: int, workers: int) -> None:
    """Measures how much the data loader slows training steps.

    Blocks of `steps` steps take batches from the loader and reuse one batch, in turn, `pairs` times each. So
    changes in the machine's speed affect both."""
    print(f"step of a small model on this machine, {workers} loader workers")
    with tempfile.TemporaryDirectory() as folder:
        prefix, random = Path(folder) / "x", np.random.default_rng(0)
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            sizes = random.lognormal(5.7, 1, 40_000).astype(np.int64) + 1
            writer.add_documents(random.integers(0, 250, sizes.sum()).astype(np.uint16), sizes)
        warm_up = 4 * max(1, workers)  # what was loaded while the block before ran
        args = NeoXArgs.from_dict({
            "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "norm": "rmsnorm",
            "max_position_embeddings": 512, "pos_emb": "rotary", "train_micro_batch_size_per_gpu": 4,
            "train_iters": 2 * pairs * (steps + warm_up) + 1, "eval_iters": 0, "data_path": str(prefix), "split": "1",
            "tokenizer_type": "CharLevelTokenizer", "num_workers": workers, "gradient_clipping": 1.0,
            "precision": "fp32", "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        })  # fmt: skip
        training = start(args, process_info())
        training.watchdog.close()
        batches = map(StepData.take, steps_of(training))
        ready = next(batches)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        waited = 0.0
        for block in range(2 * pairs):
            loads, times = bool(block % 2), []
            for step in range(warm_up + steps):
                started = time.perf_counter()
                batch = next(batches) if loads else ready
                if loads and step >= warm_up:
                    waited += time.perf_counter() - started
                training.engine.train_step(batch, 1e-4)
                if step >= warm_up:
                    times.append(time.perf_counter() - started)
            seconds[loads].append(statistics.median(times))
        del batches
        training.close()
    change = statistics.median(on / off for on, off in zip(seconds[True], seconds[False], strict=True)) - 1
    unloaded, loaded = (statistics.median(seconds[loads]) for loads in (False, True))
    share = waited / (steps * sum(seconds[True]))
    print(f"  without the loader {unloaded * 1e3:.2f} ms, with it {loaded * 1e3:.2f} ms; {100 * change:+.2f} % by pair")
    print(f"  {100 * share:.2f} % of the step is waiting for its batch")


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="index_maps, blend, sets, loader (all)")
    parser.add_argument("--documents", type=int, default=100_000_000, help="of index_maps (100,000,000)")
    parser.add_argument("--sets", type=int, default=2000, help="of blend and sets (2000)")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of blend (1,000,000)")
    parser.add_argument("--steps", type=int, default=30, help="of a block of loader (30)")
    parser.add_argument("--pairs", type=int, default=6, help="of blocks of loader (6)")
    parser.add_argument("--workers", type=int, default=2, help="of loader (2)")
    options = parser.parse_args()
    unknown = set(options.names) - {"index_maps", "blend", "sets", "loader"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not options.names or "index_maps" in options.names:
        index_maps(options.documents)
    if not options.names or "blend" in options.names:
        blend(options.sets, options.samples)
    if not options.names or "sets" in options.names:
        sets(options.sets)
    if not options.names or "loader" in options.names:
        loader(options.pairs, options.steps, options.workers)
    return 0


if __name__ == "__main__":
    run_command(main)
