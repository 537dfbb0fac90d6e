"""Bytes that torch's attention over documents asks for in its backward pass.

Its kernel (flash attention 2, `dq_accum` and `softmax_d`) reserves fp32 rows for every token and 128 more for
every document, empty ones included. Counted from shapes: no GPU is needed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron.data.batch import document_starts
from megatron.process import run_command
from megatron.process.command_parser import CommandParser


def scratch_bytes(tokens: int, documents: int, heads: int, head_dim: int) -> int:
    """Returns the bytes of fp32 scratch memory that one backward call of packed attention allocates."""
    return (tokens + 128 * documents) * heads * (head_dim + 1) * 4


def main() -> None:
    """Prints the scratch memory for random documents, by mean document length.

    One column pads `cu_seqlens` to a fixed size, the other has `cu_seqlens` of `Documents`."""
    parser = CommandParser(description=__doc__)
    for name, value in (("rows", 8), ("seq", 2048), ("heads", 16), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    tokens, random = options.rows * options.seq, np.random.default_rng(0)
    print(
        f"{options.rows} x {options.seq}, {options.heads} heads of {options.head_dim}: GB asked by one backward call\n"
    )
    print("| mean document | documents | `cu_seqlens` of fixed size: seq + 1 starts a row | `Documents.cu_seqlens` |")
    print("|---:|---:|---:|---:|")
    for mean in (2048, 512, 128, 32):
        begins = random.random((options.rows, options.seq)) < 1 / mean
        starts = document_starts(begins).cu_seqlens
        sizes = options.rows * (options.seq + 1) - 1, len(starts) - 1
        padded_gb, batch_gb = (scratch_bytes(tokens, n, options.heads, options.head_dim) / 1e9 for n in sizes)
        begins[:, 0] = True
        print(f"| {mean} | {begins.sum()} | {padded_gb:.2f} | {batch_gb:.2f} |")


if __name__ == "__main__":
    run_command(main)
