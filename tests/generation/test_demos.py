"""Answers before and after training: whose they are, that training does not notice, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron.generation.batching.requests import RequestError
from megatron.generation.demos import Demos, comparison
from megatron.generation.prompts.questions import Question, read_questions
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import train
from tests.generation.runs import lines
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, begin, bit_equal, config
from tests.training.test_huggingface import MODEL, TOKENIZER

TOKENS = 6
LINES = [{"prompt": "the lantern"}, {"messages": [
    {"role": "user", "content": "a | b?"}, {"role": "assistant", "content": "left out"},
]}]  # fmt: skip


def demo_config(folder: Path, name: str, *parts: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Two steps with dropout, so that random numbers matter."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    common = {"num_layers": 2, "train_iters": 2, "checkpoint_factor": 1, "max_position_embeddings": 64, "save_hf": 0,
              "hidden_dropout": 0.1, "attention_dropout": 0.1, "vocab_file": str(TOKENIZER), "maximum_tokens": TOKENS,
              "save": str(folder / name), "load": str(folder / name),
              "demo_prompts": str(folder / "prompts.jsonl")}  # fmt: skip
    return config(MODEL, common, {"optimizer": {"type": "Adam", "params": {"lr": 0.02}}}, *parts, **kwargs)


def run(rank: int, world_size: int, values: dict[str, Any], demos: bool) -> dict[int, Any]:
    """For the pool: the weights after a run as train.py makes it."""
    training = begin(values)
    train(training, [Demos(training)] if demos else [])
    weights = training.engine.weights(master=True)
    training.engine.close()
    return {layer: {name: value.clone() for name, value in tensors.items()} for layer, tensors in weights.items()}


def answers(file: Path) -> list[str]:
    return [line["answer"] for line in lines(file)]


@pytest.mark.parametrize("layout", with_more(["pp2", "zero3"], product=["zero3"]))
def test_answers_are_the_models_and_training_is_the_same(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    with_demos = run_ranks(run, ranks, demo_config(tmp_path, "with", keys), True)
    without_demos = run_ranks(run, ranks, demo_config(tmp_path, "without", keys), False)
    assert all(bit_equal(a, b) for a, b in zip(with_demos, without_demos, strict=True))
    folder = tmp_path / "with" / "demo_outputs"
    assert not (tmp_path / "without" / "demo_outputs").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.md", "step0.jsonl", "step2.jsonl"]
    exported = tmp_path / "with" / "huggingface" / "global_step2"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    chat = tokenizer.apply_chat_template(LINES[1]["messages"][:1], add_generation_prompt=True, tokenize=False)
    expected = []
    for text in ("the lantern", chat):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ends = [0, tokenizer.eos_token_id]
        generated = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=ends, pad_token_id=1)
        expected.append(tokenizer.decode(generated[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert answers(folder / "step2.jsonl") == expected
    assert answers(folder / "step0.jsonl") != expected


def test_a_run_that_goes_on_keeps_its_first_answers(tmp_path: Path) -> None:
    run_ranks(run, 1, demo_config(tmp_path, "run", exit_interval=1), True)
    folder = tmp_path / "run" / "demo_outputs"
    assert [path.name for path in folder.iterdir()] == ["step0.jsonl"]
    marked = (folder / "step0.jsonl").read_text().replace(json.dumps(answers(folder / "step0.jsonl")[1]), '"as | was"')
    (folder / "step0.jsonl").write_text(marked)
    run_ranks(run, 1, demo_config(tmp_path, "run"), True)
    assert (folder / "step0.jsonl").read_text() == marked
    text = (folder / "comparison.md").read_text()
    assert "## 2. a \\| b?" in text and "| as \\| was | " in text


def test_a_comparison_lists_what_was_not_compared() -> None:
    text = comparison([Question("q")], [None], [{"answer": "one\ntwo <b>"}], 5)
    assert " after 5 steps " in text and re.search(r"\n\| .* \| one<br>two &lt;b&gt; \|\n", text)


def test_files_of_questions(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n  two \n")
    assert read_questions(tmp_path / "a.txt", False) == [Question("one"), Question("two")]
    question = read_questions(tmp_path / "a.txt", True, "Be brief.")[1]
    assert question.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"})
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\u2028line"}\n', encoding="utf-8")
    assert read_questions(tmp_path / "a.jsonl", False) == [Question("one\u2028line")]
    for content, text in (
        ("", "a.jsonl: holds no question"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "a.jsonl:2: .*prompt"),
        ("nothing\n", "a.jsonl:1: "),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "a.jsonl:1: .*last message"),
    ):
        (tmp_path / "a.jsonl").write_text(content)
        with pytest.raises(RequestError, match=text):
            read_questions(tmp_path / "a.jsonl", False)
    with pytest.raises(RequestError, match="none.txt: cannot be read"):
        read_questions(tmp_path / "none.txt", False)


def test_what_is_refused_as_it_is_written(tmp_path: Path) -> None:
    for changes, facts in (({"save": None, "load": None, "save_hf": None}, "demo_prompts: .*save"),
                           ({"system_prompt_file": "x"}, "system_prompt_file: .*chat: true"),
                           ({"maximum_tokens": 64}, "maximum_tokens: 64 ")):  # fmt: skip
        with pytest.raises(ConfigError, match=facts):
            NeoXArgs.from_dict(demo_config(tmp_path, "run", changes)).check_training()


def refused(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[str]:
    """For the pool: why no demos can be made."""
    messages = []
    for values in runs:
        training = begin(values)
        try:
            train(training, [Demos(training)])
        except Exception as problem:
            messages.append(str(problem))
        training.engine.close()
    return messages


def test_what_is_refused_before_the_first_step(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "prompts.jsonl: question 1: .* 6 tokens.* 4 .*maximum_tokens": {"maximum_tokens": 60},
        "chat template .*vocab_file": {"vocab_file": str(TOKENIZER.parent / "tokenizer.json")},
        "demo_prompts: /none.txt: ": {"demo_prompts": "/none.txt"},
    }
    (messages,) = run_ranks(
        refused, 1, [demo_config(tmp_path, f"{i}", keys) for i, keys in enumerate(changes.values())]
    )
    assert all(re.search(facts, message) for facts, message in zip(changes, messages, strict=True)), messages
