"""Prints what a rank of a 70B model at tp8 pp4 dp8 holds at most: the model's part, without optimizer.

`python -m tests.fake.peak`: of a rank of each pipeline stage, one micro-batch forwards and backwards with
sequence parallelism and recomputation, GiB of parameters, of the peak while they are made, and of the step's
(parameters, gradients and activations), all in bf16.
"""

import sys
from typing import Any

from tests.fake.client import FakeCuda
from tests.fake.layouts import BIG, Case
from tests.fake.shim import build, compiler

LLAMA_70B: dict[str, Any] = {
    **BIG,
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_kv_heads": 8,
    "intermediate_size": 28672,
    "padded_vocab_size": 128256,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "train_micro_batch_size_per_gpu": 1,
}
TENSOR, PIPE, DATA = 8, 4, 8


def main() -> None:
    compile_with = compiler()
    if compile_with is None:
        sys.exit("fake CUDA needs a C++ compiler; set CXX")
    process = FakeCuda(build(compile_with))
    print(f"{'rank of 256':<14}{'blocks':<10}{'parameters':>12}{'construction':>14}{'step':>8}   GiB")
    for stage in range(PIPE):
        rank = stage * TENSOR * DATA
        for blocks in (False, "block"):
            seen = process.run(Case(TENSOR * PIPE * DATA, rank, {**LLAMA_70B, "compile": blocks}))
            if seen["error"]:
                sys.exit(seen["error"])
            sizes = [seen[name] / 2**30 for name in ("parameters", "construction", "peak")]
            kind = "compiled" if blocks else "eager"
            print(f"{rank:<14}{kind:<10}{sizes[0]:>12.2f}{sizes[1]:>14.2f}{sizes[2]:>8.2f}")
    process.close()


if __name__ == "__main__":
    main()
