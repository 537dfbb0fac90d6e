"""Attention of context ranks over packed rows: the rank that has most, relative to the mean.

A step takes as long as that rank. One column has two chunks of the row on each rank, the other the columns
that the loader chooses. Counted from document lengths (log-normal, seed 0): no GPU is needed.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.data.context_parts import ContextLayout
from megatron.process import run_command
from megatron.process.command_parser import CommandParser


def heaviest_share(begins: np.ndarray, columns: list[np.ndarray]) -> float:
    """Returns the pairs of query and key of the rank that has most, divided by the mean."""
    seq = begins.shape[1]
    documents = np.maximum.accumulate(np.where(begins, np.arange(seq), 0), axis=1)
    pairs = (np.arange(seq) - documents + 1).sum(0)
    rank_pairs = [pairs[part[part < seq]].sum() for part in columns]
    return float(max(rank_pairs) / np.mean(rank_pairs))


def main() -> None:
    """Prints the mean over batches, and the milliseconds that the choice takes."""
    parser = CommandParser(description=__doc__)
    for name, value in (("batches", 20), ("rows", 1), ("seq", 131072), ("ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    layout, random = ContextLayout(options.ranks), np.random.default_rng(0)
    chunks = [layout.columns(options.seq, rank) for rank in range(options.ranks)]
    print(f"{options.rows} x {options.seq} tokens on {options.ranks} context ranks, {options.batches} batches\n")
    print("| median document | documents of a batch | two chunks a rank | chosen columns | ms |")
    print("|---:|---:|---:|---:|---:|")
    for median in (500, 2000, 8000, 32000):
        results = []
        for _ in range(options.batches):
            begins = np.zeros((options.rows, options.seq), bool)
            for row in begins:
                ends = random.lognormal(np.log(median), 1.2, options.seq).astype(int).clip(1).cumsum()
                row[[0, *ends[ends < options.seq]]] = True
            start = time.perf_counter()
            columns = layout.columns_of_ranks(begins)
            duration = time.perf_counter() - start
            results.append((begins.sum(), heaviest_share(begins, chunks), heaviest_share(begins, columns), duration))
        documents, chunk_share, chosen_share, seconds = np.mean(results, 0)
        print(f"| {median} | {documents:.0f} | {chunk_share:.2f} | {chosen_share:.2f} | {1e3 * seconds:.0f} |")


if __name__ == "__main__":
    run_command(main)
