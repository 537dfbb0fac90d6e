"""tools/score.py as it is typed: scores of transformers for TRL's tokens; pairs counted by hand."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron.checkpointing.huggingface import HFFolder, import_hf
from megatron.generation.scoring.rewards import report_pairs
from tests.generation.serving.server import FOLDER, make_model
from tests.tools.commands import on_ranks
from tests.training.runs import cells

run = partial(on_ranks, "tools.score")
WORDS = "the quiet harbour trades copper for silk and salt in winter".split()


def text(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(words))


PAIRS = [{"prompt": text(i, 2 + i % 3), "chosen": text(i + 1, 2 + i % 4), "rejected": text(i + 2, 1 + i % 5)}
         for i in range(11)]  # fmt: skip


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A tiny reward model of transformers, its folder, and its import as a folder of checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    language = make_model(folder, 64)
    config = transformers.LlamaConfig(**{**language.config.to_dict(), "num_labels": 1, "pad_token_id": None})
    torch.manual_seed(5)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder / "reward")
    for file in FOLDER.iterdir():
        shutil.copy(file, folder / "reward")
    import_hf(HFFolder(folder / "reward"), folder / "imported")
    for name, rows in {
        "pairs": PAIRS,
        "chats": [{"messages": chat(row["prompt"], row["chosen"])} for row in PAIRS],
        "pairs_of_chats": [{side: chat(row["prompt"], row[side]) for side in ("chosen", "rejected")} for row in PAIRS],
        "texts": [{"text": row["chosen"]} for row in PAIRS],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, folder, folder / "imported"


@torch.no_grad()
def hf_score(model: Any, ids: list[int]) -> float:
    return model(torch.tensor([ids])).logits.item()


def ids_of(row: dict[str, Any]) -> list[list[int]]:
    """TRL's tokens, conversations ended as those of its SFT are."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    documents = []
    for text_or_chat in (row[key] for key in ("chosen", "rejected", "messages", "text") if key in row):
        if isinstance(text_or_chat, list):
            rendered = tokenizer.apply_chat_template(text_or_chat, tokenize=False)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
            ids.append(tokenizer.eos_token_id)  # the template ends in no token of its own
        else:
            ids = tokenizer(row.get("prompt", "") + text_or_chat + tokenizer.eos_token)["input_ids"]
        documents.append(ids)
    return documents


@pytest.mark.parametrize("name", ["pairs", "chats", "pairs_of_chats", "texts"])
def test_scores_are_those_of_transformers(name: str, models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, folder, imported = models
    source = "reward" if name == "pairs" else "imported"
    words = ["--input", str(folder / f"{name}.jsonl"), "--output", str(tmp_path / "s.jsonl")]
    code, out, err = run("--model", str(folder / source), *words)
    assert code == 0, err
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows) and f"{len(rows)} lines of scores are in" in out
    for row, line in zip(rows, lines, strict=True):
        documents = ids_of(row)
        expected = [hf_score(model, ids) for ids in documents]
        sizes = [len(ids) for ids in documents]
        if len(documents) == 1:
            assert line == {"score": pytest.approx(expected[0], abs=1e-5), "tokens": sizes[0]}
        else:
            assert [line["chosen"], line["rejected"]] == pytest.approx(expected, abs=1e-5)
            assert line["margin"] == pytest.approx(expected[0] - expected[1], abs=2e-5) and line["tokens"] == sizes
    if name.startswith("pairs"):
        wins = np.mean([line["chosen"] > line["rejected"] for line in lines])
        assert f"11 pairs: accuracy {wins:.4f}, margin " in out and (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert not (tmp_path / "s.png").exists()


@pytest.mark.parametrize(("ranks", "layout"), cells(
    [(2, ["--tp", "2"])], product=[(4, ["--tp", "2", "--pp", "2"]), (2, [])],
))  # fmt: skip
def test_layouts_give_the_same(ranks: int, layout: list[str], models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, folder, imported = models
    words = ["--model", str(imported), "--input", str(folder / "pairs.jsonl"), "--batch-size", "3"]
    code, _, err = run(*words, "--output", str(tmp_path / "s.jsonl"), *layout, ranks=ranks)
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    expected = [[hf_score(model, ids) for ids in ids_of(row)] for row in PAIRS]
    np.testing.assert_allclose([[line["chosen"], line["rejected"]] for line in lines], expected, atol=1e-5)


def test_the_report_counts_pairs() -> None:
    generator = np.random.default_rng(0)
    chosen, rejected = generator.normal(0.5, 2, 400), generator.normal(0, 2, 400)
    report = report_pairs(chosen.tolist(), rejected.tolist())
    wins, distance = 0, 0.0
    bin_pairs: dict[int, list[tuple[float, bool]]] = {}
    for chosen_score, rejected_score in zip(chosen, rejected, strict=True):
        wins += bool(chosen_score > rejected_score)
        sure = max(1 / (1 + math.exp(rejected_score - chosen_score)), 1 / (1 + math.exp(chosen_score - rejected_score)))
        bin_pairs.setdefault(min(int((sure - 0.5) / 0.05), 9), []).append((sure, bool(chosen_score > rejected_score)))
    assert report.accuracy == wins / 400 and report.margin == pytest.approx((chosen - rejected).mean())
    assert [chosen_score.count for chosen_score in report.bins] == [len(bin_pairs[i]) for i in sorted(bin_pairs)]
    for chosen_score, place in zip(report.bins, sorted(bin_pairs), strict=True):
        predicted, observed = np.mean(bin_pairs[place], 0)
        assert (chosen_score.predicted, chosen_score.observed) == (pytest.approx(predicted), pytest.approx(observed))
        distance += abs(predicted - observed) * chosen_score.count / 400
    assert report.calibration_error == pytest.approx(distance)
    torch_loss = torch.nn.functional.softplus(torch.tensor(rejected - chosen)).mean()
    assert report.loss == pytest.approx(float(torch_loss))
    assert report_pairs([1.0], [1.0]).accuracy == 0, "a tie counts as wrong"


@pytest.mark.more
def test_refusals_leave_nothing_behind(models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, folder, imported = models
    (tmp_path / "long.jsonl").write_text('{"text": "a"}\n{"text": "' + "word " * 100 + '"}\n')
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    reward, language = str(folder / "reward"), str(folder / "tiny-llama")
    for model, file, text_of in (
        (language, "pairs.jsonl", "tiny-llama: .*language model.*reward model"),
        (reward, "none.jsonl", "none.jsonl"),
        (reward, str(tmp_path / "other.jsonl"), r"other.jsonl:1: .*question"),
        (reward, str(tmp_path / "long.jsonl"), r"long.jsonl:2: \d+ tokens.*--max-length 64"),
    ):
        words = ["--input", str(folder / file), "--output", str(tmp_path / "s.jsonl")]
        code, out, err = run("--model", model, *words)
        assert code == 1 and not out and re.search(text_of, err), err
    words = ["--input", str(tmp_path / "long.jsonl"), "--output", str(tmp_path / "d.jsonl"), "--overlong", "drop"]
    code, _, err = run("--model", reward, *words)
    assert code == 0, err
    dropped = json.loads((tmp_path / "d.jsonl").read_text().splitlines()[1])
    assert dropped == {"score": None, "message": "dropped: longer than the model's positions"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl", "long.jsonl", "other.jsonl"]
