"""Speed of generating with the quickstart model on this machine, with the cache of keys and values and without it.

The weights are random and the tokens those of greedy choice, the same both ways; ways alternate, the median counts.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.generation import Completion, Model, Sampling, complete, for_inference  # noqa: E402
from megatron.model import build_stage, init_stage  # noqa: E402
from megatron.mpu import ParallelGroups  # noqa: E402
from megatron.neox_arguments import load  # noqa: E402
from megatron.tokenizer import CharLevelTokenizer  # noqa: E402


class _Endless(CharLevelTokenizer):
    """No document ends, so that every row is as long as it may be."""

    eod = -1


def quickstart_model(recompute: bool, vocab: int) -> Model:
    args = load([ROOT / "configs" / "quickstart.yml"], {"padded_vocab_size": vocab, "recompute": recompute})
    args, groups = for_inference(args.for_world(1)), ParallelGroups.single()
    stage = build_stage(args, groups).eval()
    init_stage(stage, args, groups)
    return Model(args, groups, _Endless(), stage, torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="prompts run together (1 8)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (64)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (128)")
    parser.add_argument("--vocab", type=int, default=4096, help="rows of the embedding (4096)")
    parser.add_argument("--repeats", type=int, default=3, help="times each (3)")
    options = parser.parse_args()
    models = {recompute: quickstart_model(recompute, options.vocab) for recompute in (False, True)}
    sys.stdout.write(f"{'rows':>4} {'with cache':>12} {'without':>12}   ratio (tokens/s)\n")
    for rows in options.rows:
        prompts = torch.randint(512, (rows, options.prompt), generator=torch.Generator().manual_seed(0)).tolist()

        def run(recompute: bool, prompts: list[list[int]] = prompts) -> tuple[float, list[Completion]]:
            begun = time.perf_counter()
            done = complete(
                models[recompute], prompts, Sampling(), maximum_tokens=options.tokens, seeds=range(len(prompts))
            )
            return len(prompts) * options.tokens / (time.perf_counter() - begun), done

        runs = [(run(False), run(True)) for _ in range(options.repeats)]
        for (_, cached), (_, whole) in runs:
            if [row.tokens for row in cached] != [row.tokens for row in whole]:
                sys.stderr.write("generation.py: the texts differ\n")
                return 1
        cached_speed, speed = (statistics.median(pair[way][0] for pair in runs) for way in (0, 1))
        sys.stdout.write(f"{rows:>4} {cached_speed:>12,.0f} {speed:>12,.0f}   {cached_speed / speed:.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
