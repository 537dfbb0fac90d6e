"""Prints, in GiB, what a rank of a large model holds at most: `python -m tests.fake.peak`.

70B at tp8 pp4 dp8 without optimizer, of a rank of each stage: parameters, the peak while they are made, and
that of both passes of a micro-batch, with sequence parallelism and recomputation. 13B at dp8 under the native
engine: the peak while it is built, what is kept between steps, and the peak of a step. All is in bf16; what
kernels reserve within is not seen.
"""

import sys
from typing import Any

from megatron.planning.fake_cuda.shim import build, lacking
from tests.fake.client import FakeCuda
from tests.fake.layouts import BIG, LLAMA_13B, Case

LLAMA_70B: dict[str, Any] = {**BIG, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_kv_heads": 8,
                             "intermediate_size": 28672, "padded_vocab_size": 128256, "seq_length": 4096,
                             "max_position_embeddings": 4096, "train_micro_batch_size_per_gpu": 1}  # fmt: skip
TENSOR, PIPE, DATA = 8, 4, 8


def main() -> None:
    if (reason := lacking()) is not None:
        sys.exit(reason)
    process = FakeCuda(build())
    print(f"{'rank of 256':<14}{'blocks':<10}{'parameters':>12}{'construction':>14}{'passes':>8}   GiB")
    for stage in range(PIPE):
        rank = stage * TENSOR * DATA
        for blocks in (False, "block"):
            report = process.run(Case(TENSOR * PIPE * DATA, rank, {**LLAMA_70B, "compile": blocks}))
            if report["error"]:
                sys.exit(report["error"])
            sizes = [report[name] / 2**30 for name in ("parameters", "construction", "passes")]
            kind = "compiled" if blocks else "eager"
            print(f"{rank:<14}{kind:<10}{sizes[0]:>12.2f}{sizes[1]:>14.2f}{sizes[2]:>8.2f}")
    print(f"\n{'13B, rank of 8':<24}{'construction':>12}{'kept':>14}{'step':>8}   GiB")
    for stage in (1, 2, 3):
        report = process.run(Case(8, 0, {**LLAMA_13B, "zero_optimization": {"stage": stage}}, native=True))
        if report["error"]:
            sys.exit(report["error"])
        sizes = [report[name] / 2**30 for name in ("construction", "kept", "peak")]
        print(f"{f'ZeRO {stage}':<24}{sizes[0]:>12.2f}{sizes[1]:>14.2f}{sizes[2]:>8.2f}")
    process.close()


if __name__ == "__main__":
    main()
