"""Tokens a second of generation, greedy and drawn, by the same random Llama in one process.

Every row has a prompt of the same length and gets as many tokens, so that the speed of a step counts (mixed
lengths: benchmarks/generation.py). Ours with and without captured decode steps; transformers with its growing
cache, and at its best with a static cache, for which it compiles itself; vLLM where it is installed, from a
folder of the same weights. All take turns with prompts of each turn's own; the first turn warms up, medians
of the others count. Texts are held against the first way's: in bf16 two kernels may choose two tokens.

--draw: as reinforcement learning samples, with log-probabilities at temperature 1, ours alone; then other
weights are handed over by a folder, as to servers of samples (rollout.servers).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.generation import SIZES, neox_model, transformers_model
from megatron.generation import Batcher, Model, Request, SamplingParams, complete
from megatron.generation.weight_updates import WeightUpdate, update_weights
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

Texts = list[list[int]]
Run = Callable[[Texts, int], Texts]
"""From prompts and a number of tokens to what is generated."""
CAPTURED, EAGER, GROWING, STATIC, VLLM = "captured", "eager", "transformers", "static", "vllm"
NAMES = {
    CAPTURED: "ours, captured steps",
    EAGER: "ours",
    GROWING: "transformers",
    STATIC: "transformers, static cache, compiled",
    VLLM: "vLLM",
}


class Row(NamedTuple):
    """The speed of one way to generate `rows` texts at a time.

    seconds: of one turn. beside_ours: speed divided by the first way's, in the same turns. same: share of
    tokens before the first difference from the first way's tokens.
    """

    generation: str
    name: str
    rows: int
    tokens: int
    seconds: float
    tokens_per_second: float
    beside_ours: float
    same: float


class HandOver(NamedTuple):
    """The time in which a serving model loads new weights from a folder, and the bytes of their files."""

    name: str
    seconds: float
    bytes: int


def batcher_way(model: Model, captured: bool) -> Run:
    """Returns a function that decodes greedily with our Batcher, as a server does.

    Each number of rows keeps one Batcher. captured: with CUDA graphs, which are captured once."""
    model = _with_graphs(model, captured)
    batchers: dict[int, Batcher] = {}

    def run(prompts: Texts, tokens: int) -> Texts:
        count = len(prompts)
        if count not in batchers:
            batchers[count] = Batcher(model, maximum_rows=count, tokens=count * (len(prompts[0]) + tokens))
        batcher, texts = batchers[count], dict[int, list[int]]()
        for prompt in prompts:
            texts[batcher.add(Request(prompt, maximum_tokens=tokens, stop_token_ids=(), text=False))] = []
        while batcher.busy:
            for event in batcher.step():
                texts[event.id] += event.tokens
        return list(texts.values())

    return run


def sampling_way(model: Model, captured: bool) -> Run:
    """Returns a function that samples at temperature 1 with log-probabilities, as `rollouts` does.

    captured: with CUDA graphs, which each call captures again."""
    model = _with_graphs(model, captured)

    def run(prompts: Texts, tokens: int) -> Texts:
        completions = complete(
            model, prompts, SamplingParams(1.0), maximum_tokens=tokens, seeds=range(len(prompts)), stop_token_ids=(),
            logprobs=0,
        )  # fmt: skip
        return [completion.tokens for completion in completions]

    return run


def _with_graphs(model: Model, captured: bool) -> Model:
    return replace(model, args=model.args.replace(decode_cuda_graphs=captured))


def transformers_way(model: Any, static: bool) -> Run:
    """Returns a function that decodes greedily with transformers' `generate`. static: with a static cache."""
    cache_options = {"cache_implementation": "static"} if static else {}

    @torch.no_grad()
    def run(prompts: Texts, tokens: int) -> Texts:
        ids = torch.tensor(prompts, device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **cache_options,
        )
        return out[:, ids.shape[1] :].tolist()

    return run


def vllm_way(model: Any, folder: str, positions: int) -> Run:
    """Returns a function that decodes greedily with vLLM, which may use 40 % of the GPU's memory.

    folder: receives the weights for vLLM. positions: the longest text."""
    from vllm import LLM  # type: ignore[import-not-found]
    from vllm import SamplingParams as Params

    model.save_pretrained(folder)
    server = LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=positions, gpu_memory_utilization=0.4,
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(prompts: Texts, tokens: int) -> Texts:
        params = Params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        answers = server.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return run


def in_turns(
    runs: dict[str, Run], prompts: Callable[[], Texts], tokens: int, turns: int, device: torch.device
) -> list[Row]:
    """Runs each way once per turn, and returns one row of median times for each.

    prompts: returns new prompts at each turn, because our cache would know earlier ones."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, Texts] = {}
    for turn in range(turns + 1):
        turn_prompts = prompts()
        for name, run in runs.items():
            start = time.perf_counter()
            texts[name] = run(turn_prompts, tokens)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    base = next(iter(runs))
    rows = []
    for name, turn_seconds in seconds.items():
        ratio = median(base_s / way_s for base_s, way_s in zip(seconds[base], turn_seconds, strict=True))
        count, median_s = len(turn_prompts) * tokens, median(turn_seconds)
        same_share = sum(map(_matching_prefix, texts[name], texts[base])) / count
        rows.append(
            Row(
                f"{len(turn_prompts)} rows",
                NAMES[name],
                len(turn_prompts),
                tokens,
                median_s,
                count / median_s,
                ratio,
                same_share,
            )
        )
    return rows


def _matching_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference between two texts."""
    return next((i for i, (token_a, token_b) in enumerate(zip(a, b, strict=True)) if token_a != token_b), len(a))


def hand_over(model: Model, source: Any, device: torch.device) -> HandOver:
    """Saves the weights of `source` in a folder, and measures how long `model` takes to load them."""
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        start = time.perf_counter()
        update_weights(model, WeightUpdate(folder, 1))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return HandOver("other weights from a folder", time.perf_counter() - start, size)


def main() -> None:
    """Measures the chosen ways, and prints a table for each number of rows."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--shape", choices=SIZES, help="default: 1.4B on a GPU, 1M on a CPU")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="texts at a time (1 32)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[CAPTURED, EAGER, GROWING], help="ways")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="sample, with log-probabilities; ours alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, where there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    shape = options.shape or ("1.4B" if on_gpu else "1M")
    ways = [way for way in options.only if on_gpu or way != CAPTURED]  # there are no graphs on a CPU
    source = transformers_model(shape, device, torch.bfloat16 if on_gpu else torch.float32)
    model = neox_model(source)
    rows: list[Row] = []
    result: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        for way in ways:
            if way in (CAPTURED, EAGER):
                runs[way] = (sampling_way if options.draw else batcher_way)(model, way == CAPTURED)
            elif way == VLLM:
                runs[way] = vllm_way(source, folder, options.prompt + options.tokens)
            else:
                runs[way] = transformers_way(source, way == STATIC)
        generator = torch.Generator().manual_seed(0)
        for count in options.rows:
            shaped = partial(torch.randint, SIZES[shape][-1], (count, options.prompt), generator=generator)
            rows += in_turns(runs, partial(_lists, shaped), options.tokens, options.rounds, device)
            result["rows"] = [row._asdict() for row in rows]
            _write(options.json, result)
    kind = "drawn" if options.draw else "greedy"
    print(f"\n{shape}, {kind}, prompts of {options.prompt} tokens, {options.tokens} more, on {device.type}\n")
    print("| rows | | tokens/s | beside the first | same tokens |\n|---:|---|---:|---:|---:|")
    for row in rows:
        print(f"| {row.rows} | {row.name} | {row.tokens_per_second:,.0f} | {row.beside_ours:.2f} | {row.same:.0%} |")
    if options.draw:
        update = hand_over(model, source, device)
        print(f"\n{update.name}: {update.seconds:.2f} s, {update.bytes / 1e9:.2f} GB")
        result["hand_over"] = update._asdict()
    _write(options.json, result)


def _lists(make: Callable[[], torch.Tensor]) -> Texts:
    return make().tolist()


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
