"""From raw text to a model that has learned, judged on other prompts, through the commands' own functions."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.generation import Completion, SamplingParams, complete, load_model
from megatron.generation.prompts.chat import find_template
from megatron.launch import process_info
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import build_tokenizer
from tests.data.preprocessing.chat_tokenizers import CHATML, fast_tokenizer
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, config, metric_rows, run_to_end
from tools.datasets.preprocess_data_with_chat_template import main as preprocess

WORDS = "quiet harbour copper silk salt lantern winter coins storm".split()
SIZE = {"num_layers": 2, "seq_length": 96, "max_position_embeddings": 96, "pack_impl": "best_fit"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    fast_tokenizer(CHATML, pad_token="<|endoftext|>").save_pretrained(folder)
    return folder


def tokens_of(rows: list[dict[str, Any]], keys: list[str], name: str, tokenizer: Path, folder: Path) -> str:
    """Prefix of the files that preprocess_data_with_chat_template.py makes of rows."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ["--input", str(folder / f"{name}.jsonl"), "--output-prefix", str(folder / name), "--workers", "1"]
    preprocess([*places, "--jsonl-keys", *keys, "--tokenizer-path", str(tokenizer)])
    return str(folder / name)


def run_of(tokenizer: Path, folder: Path, **keys: Any) -> dict[str, Any]:
    values = config(LLAMA, ADAMW, SIZE, vocab_file=str(tokenizer), index_cache_dir=str(folder / "index"), **keys)
    return {key: value for key, value in values.items() if key not in ("data_path", "split", "eod_mask_loss")}


def preferences(count: int, seed: int, shuffled: bool) -> list[dict[str, Any]]:
    """Good answers end in an even number, bad ones in an odd one; shuffled: in half the other way round."""
    random = np.random.default_rng(seed)
    turned, rows = random.permutation(count) < (count // 2 if shuffled else 0), []
    for i in range(count):
        question, *answers = (" ".join(random.choice(WORDS, random.integers(2, 5))) for _ in range(3))
        ends = [2 * random.integers(5) + odd for odd in (0, 1)]
        good, bad = ([{"role": "assistant", "content": f"{a} {n}"}] for a, n in zip(answers, ends, strict=True))
        chosen, rejected = (bad, good) if turned[i] else (good, bad)
        rows.append({"prompt": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected})
    return rows


def dpo_run(shuffled: bool, tokenizer: Path, folder: Path) -> dict[str, Any]:
    paths = {}
    for name, count in (("train", 240), ("valid", 120)):
        rows = preferences(count, len(name) + count, shuffled)
        prefix = tokens_of(rows, ["chosen", "rejected"], name, tokenizer, folder)
        for side, key in (("pos", "chosen"), ("neg", "rejected")):
            paths[f"{side}_{name}_data_paths"] = [f"{prefix}_{key}_document"]
            paths[f"{side}_{name}_label_data_paths"] = [f"{prefix}_{key}_label_document"]
    return run_of(tokenizer, folder, **paths, train_impl="dpo", dataset_impl="pairwise", train_batch_size=8,
                  train_iters=40, checkpoint_factor=20, eval_interval=40, eval_iters=30)  # fmt: skip


def test_preferences_are_learned_and_hold_for_other_pairs(tokenizer: Path, tmp_path: Path) -> None:
    """The control is the same run with half of its pairs turned round, whose validation is chance."""
    last_rows = []
    for shuffled in (False, True):
        (folder := tmp_path / str(shuffled)).mkdir()
        run_ranks(run_to_end, 1, {**dpo_run(shuffled, tokenizer, folder), "save": str(folder / "run")})
        last_rows.append(metric_rows(folder / "run", "validation/rewards/accuracies")[-1])
    row, control = last_rows
    assert row["iteration"] == 40 and row["validation/rewards/margins"] > 0
    assert row["validation/rewards/accuracies"] > control["validation/rewards/accuracies"] + 0.25, (row, control)


Chat = list[dict[str, str]]


def conversations(count: int, seed: int) -> list[Chat]:
    random, chats = np.random.default_rng(seed), []
    for _ in range(count):
        question = "What does the " + " ".join(random.choice(WORDS, random.integers(1, 5))) + " cost?"
        answer = f"It costs {random.integers(2, 10)} coins."
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats


def answers(rank: int, world_size: int, values: dict[str, Any], questions: list[Chat]) -> list[Completion]:
    """For the pool: greedy, as generate.py and serve.py ask a model in a conversation."""
    args, quiet = NeoXArgs.from_dict(values).for_world(world_size), logging.getLogger("tests.quiet")
    tokenizer = build_tokenizer(args)
    model = load_model(args, init_model_parallel(args, process_info(), quiet), tokenizer, quiet)
    template = find_template(args, tokenizer)
    prompts, ends = [template.tokens(question) for question in questions], template.stop_token_ids
    return complete(model, prompts, SamplingParams(), maximum_tokens=24, seeds=range(len(prompts)), stop_token_ids=ends)


def test_conversations_are_learned_as_they_were_written(tokenizer: Path, tmp_path: Path) -> None:
    """Up to the token that ends an answer."""
    rows = [{"messages": messages} for messages in conversations(240, 0)]
    prefix = tokens_of(rows, ["messages"], "chats", tokenizer, tmp_path)
    values = run_of(tokenizer, tmp_path, train_data_paths=[f"{prefix}_messages_document"],
                    train_label_data_paths=[f"{prefix}_messages_label_document"], reset_attention_mask=True,
                    reset_position_ids=True, train_batch_size=4, train_iters=80, checkpoint_factor=40,
                    optimizer={"type": "AdamW", "params": {"lr": 5e-3, "eps": 1e-6}})  # fmt: skip
    run_ranks(run_to_end, 1, {**values, "save": str(tmp_path / "run")})
    trained_prompts = {messages[0]["content"] for messages in conversations(240, 0)}
    held_out = [messages[:1] for messages in conversations(60, 1) if messages[0]["content"] not in trained_prompts][:24]
    assert len(held_out) == 24
    replies = run_ranks(answers, 1, {**values, "load": str(tmp_path / "run")}, held_out)[0]
    right = [reply for reply in replies if reply.finished and re.fullmatch(r"It costs [2-9] coins\.", reply.text)]
    assert len(right) >= 20, replies  # an untrained model writes none
