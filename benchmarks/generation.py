"""Generation on this machine beside `transformers.generate`, in one run: the same random Llama, greedy
choice.

Prompts of mixed length are continued 16 (`--rows`) at a time, each up to a length of its own; the logarithms
of
lengths are uniform: many short texts, few long ones. transformers runs them in padded batches, each until its
last row has all its tokens: at its best batches of texts sorted by how many tokens they will get, as if that
were known before, and as they come. Here a row makes place for the next prompt. All alternate, the median
counts; texts are held against each other. With --equal all texts get equally many tokens, so that only the
speed of a step counts.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.checkpointing.families.convert import from_hf  # noqa: E402
from megatron.generation import Batcher, Model, Request, for_inference  # noqa: E402
from megatron.model import build_stage, materialize  # noqa: E402
from megatron.model.init import stage_parameters  # noqa: E402
from megatron.mpu import DTYPES, ParallelGroups  # noqa: E402
from megatron.neox_arguments import NeoXArgs  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.tokenizer import CharLevelTokenizer  # noqa: E402

# hidden_size, intermediate_size, layers, heads, kv heads, vocabulary; 135M is SmolLM2's
SIZES = {
    "rehearsal": (64, 128, 2, 2, 1, 512),
    "1M": (128, 352, 4, 4, 2, 512),
    "10M": (256, 704, 8, 8, 4, 4096),
    "50M": (512, 1408, 12, 8, 4, 8192),
    "135M": (576, 1536, 30, 9, 3, 49152),
    "1.4B": (2048, 5504, 24, 16, 16, 50304),
}
_POSITIONS = 1024
Job = tuple[list[int], int]  # prompt, tokens to generate


def transformers_model(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    hidden, inner, layers, heads, kv_heads, vocab = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, max_position_embeddings=_POSITIONS, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    with device:
        model: Any = transformers.LlamaForCausalLM(config)
    return model.to(dtype).eval()


@torch.no_grad()
def neox_model(model: Any) -> Model:
    """Returns this project's model with the weights of a transformers model."""
    config = model.config.to_dict()
    keys, tensors = from_hf(config, model.state_dict().__getitem__, padded_vocab_size=config["vocab_size"])
    precision = {torch.float32: "fp32", torch.bfloat16: "bfloat16"}[model.dtype]
    args = for_inference(NeoXArgs.from_dict({**keys, "seq_length": _POSITIONS, "precision": precision}).for_world(1))
    groups = ParallelGroups.single(model.device)
    dtype = DTYPES[args.params_dtype]
    stage = materialize(build_stage(args, groups), dtype)
    param_by_name = {(layer, name): param for layer, name, param in stage_parameters(stage)}
    for layer, name, value in tensors:
        param_by_name[layer, name].copy_(value)

    class Tokens(CharLevelTokenizer):
        vocab_size = config["vocab_size"]

    return Model(args, groups, Tokens(), stage.eval(), dtype)


def jobs_of(count: int, prompt: Sequence[int], tokens: Sequence[int], vocab: int, equal: bool) -> list[Job]:
    generator = torch.Generator().manual_seed(0)

    def sample_length(bounds: Sequence[int]) -> int:
        log_low, log_high = math.log(bounds[0]), math.log(bounds[1])
        return round(math.exp(log_low + (log_high - log_low) * float(torch.rand((), generator=generator))))

    return [
        (
            torch.randint(vocab, (sample_length(prompt),), generator=generator).tolist(),
            tokens[1] if equal else sample_length(tokens),
        )
        for _ in range(count)
    ]


def run_transformers(model: Any, jobs: Sequence[Job], rows: int) -> list[list[int]]:
    texts = []
    for start in range(0, len(jobs), rows):
        batch = jobs[start : start + rows]
        width, max_tokens = max(len(prompt) for prompt, _ in batch), max(tokens for _, tokens in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        ids, mask = ids.to(model.device), mask.to(model.device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        texts += [row[width : width + tokens].tolist() for row, (_, tokens) in zip(out, batch, strict=True)]
    return texts


def run_sorted(model: Any, jobs: Sequence[Job], rows: int) -> list[list[int]]:
    """Runs `run_transformers` with jobs sorted by tokens to generate, then by prompt length.

    Returns the texts in the order of `jobs`."""
    order = sorted(range(len(jobs)), key=lambda i: (jobs[i][1], len(jobs[i][0])))
    texts = dict(zip(order, run_transformers(model, [jobs[i] for i in order], rows), strict=True))
    return [texts[i] for i in range(len(jobs))]


def run_neox(model: Model, jobs: Sequence[Job], rows: int) -> list[list[int]]:
    batcher = Batcher(model, maximum_rows=rows)
    for prompt, tokens in jobs:
        batcher.add(Request(prompt, maximum_tokens=tokens, stop_token_ids=()))
    texts: list[list[int]] = [[] for _ in jobs]
    while batcher.busy:
        for event in batcher.step():
            texts[event.id] += event.tokens
    return texts


def timed(
    clock: Callable[[], float], run: Callable[..., list[list[int]]], *arguments: Any
) -> tuple[float, list[list[int]]]:
    start = clock()
    texts = run(*arguments)
    return sum(map(len, texts)) / (clock() - start), texts


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["1M", "10M", "50M"], choices=SIZES, help="of models")
    parser.add_argument("--rows", type=int, default=16, help="texts at a time (16)")
    parser.add_argument("--jobs", type=int, default=64, help="texts in all (64)")
    parser.add_argument("--prompt", type=int, nargs=2, default=[8, 256], help="tokens of prompts, from and to (8 256)")
    parser.add_argument("--tokens", type=int, nargs=2, default=[8, 256], help="tokens to generate (8 256)")
    parser.add_argument("--equal", action="store_true", help="all texts get the larger number of tokens")
    parser.add_argument("--repeats", type=int, default=3, help="times each (3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on a CPU")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: the process's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, clock = torch.device(options.device), time.process_time if options.clock == "cpu" else time.perf_counter
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = f"{'model':>6} {'ours':>9} {'transformers, sorted':>21} {'ratio':>6} {'as they come':>13} {'ratio':>6}"
    sys.stdout.write(f"{heads}   (tokens/s, {options.rows} rows)\n")
    for size in options.sizes:
        model = transformers_model(size, device, dtype)
        neox = neox_model(model)
        jobs = jobs_of(options.jobs, options.prompt, options.tokens, SIZES[size][-1], options.equal)
        run_neox(neox, jobs[:2], 2), run_transformers(model, [(prompt, 2) for prompt, _ in jobs[:2]], 2)
        ways = ((run_neox, neox), (run_sorted, model), (run_transformers, model))
        runs = [[timed(clock, *way, jobs, options.rows) for way in ways] for _ in range(options.repeats)]
        texts = [texts_of_way for _, texts_of_way in runs[0]]
        num_differing = sum(a != b or a != c for a, b, c in zip(*texts, strict=True))
        speed, sorted_speed, unsorted_speed = (statistics.median(turn[way][0] for turn in runs) for way in range(3))
        sys.stdout.write(
            f"{size:>6} {speed:>9,.0f} {sorted_speed:>21,.0f} {speed / sorted_speed:>6.2f} {unsorted_speed:>13,.0f} "
            f"{speed / unsorted_speed:>6.2f}   {num_differing} of {len(jobs)} texts differ\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    run_command(main)
