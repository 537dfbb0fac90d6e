"""A pipeline whose stages take seconds: texts of letters, a model of two layers, four stages with weights."""

import io
import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import yaml

from megatron.pipelines.command import main
from megatron.pipelines.promotion import promoted_weights
from tests.launch.runs import DEEPY, environment

MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "max_position_embeddings": 32,
         "pos_emb": "rotary", "norm": "rmsnorm", "no_weight_tying": True, "tokenizer_type": "CharLevelTokenizer",
         "precision": "fp32", "train_micro_batch_size_per_gpu": 4, "num_workers": 0, "log_interval": 1, "eval_iters": 0,
         "checkpoint_factor": 3, "keep_last_n_checkpoints": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0,
         "distributed_backend": "gloo"}  # fmt: skip
OPTIMIZER = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8}}}
DATA = {"train_data_paths": ["data/packed/texts_text_document"]}
STAGES: Mapping[str, Any] = {
    "data": {
        "kind": "data",
        "sources": [{"name": "texts.jsonl", "path": "texts.jsonl", "license": "CC0-1.0"}],
        "commands": ["python $NEOX/tools/datasets/preprocess_data.py --input data/raw/texts.jsonl --output-prefix "
                     "data/packed/texts --tokenizer-type CharLevelTokenizer --append-eod"],
        "outputs": ["data/packed/texts_text_document"],
    },
    "init": {"kind": "init", "configs": ["pretrain.yml"]},
    "pretrain": {"configs": ["pretrain.yml"], "starts_from": "init"},
    "sft": {"configs": ["sft.yml"], "starts_from": "pretrain"},
    "lora": {"configs": ["lora.yml"], "starts_from": "sft", "merge_adapters": True},
}  # fmt: skip
GATES = {
    "pretrain": {"require": [{"metric": "train/lm_loss", "max": 9.0}]},
    "sft": {"baseline": "pretrain", "require": [{"metric": "train/lm_loss", "max": 9.0, "window": 3},
                                                {"metric": "train/lm_loss", "max_rise": 5.0}]},
}  # fmt: skip
WORDS = ("stream", "pencil", "window", "garden", "bridge", "candle", "forest", "marble", "planet", "ribbon")


def write_small(folder: Path, stages: Mapping[str, Any] = STAGES, gates: Mapping[str, Any] = GATES) -> Path:
    """Write a pipeline into a folder; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{word} and {word[::-1]} are words of {len(word)} letters. " * 4 for word in WORDS]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_yaml(folder / "model.yml", MODEL)
    write_yaml(folder / "pretrain.yml", {**OPTIMIZER, **DATA, "train_iters": 8})
    write_yaml(folder / "sft.yml", {**OPTIMIZER, **DATA, "train_iters": 6, "data_seed": 7})
    lora = {"r": 2, "alpha": 4, "target": "all-linear"}
    write_yaml(folder / "lora.yml", {**OPTIMIZER, **DATA, "train_iters": 6, "data_seed": 8, "lora": lora})
    write_yaml(folder / "gates.yml", gates)
    write_yaml(folder / "pipeline.yml", {"configs": ["model.yml"], "gates": "gates.yml", "stages": dict(stages)})
    return folder


def write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False))


def change_yaml(path: Path, **changes: Any) -> None:
    write_yaml(path, {**yaml.safe_load(path.read_text()), **changes})


def command(*words: Any) -> list[str]:
    """`deepy.py pipeline ...`."""
    return [*DEEPY, "pipeline", *map(str, words)]


def started(*words: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(command(*words), env=environment(), stderr=subprocess.PIPE, text=True)


def pipeline(*words: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command of pipelines to its end; in this process where it trains nothing."""
    if words[0] in ("run", "resume") and "--dry-run" not in words:
        return subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=290)
    folder, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    os.chdir(folder)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def passed(*words: Any) -> str:
    """Runs a command that must succeed, and returns its stderr."""
    done = pipeline(*words)
    assert done.returncode == 0, done.stderr
    return done.stderr


def finals(folder: Path) -> dict[str, str | None]:
    """The digest of each stage's promoted weights."""
    return {name: promoted_weights(folder / "checkpoints" / f"{name}_final") for name in [*STAGES][1:]}


def records(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "pipeline_state.json").read_text())["stages"]
