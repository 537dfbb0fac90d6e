#!/usr/bin/env python
"""Compares the training of two commits bit for bit, in 12 layouts each for pre-training, SFT and DPO."""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tqdm import tqdm

from megatron.process import run_command
from megatron.process.command_parser import CommandParser

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden" / "dataset"
PIPES, TENSORS = "pipe_parallel_size", "model_parallel_size"
BF16 = {"precision": "bfloat16"}
# Number of ranks and configuration keys of each layout. Some layouts also cover other features, such as
# recomputation.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "alone-bf16": (1, BF16),
    "dp2": (2, {}),
    "tp2": (2, {TENSORS: 2}),
    "tp2-sp-recompute": (2, {TENSORS: 2, "sequence_parallel": True, "checkpoint_activations": True}),
    "pp2": (2, {PIPES: 2}),
    "pp4-recompute": (4, {PIPES: 4, "checkpoint_activations": True, "checkpoint_num_layers": 1}),
    "tp2-pp2": (4, {TENSORS: 2, PIPES: 2}),
    "zero1-tp2-dp2": (4, {TENSORS: 2, "zero_optimization": {"stage": 1}}),
    "zero1-pp2-bf16": (2, {PIPES: 2, "zero_optimization": {"stage": 1}, **BF16}),
    "zero2-dp2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3-dp2": (2, {"zero_optimization": {"stage": 3}}),
}
COMMON: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "make_vocab_size_divisible_by": 64, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "train_iters": 4,
    "eval_interval": 2, "eval_iters": 1, "precision": "fp32", "lr_decay_style": "cosine", "warmup": 0.25,
    "tokenizer_type": "HFTokenizer", "vocab_file": str(GOLDEN / "tokenizer.json"), "num_workers": 0,
    "log_interval": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.5,
    "checkpoint_factor": 4, "save": "checkpoints", "log_dir": "logs",
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "pos_emb": "rotary", "activation": "swiglu", "num_kv_heads": 2, "intermediate_size": 48,
    "use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "compat_ffn_width": "none",
}  # fmt: skip
DROPPING = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "pretraining": {
        "pos_emb": "rotary", "rotary_pct": 0.25, "gpt_j_residual": True, **DROPPING,
        "data_path": str(GOLDEN / "corpusA_text_document"), "split": "90,10,0",
    },
    "sft": {
        **LLAMA, "train_data_paths": [str(GOLDEN / "chat_conversation_document")],
        "train_label_data_paths": [str(GOLDEN / "chat_conversation_label_document")],
        "valid_data_paths": [str(GOLDEN / "chat_conversation_document")],
        "valid_label_data_paths": [str(GOLDEN / "chat_conversation_label_document")],
        "pack_impl": "packed", "eod_mask_loss": False, "reset_attention_mask": True, "reset_position_ids": True,
    },
    "dpo": {
        **LLAMA, "train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "best_fit", "dpo_loss_type": "simpo",
        **{f"{side}_{part}{kind}_data_paths": [f"PAIRS/{side}{kind}"]
           for side in ("pos", "neg") for part in ("train", "valid") for kind in ("", "_label")},
    },
}  # fmt: skip
# Begins of names of metrics that are compared, and words in names of metrics that vary from run to run.
COMPARED = ("iteration", "train/", "validation/")
LEFT_OUT = ("time", "per_sec", "tflops", "memory", "runtime")


def main() -> int:
    options = _parser().parse_args()
    names = [f"{layout} {objective}" for layout in LAYOUTS for objective in OBJECTIVES]
    names = [name for name in names if all(word in name.split() for word in options.only)]
    results = [_results(commit, names, options.jobs) for commit in (options.before, options.after)]
    differing = 0
    for name in names:
        lines = list(_differences(results[0][name], results[1][name]))
        differing += bool(lines)
        print(f"{name}: {'; '.join(lines) if lines else 'equal'}")
    print(f"{len(names) - differing} of {len(names)} runs are equal to the last bit")
    return 1 if differing else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        description=f"{__doc__} Compares losses, gradient norms, validation and every tensor of the last checkpoint by "
        "digest. Each commit is checked out into a temporary folder and trains there with `deepy.py train.py`. Results "
        "are cached in .cache/compare_commits, so each commit runs once. The exit code is 1 if anything differs."
    )
    parser.add_argument("before", help="the first commit: a hash, branch or tag")
    parser.add_argument("after", nargs="?", default="HEAD", help="the second commit (default: HEAD)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run only these layouts or objectives, such as tp2 or sft"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time (default: 1)")
    return parser


def _results(commit: str, names: list[str], jobs: int) -> dict[str, Any]:
    """Returns the results of a commit for each run `LAYOUT OBJECTIVE` in `names`.

    Runs that are not in the cache are trained, `jobs` at a time, and cached."""
    digest = _git("rev-parse", f"{commit}^{{commit}}")
    script_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    cache = ROOT / ".cache" / "compare_commits" / f"{digest[:12]}-{script_hash}.json"
    results: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    missing = [name for name in names if name not in results]
    if not missing:
        return results
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), digest)
        try:
            pairs = make_pairs(Path(place) / "pairs")
            with ThreadPoolExecutor(jobs) as pool:
                runs = pool.map(lambda name: _train(tree, Path(place) / name.replace(" ", "_"), name, pairs), missing)
                for name, result in zip(missing, tqdm(runs, commit, len(missing), unit="run"), strict=True):
                    results[name] = result
                    cache.parent.mkdir(parents=True, exist_ok=True)
                    cache.write_text(json.dumps(results, indent=1) + "\n")
        finally:
            _git("worktree", "remove", "--force", str(tree))
    return results


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"compare_commits.py: git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def make_pairs(folder: Path) -> Path:
    """Writes preference pairs for DPO: chosen answers have even token ids, rejected answers odd ones.

    Returns `folder`, which has pos, neg, pos_label and neg_label."""
    from megatron.data import IndexedDatasetWriter

    folder.mkdir()
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 300, random.integers(1, 6)) for _ in range(64)]
    for side, parity in (("pos", 0), ("neg", 1)):
        for kind in ("", "_label"):
            answers = np.random.default_rng(parity + 1)
            with IndexedDatasetWriter(str(folder / f"{side}{kind}"), np.int32) as writer:
                for prompt in prompts:
                    answer = answers.integers(0, 150, answers.integers(2, 8)) * 2 + parity
                    prompt_values = np.full_like(prompt, -100) if kind else prompt
                    writer.add_document(np.concatenate([prompt_values, answer]).astype(np.int32))
    return folder


def _train(tree: Path, folder: Path, name: str, pairs: Path) -> dict[str, Any]:
    """Trains one run with deepy.py of the checked-out commit `tree`.

    name: `LAYOUT OBJECTIVE`. pairs: folder of the DPO data. Returns its metrics, and digests of its
    checkpoint's files."""
    layout, objective = name.split()
    ranks, keys = LAYOUTS[layout]
    values = {**COMMON, **OBJECTIVES[objective], **keys}
    for key in [key for key, value in values.items() if isinstance(value, list) and "PAIRS/" in str(value)]:
        values[key] = [item.replace("PAIRS", str(pairs)) for item in values[key]]
    folder.mkdir()
    (folder / "run.yml").write_text(yaml.safe_dump(values))
    env = {**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tree / "deepy.py"), "--num_gpus", str(ranks), str(tree / "train.py"), "run.yml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"compare_commits.py: {name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    metrics = [
        compared_values(json.loads(line)) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    ]
    (last,) = (folder / "checkpoints").glob("global_step4")
    result = {"metrics": metrics, "tensors": {path.name: digest_of_tensors(path) for path in sorted(last.glob("*.pt"))}}
    shutil.rmtree(folder)
    return result


def compared_values(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in line.items()
        if key.startswith(COMPARED) and not any(word in key for word in LEFT_OUT)
    }


def digest_of_tensors(path: Path) -> str:
    """Returns one SHA-256 of all tensors in a checkpoint file, with their keys, dtypes and shapes.

    The file is loaded with `weights_only=False`, because it may hold DeepSpeed's classes. This is safe,
    because this program wrote it.
    """
    total = hashlib.sha256()
    for place, tensor in _tensors("", torch.load(path, map_location="cpu", weights_only=False)):
        total.update(f"{place} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _tensors(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{place}/{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{place}/{i}", item)


def _differences(results_before: dict[str, Any], results_after: dict[str, Any]) -> Iterator[str]:
    for line_before, line_after in zip(results_before["metrics"], results_after["metrics"], strict=False):
        keys = [key for key in {**line_before, **line_after} if line_before.get(key) != line_after.get(key)]
        if keys:
            yield f"iteration {line_before.get('iteration')}: " + ", ".join(
                f"{key} {line_before.get(key)!r} -> {line_after.get(key)!r}" for key in keys
            )
            break
    if len(results_before["metrics"]) != len(results_after["metrics"]):
        yield f"{len(results_before['metrics'])} lines of metrics -> {len(results_after['metrics'])}"
    files = {**results_before["tensors"], **results_after["tensors"]}
    changed = [file for file in files if results_before["tensors"].get(file) != results_after["tensors"].get(file)]
    if changed:
        yield f"{len(changed)} of {len(files)} files of the checkpoint: {', '.join(changed[:3])}"


if __name__ == "__main__":
    run_command(main)
