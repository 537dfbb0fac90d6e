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
MEDIAN, P95, MAX_LENGTH = 2138, 15433, 8192  # tokens of a prompt with an answer
PROMPT = 200  # median
NATIVE, NATIVE_UNSHARED = "ours", "ours, prefix_sharing: false"
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
    """The measurements of one pass of DPO over the pairs.

    reference: seconds of the reference model's pass before the first step. tokens: of all pairs, with each
    prompt counted twice. places: token positions in all rows, including padding. padding: its share of them.
    score: mean log-probability of an answer under the reference model; NaN if not computed before training.
    peak: peak bytes of GPU memory; 0 on a CPU.
    """

    seconds: float
    reference: float
    pairs: int
    steps: int
    tokens: int
    places: int
    padding: float
    first_loss: float
    last_loss: float
    score: float
    peak: int = 0


def law(count: int, median: float, sigma: float, z: np.ndarray) -> np.ndarray:
    """Returns lengths `[count]`: quantiles of a log-normal distribution, sorted like the numbers `z`."""
    normal = statistics.NormalDist()
    values = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    return np.maximum(1, np.round(median * np.exp(sigma * values[z.argsort().argsort()])))


def pairs_of(count: int, scale: int, vocab: int) -> list[Pair]:
    """Returns random pairs with lengths divided by `scale`; the two answers' lengths correlate by 0.8."""
    random = np.random.default_rng(0)
    sigma = float(np.log(P95 / MEDIAN)) / statistics.NormalDist().inv_cdf(0.95)
    z = random.standard_normal((3, count))
    max_length = MAX_LENGTH // scale
    prompts = np.minimum(law(count, PROMPT / scale, 1.0, z[2]), max_length // 2)
    lengths = (np.minimum(law(count, MEDIAN / scale, sigma, x), max_length) for x in (z[0], 0.8 * z[0] + 0.6 * z[1]))
    answers = [np.maximum(2, length - prompts) for length in lengths]
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
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.05,
        )
    )  # fmt: skip


def products(shape: dict[str, int]) -> tuple[int, int]:
    """Returns the number of weights that multiply each token: (in all blocks, in the head)."""
    hidden = shape["hidden"]
    return shape["layers"] * (4 * hidden**2 + 3 * hidden * shape["ffn"]), hidden * shape["vocab"]


# -- ours ----------------------------------------------------------------------------------------------------


def write_pairs(pairs: list[Pair], folder: Path) -> dict[str, list[str]]:
    """Writes the pairs as indexed datasets into `folder`. Returns the keys that name the files."""
    from megatron.data import IndexedDatasetWriter

    keys = {}
    for side, answer_index in (("pos", 1), ("neg", 2)):
        for kind in ("", "_label"):
            name = str(folder / f"{side}{kind}")
            with IndexedDatasetWriter(name, np.int32) as writer:
                for pair in pairs:
                    prompt = [-100] * len(pair[0]) if kind else pair[0]
                    writer.add_document(np.array(prompt + pair[answer_index], np.int32))
            keys[f"{side}_train{kind}_data_paths"] = [name]
    return keys


def settings(options: argparse.Namespace, pairs: list[Pair], model: Path, data: dict[str, list[str]]) -> dict[str, Any]:
    """Returns the keys of a DPO run with on average as many pairs per step as TRL. data: keys of files."""
    from megatron.checkpointing.families.convert import from_hf

    config = json.loads((model / "config.json").read_text())
    keys, _ = from_hf(config, lambda name: torch.empty(0), padded_vocab_size=config["vocab_size"])
    max_length = MAX_LENGTH // options.scale
    length = 2 * max_length  # a pair of the longest answers
    tokens = sum(len(prompt) + 1 + len(chosen) + len(rejected) for prompt, chosen, rejected in pairs)
    rows = max(1, round(options.batch * tokens / len(pairs) / length))
    return {
        **keys,
        **data,
        "train_impl": "dpo",
        "dataset_impl": "pairwise",
        "pack_impl": "best_fit",
        "max_length": max_length,
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


def run_native(options: argparse.Namespace, keys: dict[str, Any], folder: Path) -> Turn:
    """Trains with this project's engine, as train.py does, and returns the measurements."""
    from megatron.data.preferences.reference_scores import responses_of
    from megatron.launch import process_info
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import setup, start, train
    from megatron.training.reference.cache import read_scores

    clock, reference_s, losses = CLOCKS[options.clock], [0.0], []
    prepare = setup.resume_with_reference

    def timed(*arguments: Any) -> Any:
        start = clock()
        result = prepare(*arguments)
        wait(options.device)
        reference_s[0] = clock() - start
        return result

    def noted(*arguments: Any) -> Any:
        losses.append(step(*arguments))
        return losses[-1]

    args = NeoXArgs.from_dict({**keys, "reference_cache_dir": str(folder / "references")})
    # TRL would take what is set there for a run of several processes.
    with mock.patch.dict(os.environ), mock.patch.object(setup, "resume_with_reference", timed):
        training = start(args, process_info(env={}))
        engine = type(training.engine)
        step = engine.train_step
        with mock.patch.object(engine, "train_step", noted):
            start_s = clock()
            train(training)
            wait(options.device)
            seconds = clock() - start_s
        training.close()
    assert training.datasets.train is not None
    samples: list[Any] = [training.datasets.train[i] for i in range(training.progress.consumed_samples)]
    tokens = sum(len(response.tokens) for sample in samples for response in responses_of(sample))
    rows = [row for sample in samples for row in sample.response_ids]
    places, filled = sum(row.size for row in rows), sum(int((row >= 0).sum()) for row in rows)
    pairs = sum(len(sample.preference_labels) for sample in samples) // 2
    scores = read_scores(next((folder / "references").iterdir()))["sum"]
    return Turn(
        seconds, reference_s[0], pairs, len(losses), tokens, places, 1 - filled / places,
        float(losses[0].loss), float(losses[-1].loss), float(scores.mean()),
    )  # fmt: skip


# -- TRL -----------------------------------------------------------------------------------------------------


def run_trl(
    options: argparse.Namespace, trl_options: dict[str, Any], pairs: list[Pair], model: Path, folder: Path
) -> Turn:
    from datasets import Dataset, load_from_disk
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    clock, reference_s, places, losses = CLOCKS[options.clock], [0.0], [0, 0], []

    class Trainer(DPOTrainer):
        """A DPOTrainer that takes token ids, and notes token positions, losses and the reference's time."""

        def _prepare_dataset(self, dataset: Any, *arguments: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *arguments: Any) -> Any:
            start = clock()
            result = super()._precompute_ref_logps(*arguments)
            wait(options.device)
            reference_s[0] = clock() - start
            return result

        def training_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            mask = inputs["attention_mask"]
            places[0] += mask.numel()
            places[1] += int(mask.sum())
            loss = super().training_step(model, inputs, *arguments, **keywords)
            losses.append(loss)
            return loss

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    Dataset.from_list([dict(zip(names, pair, strict=True)) for pair in pairs]).save_to_disk(str(folder / "pairs"))
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
    )  # fmt: skip
    at_once = {"per_device_train_batch_size": options.batch // options.accumulation, **trl_options}
    k = options.batch // at_once["per_device_train_batch_size"]
    config = DPOConfig(
        output_dir=str(folder / "out"), gradient_accumulation_steps=k, num_train_epochs=1,
        max_length=MAX_LENGTH // options.scale, use_cpu=options.device == "cpu", bf16=options.precision == "bf16",
        report_to="none", save_strategy="no", disable_tqdm=True, **at_once,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(model, dtype=torch.float32), args=config,
        train_dataset=load_from_disk(str(folder / "pairs")), processing_class=tokenizer,
    )  # fmt: skip
    start = clock()
    trainer.train()
    wait(options.device)
    seconds = clock() - start
    dataset: Any = trainer.train_dataset
    columns = [np.array(dataset[name]) for name in ("ref_chosen_logps", "ref_rejected_logps")
               if name in dataset.column_names]  # fmt: skip
    score = float(np.concatenate(columns).mean()) if columns else float("nan")
    return Turn(
        seconds, reference_s[0], len(pairs), trainer.state.global_step, places[1], places[0], 1 - places[1] / places[0],
        float(sum(losses[:k])), float(sum(losses[-k:])), score,
    )  # fmt: skip


# -- both ----------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Waits until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Frees the memory of the previous run and resets the GPU's peak memory counter."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield
    except BaseException:
        sys.stderr.write(output.getvalue()[-4000:])
        raise
    finally:
        logging.getLogger("megatron").handlers = []


def measure(options: argparse.Namespace, pairs: list[Pair], folder: Path) -> dict[str, list[Turn]]:
    """Trains with each contestant once per round, and returns their measurements by name.

    The order changes with each round. A warm-up round with few pairs is not counted."""
    model = folder / "model"
    llama(vars(options)).save_pretrained(model)
    names = [NATIVE, *([NATIVE_UNSHARED] if options.twice else []), *list(TRL)[: RIVALS[options.trl]]]
    turns_by_name: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(-1, options.rounds):
        turn_pairs = pairs if turn >= 0 else pairs[: options.batch]
        rotation = max(0, turn) % len(names)
        for name in names[rotation:] + names[:rotation]:
            with tempfile.TemporaryDirectory(dir=folder) as place, quiet():
                reset_peak(options.device)
                if name in (NATIVE, NATIVE_UNSHARED):
                    keys = settings(options, turn_pairs, model, write_pairs(turn_pairs, Path(place)))
                    keys["prefix_sharing"] = "auto" if name == NATIVE else False
                    result = run_native(options, keys, Path(place))
                else:
                    result = run_trl(options, TRL[name], turn_pairs, model, Path(place))
            if turn >= 0:
                turns_by_name[name].append(result._replace(peak=peak_bytes(options.device)))
    return turns_by_name


def check(turns_by_name: dict[str, list[Turn]], precision: str) -> None:
    """Checks that contestants compute the same: first losses of ln 2, and equal reference scores.

    Raises RuntimeError otherwise."""
    tolerance = {"fp32": 1e-4, "bf16": 2e-2}[precision]
    score = turns_by_name[NATIVE][0].score
    for name, turns in turns_by_name.items():
        for turn in turns:
            if abs(turn.first_loss - np.log(2)) > tolerance:
                raise RuntimeError(f"{name}: the first loss is {turn.first_loss}; DPO starts at ln 2")
            if not np.isnan(turn.score) and abs(turn.score / score - 1) > tolerance:
                raise RuntimeError(f"{name}: mean reference score {turn.score} must equal ours, {score}")


def arithmetic(name: str, turn: Turn, pairs: list[Pair], shape: dict[str, int]) -> tuple[float, float]:
    """Returns the FLOPs per pair of products with weights: (training steps, steps and reference model).

    A backward pass counts as two forward passes. The head is counted for trained tokens only."""
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


def report(turns_by_name: dict[str, list[Turn]], pairs: list[Pair], shape: dict[str, int]) -> list[dict[str, Any]]:
    """Returns a row of medians over rounds for each contestant. Ratios to ours are taken within a round."""
    rows = []
    neox_turns = turns_by_name[NATIVE]
    ideal = arithmetic(NATIVE, neox_turns[0], pairs, shape)
    for name, turns in turns_by_name.items():
        steps = [b.seconds / b.pairs / (a.seconds / a.pairs) for a, b in zip(neox_turns, turns, strict=True)]
        total = [
            (b.seconds + b.reference) / b.pairs / ((a.seconds + a.reference) / a.pairs)
            for a, b in zip(neox_turns, turns, strict=True)
        ]
        part_flops = arithmetic(name, turns[0], pairs, shape)
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
            "arithmetic": part_flops[0] / ideal[0], "arithmetic_with_reference": part_flops[1] / ideal[1],
            "last_loss": turns[0].last_loss, "peak_bytes": max(t.peak for t in turns),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| | pairs/s | with reference | its pass, s | useful tokens/s | padding | pairs a step "
        "| ours is faster | by arithmetic | with reference | by arithmetic |",
        "|---|" + "---:|" * 10,
    ]
    for row in rows:
        low, high = row["ratio_range"]
        min_ref, max_ref = row["ratio_with_reference_range"]
        lines.append(
            f"| {row['name']} | {row['pairs_per_second']:.2f} | {row['pairs_per_second_with_reference']:.2f} | "
            f"{row['reference_seconds']:.1f} | {row['tokens_per_second']:,.0f} | {row['padding']:.1%} | "
            f"{row['pairs_per_step']:.1f} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {row['arithmetic']:.2f} | "
            f"{row['ratio_with_reference']:.2f} ({min_ref:.2f} to {max_ref:.2f}) | "
            f"{row['arithmetic_with_reference']:.2f} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line, and sets missing options from the shape."""
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
        parser.error("--device cuda: torch finds no GPU")
    on_gpu = options.device == "cuda"
    for key, value in SHAPES[options.shape or ("400M" if on_gpu else "tiny")].items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    options.pairs = options.pairs or (512 if on_gpu else 48)
    options.micro_rows = options.micro_rows or (1 if on_gpu else None)
    if options.batch % options.accumulation:
        parser.error(f"--batch {options.batch} must be a multiple of --accumulation {options.accumulation}")
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
        turns_by_name = measure(options, pairs, Path(folder))
    check(turns_by_name, options.precision)
    rows = report(turns_by_name, pairs, shape)
    print(f"{table(rows)}\n\nmedians of {options.rounds} rounds, least and largest ratio in them")
    if options.json is not None:
        header = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "torch": torch.__version__,
                 "trl": rival, "shape": shape, "precision": options.precision}  # fmt: skip
        options.json.write_text(json.dumps({**header, "pairs": options.pairs, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
