"""The recipes that come with the package: the 7B as it is read, both at tiny size from end to end."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megatron.model.weight_map import layer_params
from megatron.pipelines.command import write_recipe
from megatron.pipelines.definition import read_pipeline
from megatron.pipelines.options import Options, parse_words, train_words
from megatron.tokenizer.train_tokenizer import train_tokenizer
from tests.pipelines.small import change_yaml, passed, records, write_yaml
from tests.training.runs import metric_rows

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2, "intermediate_size": 160,
         "distributed_backend": "gloo", "precision": "fp32", "num_workers": 0}  # fmt: skip
SHIPPED = {"eval_tasks": ["shipped_choice"], "eval_limit": 8}


def test_the_7b_is_what_it_says(tmp_path):
    described = read_pipeline(write_recipe("7b", tmp_path))
    with_model = [stage for stage in described.stages if stage.kind == "train"]
    words = {stage.name: train_words(described, stage, Options()) for stage in with_model}
    runs = {name: parse_words(run_words).check_training() for name, run_words in words.items()}  # as they would read it
    assert list(runs) == ["pretrain", "sft", "dpo", "lora"]
    for args in runs.values():
        shape = (args.num_layers, args.hidden_size, args.kv_heads, args.padded_vocab_size, args.max_position_embeddings)
        assert shape == (32, 4096, 8, 50304, 4096)
    specs = layer_params(runs["pretrain"])
    count = sum(torch.Size(spec.shape).numel() for layer in specs.values() for spec in layer)
    assert count == 7_391_678_464
    assert f"{count:,}" in (tmp_path / "configs/model.yml").read_text()
    pretrain, dpo, lora = runs["pretrain"], runs["dpo"], runs["lora"]
    assert pretrain.seq_curriculum["seq_len"] == (512, 1024, 2048) and pretrain.seq_length == 2048
    assert (pretrain.train_iters, pretrain.train_batch_size, pretrain.warmup_iters) == (100_000, 32, 5000)
    assert pretrain.zero_stage == 3 and pretrain.eval_interval == 1000
    assert (dpo.dpo_beta, dpo.lr, dpo.train_epochs) == (0.1, 5e-7, 1)
    assert (lora.lora["r"], lora.lora["alpha"], lora.lora["dropout"], lora.lr) == (16, 32, 0.05, 2e-4)
    assert all(args.for_world(world).gradient_accumulation_steps >= 1 for world in (8, 16) for args in runs.values())


def shrink_7b(folder: Path, tokenizer: Path) -> None:
    """The recipe with a model, texts and steps of seconds; its stages, commands and formats stay."""
    sizes = {"seq_length": 64, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "log_interval": 1}
    change_yaml(folder / "configs/model.yml", **SIZES)
    curriculum = {"seq_len": [16, 32, 64], "until": [2, 4]}
    steps = {"train_iters": 6, "warmup_iters": 1, "eval_interval": 3, "eval_iters": 1, "compile": False}
    change_yaml(folder / "configs/pretrain.yml", **sizes, **steps, seq_curriculum=curriculum)
    change_yaml(folder / "configs/sft.yml", **sizes)
    change_yaml(folder / "configs/dpo.yml", **sizes, max_length=32, max_prompt_length=8)
    change_yaml(folder / "configs/lora.yml", **sizes, train_epochs=None, train_iters=4, eval_interval=2, eval_iters=1)
    words = "the model reads all words and then writes some other ones after each until it has read enough".split()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=40)) + "." for _ in range(200)]  # no two are near-duplicates
    user, model = {"role": "user", "content": "What is read?"}, {"role": "assistant", "content": texts[0]}
    worse = {**model, "content": texts[0][::-1]}
    pair = {"prompt": user["content"], "chosen": [user, model], "rejected": [user, worse]}  # as UltraFeedback has them
    documents, raw = [{"text": text} for text in texts], folder / "own"
    rows = {"web": documents, "domain": documents, "chats": [{"messages": [user, model]}] * 20, "pairs": [pair] * 20}
    for name in (*rows, "tokenizer"):
        (raw / name).mkdir(parents=True)
    for name, source_rows in rows.items():
        (raw / name / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in source_rows))
    shutil.copy(tokenizer, raw / "tokenizer/tokenizer.json")
    eos = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (raw / "tokenizer/tokenizer_config.json").write_text(json.dumps(eos))
    described = yaml.safe_load((folder / "pipeline.yml").read_text())
    stages = described["stages"]
    for source in stages["data"]["sources"]:
        for key in ("hub", "hub_type", "files"):
            source.pop(key, None)
        source["path"] = f"own/{source['name']}"
    commands = [line.replace("--recipe gopher,c4,fineweb ", "") for line in stages["data"]["commands"]]
    stages["data"]["commands"] = [line.replace("--workers 16", "--workers 1") for line in commands]
    for stage in stages.values():
        if "evaluation" in stage:
            stage["evaluation"] = SHIPPED
    write_yaml(folder / "pipeline.yml", described)
    loss = {"metric": "train/lm_loss", "max": 20.0}
    score = {"metric": "eval_tasks/shipped_choice_acc", "min": 0.0, "stderr_z": 0.0}
    gates = {name: {"require": [loss, score]} for name in ("pretrain", "sft", "lora")}
    gates["dpo"] = {"baseline": "sft", "require": [{**score, "max_drop": 1.0}]}
    write_yaml(folder / "configs/promotion_gates.yml", gates)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = ["the model reads words and writes other words. " * 9, "Q: What is read?"]
    path.write_bytes(train_tokenizer(texts, 300).encode())
    return path


@pytest.mark.product
@pytest.mark.timeout(600)
def test_the_7b_runs_at_tiny_size(tmp_path, tokenizer):
    folder = tmp_path / "7b"
    write_recipe("7b", folder)
    shrink_7b(folder, tokenizer)
    passed("run", folder, "--precision", "fp32")
    assert {record["status"] for record in records(folder).values()} == {"done", "promoted"}
    assert (folder / "checkpoints/lora_final/latest").is_file()
    log_text = (folder / "logs/pretrain.log").read_text()
    assert "seq_curriculum" in log_text and "lm_loss" in log_text


@pytest.mark.product
@pytest.mark.timeout(600)
def test_the_quickstart_with_fewer_steps(tmp_path):
    """Runs the recipe of `make pipeline` with a tenth of its steps; gates that need more steps are lower."""
    folder = tmp_path / "quickstart"
    write_recipe("quickstart", folder)
    for name, steps in (("pretrain", 40), ("sft", 20), ("dpo", 30), ("lora", 10)):
        change_yaml(folder / f"configs/{name}.yml", train_iters=steps, eval_interval=steps, checkpoint_factor=steps)
    gates = yaml.safe_load((folder / "configs/promotion_gates.yml").read_text())
    for name in ("pretrain", "sft", "lora"):
        for requirement in gates[name]["require"]:
            if requirement["metric"].endswith("lm_loss"):
                requirement["max"] = 7.0
    write_yaml(folder / "configs/promotion_gates.yml", gates)
    passed("run", folder)
    losses = [row["validation/lm_loss"] for row in metric_rows(folder / "checkpoints/dpo", "validation/lm_loss")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and losses[-1] < losses[0], "learned"
    assert "data/clean" in (folder / "logs/data.log").read_text()
