"""tools/ask.py as it is typed, against `generate` of transformers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron.checkpointing.huggingface import HFFolder, import_hf
from tests.generation.serving.server import FOLDER, NAME, make_model
from tests.tools.commands import on_ranks
from tools import ask

QUESTIONS = ["What does the lantern cost?", "And in a storm?"]
SYSTEM = "Be brief."
TOKENS = 12


def run(*argv: object, stdin: str = "") -> tuple[int, str, str]:
    return on_ranks("tools.ask", *map(str, argv), "--maximum-tokens", str(TOKENS), stdin=stdin)


def hf_answer(model: Any, question: str, system: str | None) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ends = [0, tokenizer.eos_token_id]
    generated = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=1)
    return tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A tiny Llama, its folder, and its import as a folder of checkpoints."""
    folder = tmp_path_factory.mktemp("models")
    model = make_model(folder)
    import_hf(HFFolder(folder / NAME), folder / "imported")
    return model, folder / NAME, folder / "imported"


def test_answers_are_those_of_transformers(models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, folder, imported = models
    (tmp_path / "system.txt").write_text(f"{SYSTEM}\n")
    words = ["--system-file", tmp_path / "system.txt", "--json"]
    code, out, err = run("--model", folder, "--compare", imported, *words, *QUESTIONS)
    assert code == 0, err
    expected = [hf_answer(model, question, SYSTEM) for question in QUESTIONS]
    assert len(set(expected)) == 2
    answers = [json.loads(line) for line in out.splitlines()]
    assert [line["question"] for line in answers] == QUESTIONS
    for line, text in zip(answers, expected, strict=True):
        assert [answer["answer"] for answer in line["answers"]] == [text, text]
        assert [answer["model"] for answer in line["answers"]] == [str(folder), str(imported)]


def test_typed_questions_and_a_table(models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    model, folder, imported = models
    code, out, err = run("--model", imported / "global_step0", stdin=f"{QUESTIONS[0]}\n\nnever read\n")
    assert code == 0, err
    assert out == f"> {QUESTIONS[0]}\n{hf_answer(model, QUESTIONS[0], None).strip()}\n\n"
    assert ask.render_answers("q", ["one", "two"], ["a b", "line\nnext"], 43).splitlines() == [
        "> q", "one                  | two", "-" * 20 + "-+-" + "-" * 20, "a b                  | line",
        "                     | next",
    ]  # fmt: skip


def test_refusals(models: tuple[Any, Path, Path], tmp_path: Path) -> None:
    _, folder, imported = models
    scores, bare = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("scores", "bare"))
    config = json.loads((folder / "config.json").read_text())
    classes = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (scores / "config.json").write_text(json.dumps({**config, **classes}))
    (bare / "chat_template.jinja").unlink()
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n{"messages": []}\n')
    (tmp_path / "long.txt").write_text("word " * 5000)
    for words, text in (
        (["--model", scores, "a"], "scores: .*reward model"),
        (["--model", bare, "a"], f"{bare}: .*chat template.*--chat-template FILE"),
        (["--model", folder, "--file", tmp_path / "q.jsonl"], "q.jsonl:2: .*messages"),
        (["--model", folder, "--file", tmp_path / "long.txt"], "question 1: .* tokens.* 4084 "),
        (["--model", imported, "--iteration", "3", "a"], "no checkpoint of iteration 3.* 0"),
        (["--model", tmp_path / "none", "a"], "none: no such folder.*ORG/NAME"),
    ):
        code, out, err = run(*words)
        assert code == 1 and not out and re.search(text, err), err
