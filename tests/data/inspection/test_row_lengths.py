"""Lengths of raw rows against transformers' own, and the tool on what people have."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.inspection.row_lengths import suggested_length
from tests.data.samples import DATASET, json_rows, jsonl
from tools.datasets import analyze as tool

TOKENIZER = DATASET / "hf_tokenizer"


@pytest.fixture
def analyze(monkeypatch, capsys) -> Callable[..., SimpleNamespace]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the tool sets: put back afterwards

    def run(*words: object) -> SimpleNamespace:
        error: object = ""
        try:
            tool.main(list(map(str, words)))
        except SystemExit as end:
            error = end.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(error != ""), stdout=out, stderr=f"{err}{error}")

    return run


@pytest.fixture(scope="module")
def hf():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER)


def table(done: SimpleNamespace) -> dict[str, list[str]]:
    assert done.code == 0, done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def numbers(lengths: list[int]) -> list[str]:
    middle = [str(int(np.percentile(lengths, p, method="higher"))) for p in (50, 95, 100)]
    return middle + [f"{np.mean(np.array(lengths) <= n):.1%}" for n in (1024, 2048, 4096, 8192, 16384, 32768)]


def chat_length(hf, messages: list[dict], **options) -> int:
    return len(hf.apply_chat_template(messages, return_dict=True, **options)["input_ids"])


@pytest.mark.parametrize("explicit", [False, True])
def test_pairs(tmp_path: Path, hf, analyze, explicit: bool):
    """prompt + chosen + rejected, and chosen + rejected that share their first messages; an EOS ends each."""
    source_rows, prompts, side_lengths = [], [], []
    for row in json_rows(DATASET / "pairs.jsonl"):
        shared = next(i for i, (a, b) in enumerate(zip(row["chosen"], row["rejected"], strict=True)) if a != b)
        prompt = row["chosen"][:shared]
        if explicit:
            row = {"prompt": prompt} | {side: row[side][shared:] for side in ("chosen", "rejected")}
        source_rows.append(row)
        prompts.append(chat_length(hf, prompt, add_generation_prompt=True))
        sides = [prompt + row[side][shared if not explicit else 0 :] for side in ("chosen", "rejected")]
        side_lengths.append([chat_length(hf, side) + 1 for side in sides])
    source = jsonl(tmp_path / "p.jsonl", source_rows)
    done = analyze(source, "--tokenizer", TOKENIZER, "--max-length", 100, "--max-prompt-length", 30)
    statistics, full_lengths = table(done), [max(pair) for pair in side_lengths]
    assert statistics["prompt"] == numbers(prompts) and statistics["whole"] == numbers(full_lengths)
    for side, name in enumerate(("chosen", "rejected")):
        assert statistics[name] == numbers([pair[side] - p for pair, p in zip(side_lengths, prompts, strict=True)])
    for flag, lengths, limit in (("--max-length", full_lengths, 100), ("--max-prompt-length", prompts, 30)):
        num_over = sum(length > limit for length in lengths)
        assert 0 < num_over < 24 and statistics[flag][1] == str(num_over)
    assert "suggested: --max-length 128 --max-prompt-length 128 " in done.stdout


def test_conversations_texts_and_completions(tmp_path: Path, hf, analyze):
    chat = [chat_length(hf, row["conversation"]) + 1 for row in json_rows(DATASET / "chat.jsonl")]
    assert table(analyze(DATASET / "chat.jsonl", "--tokenizer", TOKENIZER))["whole"] == numbers(chat)
    texts = [row["text"] for row in json_rows(DATASET / "corpusA.jsonl")]
    statistics = table(analyze(DATASET / "corpusA.jsonl", "--tokenizer", DATASET / "tokenizer.json"))
    assert statistics["whole"] == numbers([len(ids) for ids in hf(texts)["input_ids"]]) and "prompt" not in statistics
    pairs = [{"prompt": text[:30], "completion": text[30:]} for text in texts]
    statistics = table(analyze(jsonl(tmp_path / "c.jsonl", pairs), "--tokenizer", TOKENIZER))
    assert statistics["prompt"] == numbers([len(hf(row["prompt"])["input_ids"]) for row in pairs])
    assert statistics["whole"] == numbers([len(ids) + 1 for ids in hf(texts)["input_ids"]])


def test_rows_that_cannot_be_measured(tmp_path: Path, analyze):
    jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}, {"messages": "x"}])
    jsonl(tmp_path / "b.jsonl", [{"words": "x"}])
    (tmp_path / "c.jsonl").write_text("\n")
    for file, words, message in (
        ("a.jsonl", [], 'a.jsonl:2: "messages" is str'),
        ("b.jsonl", [], "b.jsonl:1: .*words"),
        ("b.jsonl", ["--tokenizer", DATASET / "none"], "none: no such folder"),
        ("c.jsonl", [], "c.jsonl: has no rows"),
        ("d.jsonl", [], "d.jsonl: no such file"),
    ):
        done = analyze(tmp_path / file, "--tokenizer", TOKENIZER, *words)
        assert done.code == 1 and re.fullmatch(f"analyze.py: error: .*{message}.*", done.stderr), done.stderr


def test_no_gpu_is_touched(analyze, monkeypatch):
    """The variable is emptied before the tokenizer's library, which may load torch, can look."""
    visible_devices, cuda, load = [], [], tool.load

    def looks(*words):
        visible_devices.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return load(*words)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(tool, "load", looks)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: cuda.append("begun"))
    assert "whole" in table(analyze(DATASET / "corpusA.jsonl", "--tokenizer", TOKENIZER))
    assert (visible_devices, cuda) == ([""], [])


def test_suggestions():
    lengths = np.array([100] * 95 + [3000] * 5)
    assert suggested_length(lengths) == 128 and suggested_length(lengths[1:]) == 4096, "95 of 100 fit, 94 of 99 do not"
    assert suggested_length(np.array([1 << 21])) == 1 << 20
