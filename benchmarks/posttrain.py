"""DPO beside TRL's DPOTrainer in one process: the same weights, the same token ids, turns in rounds.

Lengths are those of OLMo 3 Think's pairs (log-normal, median 2,138, 95 % below 15,433, cut at 8,192), on a
CPU a sixteenth of that. Ours packs pairs best-fit and scores the reference once; TRL works at its best
ordinary setting (a pair at a time, so that only its two answers are padded to one length, accumulated to 8;
the reference's scores made before; no gradient checkpointing), and pads batches of 8 pairs by its defaults
and between the two. Each run is one pass over the pairs, from first batch to last step. docs/benchmarks.md
says what the columns mean.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 4096, "scale": 16},
    "rehearsal": {"layers": 2, "hidden": 64, "heads": 2, "ffn": 128, "vocab": 512, "scale": 64},
    "400M": {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 50304, "scale": 1},
}
MEDIAN, P95, CUT = 2138, 15433, 8192  # tokens of a prompt with an answer
PROMPT = 200  # median
OURS, TWICE = "ours", "ours, prefix_sharing: false"
# DPOConfig beyond its defaults; the fastest first: without padding between pairs, which accumulation leaves
# out.
TRL: dict[str, dict[str, Any]] = {
    "TRL at its best: a pair at a time, accumulated, precomputed, no checkpointing": {
        "precompute_ref_log_probs": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 1,
    },
    "TRL, its defaults": {},
    "TRL, precomputed": {"precompute_ref_log_probs": True},
    "TRL, precomputed, no checkpointing": {"precompute_ref_log_probs": True, "gradient_checkpointing": False},
}
RIVALS: dict[str, int | None] = {"all": None, "best": 1, "none": 0}  # how many of them take part
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Pair = tuple[list[int], list[int], list[int]]  # prompt, chosen, rejected


class Turn(NamedTuple):
    """One pass. reference: seconds before the first step; tokens: of all pairs, prompts counted twice;
    places: of rows; padding: share of them; first, last: losses; score: mean log-probability of an answer
    under the reference, NaN where it was not made before; peak: bytes of the GPU's memory, 0 on a CPU."""

    seconds: float
    reference: float
    pairs: int
    steps: int
    tokens: int
    places: int
    padding: float
    first: float
    last: float
    score: float
    peak: int = 0


def law(count: int, median: float, sigma: float, z: np.ndarray) -> np.ndarray:
    """Lengths `[count]` that are the quantiles of a log-normal distribution, in the order of z."""
    normal = statistics.NormalDist()
    values = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    return np.maximum(1, np.round(median * np.exp(sigma * values[z.argsort().argsort()])))


def pairs_of(count: int, scale: int, vocab: int) -> list[Pair]:
    """Pairs of random ids, whose two answers have lengths with a correlation of 0.8."""
    random = np.random.default_rng(0)
    sigma = float(np.log(P95 / MEDIAN)) / statistics.NormalDist().inv_cdf(0.95)
    z = random.standard_normal((3, count))
    cut = CUT // scale
    prompts = np.minimum(law(count, PROMPT / scale, 1.0, z[2]), cut // 2)
    whole = (np.minimum(law(count, MEDIAN / scale, sigma, x), cut) for x in (z[0], 0.8 * z[0] + 0.6 * z[1]))
    answers = [np.maximum(2, length - prompts) for length in whole]
    return [
        tuple(random.integers(4, vocab, int(size)).tolist() for size in sizes)
        for sizes in zip(prompts, *answers, strict=True)
    ]  # type: ignore[misc]


def llama(shape: dict[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], max_position_embeddings=CUT,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.05,
        )
    )  # fmt: skip


def products(shape: dict[str, int]) -> tuple[int, int]:
    """Weights that a token is multiplied with: in blocks, in the head."""
    hidden = shape["hidden"]
    return shape["layers"] * (4 * hidden**2 + 3 * hidden * shape["ffn"]), hidden * shape["vocab"]


# -- ours ----------------------------------------------------------------------------------------------------


def write_pairs(pairs: list[Pair], folder: Path) -> dict[str, list[str]]:
    """Files as preprocess_data_with_chat_template.py makes them; the keys that name them."""
    from megatron.data import IndexedDatasetWriter

    keys = {}
    for side, which in (("pos", 1), ("neg", 2)):
        for kind in ("", "_label"):
            name = str(folder / f"{side}{kind}")
            with IndexedDatasetWriter(name, np.int32) as writer:
                for pair in pairs:
                    prompt = [-100] * len(pair[0]) if kind else pair[0]
                    writer.add_document(np.array(prompt + pair[which], np.int32))
            keys[f"{side}_train{kind}_data_paths"] = [name]
    return keys


def settings(options: argparse.Namespace, pairs: list[Pair], model: Path, data: dict[str, list[str]]) -> dict[str, Any]:
    """A run's keys. Rows a step hold as many pairs as a batch of TRL's, on average."""
    from megatron.checkpointing.families import from_hf

    config = json.loads((model / "config.json").read_text())
    keys, _ = from_hf(config, lambda name: torch.empty(0), padded_vocab_size=config["vocab_size"])
    cut = CUT // options.scale
    length = 2 * cut  # a pair of the longest answers
    tokens = sum(len(prompt) + 1 + len(chosen) + len(rejected) for prompt, chosen, rejected in pairs)
    rows = max(1, round(options.batch * tokens / len(pairs) / length))
    return {
        **keys,
        **data,
        "train_impl": "dpo",
        "dataset_impl": "pairwise",
        "pack_impl": "best_fit",
        "max_length": cut,
        "seq_length": length,
        "max_position_embeddings": length,
        "tokenizer_type": "CharLevelTokenizer",
        "load": str(model),
        "finetune": True,
        "train_epochs": 1,
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": options.micro_rows or rows,
        "eval_iters": 0,
        "log_interval": 10,
        "precision": {"bf16": "bfloat16", "fp32": "fp32"}[options.precision],
        "distributed_backend": "nccl" if options.device == "cuda" else "gloo",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "betas": [0.9, 0.999], "eps": 1e-8}},
        "lr_decay_style": "linear",
        "min_lr": 0.0,
        "warmup": 0.0,
        "weight_decay": 0.0,
        "gradient_clipping": 1.0,
    }


def run_ours(options: argparse.Namespace, keys: dict[str, Any], folder: Path) -> Turn:
    """Train as train.py does."""
    from megatron.data.preferences.reference_scores import responses_of
    from megatron.launch import process_info
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup, start, train
    from megatron.training.preference.reference_cache import read_scores

    clock, taken, losses = CLOCKS[options.clock], [0.0], []
    prepare = setup.resume_with_reference

    def timed(*given: Any) -> Any:
        begun = clock()
        found = prepare(*given)
        wait(options.device)
        taken[0] = clock() - begun
        return found

    def noted(*given: Any) -> Any:
        losses.append(step(*given))
        return losses[-1]

    args = NeoXArgs.from_dict({**keys, "reference_cache_dir": str(folder / "references")})
    # TRL would take what is set there for a run of several processes.
    with mock.patch.dict(os.environ), mock.patch.object(setup, "resume_with_reference", timed):
        training = start(args, process_info(env={}))
        engine = type(training.engine)
        step = engine.train_step
        with mock.patch.object(engine, "train_step", noted):
            begun = clock()
            train(training)
            wait(options.device)
            seconds = clock() - begun
        training.close()
    assert training.datasets.train is not None
    samples: list[Any] = [training.datasets.train[i] for i in range(training.progress.consumed_samples)]
    tokens = sum(len(response.tokens) for sample in samples for response in responses_of(sample))
    rows = [row for sample in samples for row in sample.response_ids]
    places, filled = sum(row.size for row in rows), sum(int((row >= 0).sum()) for row in rows)
    pairs = sum(len(sample.preference_labels) for sample in samples) // 2
    scores = read_scores(next((folder / "references").iterdir()))["sum"]
    return Turn(
        seconds, taken[0], pairs, len(losses), tokens, places, 1 - filled / places,
        float(losses[0].loss), float(losses[-1].loss), float(scores.mean()),
    )  # fmt: skip


# -- TRL -----------------------------------------------------------------------------------------------------


def run_trl(options: argparse.Namespace, more: dict[str, Any], pairs: list[Pair], model: Path, folder: Path) -> Turn:
    from datasets import Dataset, load_from_disk
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    clock, taken, places, losses = CLOCKS[options.clock], [0.0], [0, 0], []

    class Trainer(DPOTrainer):
        """Given ids; notes what is asked here."""

        def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *given: Any) -> Any:
            begun = clock()
            found = super()._precompute_ref_logps(*given)
            wait(options.device)
            taken[0] = clock() - begun
            return found

        def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            mask = inputs["attention_mask"]
            places[0] += mask.numel()
            places[1] += int(mask.sum())
            loss = super().training_step(model, inputs, *given, **named)
            losses.append(loss)
            return loss

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in pairs]).save_to_disk(str(folder / "pairs"))
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
    )  # fmt: skip
    at_once = {"per_device_train_batch_size": options.batch // options.accumulation, **more}
    k = options.batch // at_once["per_device_train_batch_size"]
    config = DPOConfig(
        output_dir=str(folder / "out"), gradient_accumulation_steps=k, num_train_epochs=1,
        max_length=CUT // options.scale, use_cpu=options.device == "cpu", bf16=options.precision == "bf16",
        report_to="none", save_strategy="no", disable_tqdm=True, **at_once,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(model, dtype=torch.float32), args=config,
        train_dataset=load_from_disk(str(folder / "pairs")), processing_class=tokenizer,
    )  # fmt: skip
    begun = clock()
    trainer.train()
    wait(options.device)
    seconds = clock() - begun
    dataset: Any = trainer.train_dataset
    columns = [np.array(dataset[name]) for name in ("ref_chosen_logps", "ref_rejected_logps")
               if name in dataset.column_names]  # fmt: skip
    score = float(np.concatenate(columns).mean()) if columns else float("nan")
    return Turn(
        seconds, taken[0], len(pairs), trainer.state.global_step, places[1], places[0], 1 - places[1] / places[0],
        float(sum(losses[:k])), float(sum(losses[-k:])), score,
    )  # fmt: skip


# -- both ----------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Let go of what is left of the run before, so that the next one's peak is its own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except BaseException:
        sys.stderr.write(said.getvalue()[-4000:])
        raise
    finally:
        logging.getLogger("megatron").handlers = []


def measure(options: argparse.Namespace, pairs: list[Pair], folder: Path) -> dict[str, list[Turn]]:
    """Turns of all by name, each round in another order; the first, with a few pairs, is not counted."""
    model = folder / "model"
    llama(vars(options)).save_pretrained(model)
    names = [OURS, *([TWICE] if options.twice else []), *list(TRL)[: RIVALS[options.trl]]]
    found: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(-1, options.rounds):
        own = pairs if turn >= 0 else pairs[: options.batch]
        first = max(0, turn) % len(names)
        for name in names[first:] + names[:first]:
            with tempfile.TemporaryDirectory(dir=folder) as place, quiet():
                reset_peak(options.device)
                if name in (OURS, TWICE):
                    keys = settings(options, own, model, write_pairs(own, Path(place)))
                    keys["prefix_sharing"] = "auto" if name == OURS else False
                    result = run_ours(options, keys, Path(place))
                else:
                    result = run_trl(options, TRL[name], own, model, Path(place))
            if turn >= 0:
                found[name].append(result._replace(peak=peak_bytes(options.device)))
    return found


def check(found: dict[str, list[Turn]], precision: str) -> None:
    """Raise RuntimeError where they do not do the same: ln 2 at first, and the reference's scores."""
    within = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    score = found[OURS][0].score
    for name, turns in found.items():
        for turn in turns:
            if abs(turn.first - np.log(2)) > within:
                raise RuntimeError(f"{name}: the first loss is {turn.first}, not ln 2")
            if not np.isnan(turn.score) and abs(turn.score / score - 1) > within:
                raise RuntimeError(f"{name}: the reference gives {turn.score} an answer, ours {score}")


def arithmetic(name: str, turn: Turn, pairs: list[Pair], shape: dict[str, int]) -> tuple[float, float]:
    """The FLOP per pair of the products with weights: in steps, and with the reference. A backward pass
    counts as two forward ones; the heads take trained tokens alone."""
    blocks, head = products(shape)
    places = turn.places
    trained = sum(len(chosen) + len(rejected) for _, chosen, rejected in pairs)
    trl = TRL.get(name)
    forward = places * blocks + trained * head
    steps = 3 * forward + (places * blocks if trl is not None and trl.get("gradient_checkpointing", True) else 0)
    if trl is not None and "precompute_ref_log_probs" not in trl:
        steps += forward
        return 2 * steps / turn.pairs, 2 * steps / turn.pairs
    return 2 * steps / turn.pairs, 2 * (steps + forward) / turn.pairs


def report(found: dict[str, list[Turn]], pairs: list[Pair], shape: dict[str, int]) -> list[dict[str, Any]]:
    """Medians over rounds; ratios are made within rounds first."""
    rows = []
    ours = found[OURS]
    ideal = arithmetic(OURS, ours[0], pairs, shape)
    for name, turns in found.items():
        steps = [b.seconds / b.pairs / (a.seconds / a.pairs) for a, b in zip(ours, turns, strict=True)]
        total = [
            (b.seconds + b.reference) / b.pairs / ((a.seconds + a.reference) / a.pairs)
            for a, b in zip(ours, turns, strict=True)
        ]
        own = arithmetic(name, turns[0], pairs, shape)
        rows.append({
            "name": name,
            "pairs_per_second": statistics.median(t.pairs / t.seconds for t in turns),
            "pairs_per_second_with_reference": statistics.median(t.pairs / (t.seconds + t.reference) for t in turns),
            "reference_seconds": statistics.median(t.reference for t in turns),
            "tokens_per_second": statistics.median(t.tokens / t.seconds for t in turns),
            "padding": turns[0].padding,
            "pairs_per_step": turns[0].pairs / turns[0].steps,
            "ratio": statistics.median(steps), "ratio_range": (min(steps), max(steps)),
            "ratio_with_reference": statistics.median(total), "ratio_with_reference_range": (min(total), max(total)),
            "arithmetic": own[0] / ideal[0], "arithmetic_with_reference": own[1] / ideal[1],
            "last_loss": turns[0].last, "peak_bytes": max(t.peak for t in turns),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| | pairs/s | with reference | its pass, s | useful tokens/s | padding | pairs a step "
        "| ours is faster | by arithmetic | with reference | by arithmetic |",
        "|---|" + "---:|" * 10,
    ]
    for row in rows:
        low, high = row["ratio_range"]
        least, most = row["ratio_with_reference_range"]
        lines.append(
            f"| {row['name']} | {row['pairs_per_second']:.2f} | {row['pairs_per_second_with_reference']:.2f} | "
            f"{row['reference_seconds']:.1f} | {row['tokens_per_second']:,.0f} | {row['padding']:.1%} | "
            f"{row['pairs_per_step']:.1f} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['arithmetic']:.2f} | "
            f"{row['ratio_with_reference']:.2f} ({least:.2f} to {most:.2f}) | {row['arithmetic_with_reference']:.2f} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and fill in the shape."""
    on_gpu = torch.cuda.is_available()
    parser = CommandParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: 400M on a GPU, tiny on a CPU; the next change it")
    for key in SHAPES["tiny"]:
        parser.add_argument(f"--{key}", type=int, help="lengths are divided by it" if key == "scale" else None)
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--pairs", type=int, help="default: 512 on a GPU, 48 on a CPU")
    parser.add_argument("--trl", choices=RIVALS, default="all", help="TRL's settings beside ours (all)")
    parser.add_argument("--twice", action="store_true", help="also ours with the prompts of pairs laid out twice")
    parser.add_argument("--batch", type=int, default=8, help="pairs a step; TRL's default (8)")
    parser.add_argument("--accumulation", type=int, default=1, help="TRL's gradient_accumulation_steps (1)")
    parser.add_argument("--micro-rows", type=int, help="our rows a micro-batch; default: 1 on a GPU, all on a CPU")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on a CPU")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: the process's own, beside other work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not on_gpu:
        parser.error("--device cuda: there is no GPU")
    on_gpu = options.device == "cuda"
    for key, value in SHAPES[options.shape or ("400M" if on_gpu else "tiny")].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    options.pairs = options.pairs or (512 if on_gpu else 48)
    options.micro_rows = options.micro_rows or (1 if on_gpu else None)
    if options.batch % options.accumulation:
        parser.error(f"--batch {options.batch} does not divide by --accumulation {options.accumulation}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(options.threads)
    rival = "TRL left out"
    if options.trl != "none":
        try:
            import trl
        except ImportError:
            sys.stderr.write("posttrain.py: needs TRL to compare with; pip install trl==1.16.0, or --trl none\n")
            return 1
        rival = f"TRL {trl.__version__}"
    shape = {key: getattr(options, key) for key in SHAPES["tiny"]}
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} CPU threads"
    print(
        f"{machine}, torch {torch.__version__}, {rival}, {options.precision}, {options.pairs} pairs\n"
        + ", ".join(f"{key} {value}" for key, value in shape.items()),
        flush=True,
    )
    pairs = pairs_of(options.pairs, options.scale, options.vocab)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, pairs, Path(folder))
    check(found, options.precision)
    rows = report(found, pairs, shape)
    print(f"{table(rows)}\n\nmedians of {options.rounds} rounds, least and largest ratio in them")
    if options.json is not None:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "torch": torch.__version__,
                 "trl": rival, "shape": shape, "precision": options.precision}  # fmt: skip
        options.json.write_text(json.dumps({**about, "pairs": options.pairs, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
