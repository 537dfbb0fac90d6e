"""Requests of lm-eval answered on this machine, beside its own `hf` backend, in one run: the same weights and
requests.

All ways alternate, the median counts; answers are held against each other. Without --model a random Llama is
made. --batch: of the `hf` backend, several in turns, of which the fastest for each kind is what ours is
compared with (`auto` takes whatever fits, which is slow on a CPU); ours chooses its own, or --ours.
"""

import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.evaluation.model_operations import model_operations  # noqa: E402
from megatron.evaluation.progress import EvaluationProgress  # noqa: E402
from megatron.generation import load_model  # noqa: E402
from megatron.generation.from_huggingface import hf_model_keys  # noqa: E402
from megatron.launch import process_info  # noqa: E402
from megatron.mpu import init_model_parallel  # noqa: E402
from megatron.neox_arguments import NeoXArgs  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.tokenizer import build_tokenizer  # noqa: E402

# hidden_size, intermediate_size, layers, heads, kv heads
SIZES = {"1M": (128, 352, 4, 4, 2), "10M": (256, 704, 8, 8, 4), "50M": (512, 1408, 12, 8, 4)}
KINDS = ("choices", "letters", "continuations", "perplexity", "text")
QUIET = logging.getLogger("benchmarks.quiet")


def make_folder(size: str, folder: Path) -> str:
    """Saves a random Llama and a BPE tokenizer of 2048 tokens in HuggingFace's format; returns the folder."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train([str(path) for path in (ROOT / "docs").glob("*.md")], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    hidden, inner, layers, heads, kv_heads = SIZES[size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=2048, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def requests_of(kind: str, count: int) -> list[Any]:
    """Returns about `count` lm-eval requests with texts from this repository's pages. kind: one of KINDS."""
    from lm_eval.api.instance import Instance

    text = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    words, draw = text.split(), random.Random(0)

    def passage(length: int) -> str:
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    def instance(name: str, number: int, *arguments: Any) -> Any:
        return Instance(request_type=name, doc={}, arguments=arguments, idx=number, metadata=("benchmark", number, 1))

    if kind == "perplexity":
        return [instance("loglikelihood_rolling", i, passage(draw.randint(50, 300))) for i in range(count)]
    if kind == "text":
        wishes = {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False}
        return [instance("generate_until", i, passage(draw.randint(20, 100)), dict(wishes)) for i in range(count)]
    if kind == "continuations":
        pairs = [(passage(draw.randint(30, 120)), f" {passage(draw.randint(1, 6))}") for _ in range(count)]
    else:
        pairs = []
        for _ in range(count // 4):
            context = passage(draw.randint(60, 160))
            for letter in "ABCD":
                pairs.append((context, f" {letter}" if kind == "letters" else f" {passage(draw.randint(2, 8))}"))
    return [instance("loglikelihood", i, *pair) for i, pair in enumerate(pairs)]


def neox_lm(folder: str, batch: str) -> Any:
    from megatron.evaluation.language_model import NeoXLM

    process = process_info()
    size = batch if batch == "auto" else int(batch)
    args = NeoXArgs.from_dict({**hf_model_keys(folder), "eval_batch_size": size}).for_world(1)
    model = load_model(args, init_model_parallel(args, process, QUIET), build_tokenizer(args), QUIET)
    operations = model_operations(model)
    return NeoXLM(model, lambda name, *arguments: operations[name](*arguments), EvaluationProgress(QUIET))


def hf_lm(folder: str, batch: str, model: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=folder, dtype={"fp32": "float32", "bf16": "bfloat16"}[model.args.params_dtype],
        device=str(model.groups.device), batch_size=batch if batch == "auto" else int(batch),
    )  # fmt: skip


def seconds_of(clock: Callable[[], float], work: Callable[[], Any]) -> tuple[float, Any]:
    start = clock()
    result = work()
    return clock() - start, result


def furthest(answers_a: list[Any], answers_b: list[Any]) -> str:
    if isinstance(answers_a[0], str):
        return f"{sum(a == b for a, b in zip(answers_a, answers_b, strict=True))} of {len(answers_a)} texts equal"
    values = [
        [answer[0] if isinstance(answer, tuple) else answer for answer in side] for side in (answers_a, answers_b)
    ]
    return f"{max(abs(a - b) for a, b in zip(*values, strict=True)):.1e} apart"


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="a HuggingFace folder, instead of --size")
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--batch", nargs="+", default=["1", "4", "16", "64"], metavar="N")
    parser.add_argument("--ours", default="auto", metavar="N", help="our batch (eval_batch_size)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: the process's own")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as place:
        folder = options.model or make_folder(options.size, Path(place))
        models = {"ours": neox_lm(folder, options.ours)}
        models |= {batch: hf_lm(folder, batch, models["ours"].model) for batch in options.batch}
        device = models["ours"].model.groups.device
        print(f"{options.model or options.size} on {device}, {options.requests} requests a kind")
        print(f"{'kind':<14} {'ours/s':>9} {'hf/s':>9} {'batch':>6} {'ratio':>6}   answers; hf/s by batch")
        for kind in options.kinds:
            requests = requests_of(kind, options.requests)
            method = requests[0].request_type
            times: dict[str, list[float]] = {name: [] for name in models}
            answers: dict[str, list[Any]] = {}
            for turn in range(options.repeats + 1):
                for name, model in models.items():
                    work = partial(getattr(model, method), requests, disable_tqdm=True)
                    seconds, answers[name] = seconds_of(clock, work)
                    if turn:  # the first one warms up
                        times[name].append(seconds)
            rates = {
                name: len(requests) / statistics.median(seconds_of_name) for name, seconds_of_name in times.items()
            }
            neox_rate = rates.pop("ours")
            best = max(rates, key=rates.__getitem__)
            other_rates = ", ".join(f"{rate:.1f} in {batch}" for batch, rate in rates.items())
            print(
                f"{kind:<14} {neox_rate:>9.1f} {rates[best]:>9.1f} {best:>6} {neox_rate / rates[best]:>6.2f}   "
                f"{furthest(answers['ours'], answers[best])}; {other_rates}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    run_command(main)
