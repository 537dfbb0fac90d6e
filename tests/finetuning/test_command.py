"""`deepy.py finetune MODEL DATA` as it is typed, with tiny models, and `deepy.py chat` with its result."""

import io
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from megatron.finetuning.command import main
from megatron.generation.from_huggingface import hf_model_keys
from tests.finetuning.test_formats import assistant, user, write
from tests.generation.serving.server import NAME, make_model
from tests.marks import with_more
from tests.pool import run_ranks
from tests.tools.commands import on_ranks

ROWS: Mapping[str, list[dict[str, Any]]] = {
    "chats": [{"messages": [user(f"What is lamp {n} for?"), assistant(f"It is for {n}.")]} for n in range(24)],
    "pairs": [{"prompt": f"Lamp {n}?", "chosen": f"It is for {n}.", "rejected": "No."} for n in range(24)],
    "judged": [{"prompt": f"Lamp {n}?", "completion": f"It is for {n}.", "label": n % 2 == 0} for n in range(24)],
    "texts": [{"text": f"Lamp {n} is for the house with the number {n} beside the sea and no other. " * 3}
              for n in range(24)],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama, and the same without a chat template."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder)
    shutil.copytree(folder / NAME, folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    return {"chat": folder / NAME, "base": folder / "base"}


class Scripts:
    """Runs what `finetune` runs: tools in this process, training on a rank of the pool."""

    def __init__(self) -> None:
        self.ran: list[Sequence[str]] = []

    def run(self, words: Sequence[str]) -> int:
        self.ran.append(words)
        script, *arguments = words
        if script != "deepy.py":
            return import_module(script.removesuffix(".py").replace("/", ".")).main(arguments) or 0
        code, out, err = on_ranks("train", *arguments[1:])
        print(out, err)
        return code


def finetune(scripts: Scripts, *words: object) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr)."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words], scripts.run, hf_model_keys)
    return code, out.getvalue(), err.getvalue()


def talk(rank: int, world_size: int, words: Sequence[str], text: str) -> tuple[int, str]:
    """For the pool: exit code and stdout of `deepy.py chat`."""
    from megatron.generation.chat_command import main as chat
    from megatron.launch import process_info

    read, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    os.dup2(read, 0)
    with redirect_stdout(io.StringIO()) as out:
        return chat(words, lambda: process_info({})), out.getvalue()


@pytest.mark.parametrize("case", with_more(
    ["chats chat", "chats base", "pairs base", "judged chat", "texts base"], "chats chat", "judged chat", "texts base"
))  # fmt: skip
def test_a_model_is_tuned_and_talks(models: dict[str, Path], tmp_path: Path, case: str) -> None:
    kind, model = case.split()
    data, out, scripts = write(tmp_path / "data.jsonl", list(ROWS[kind])), tmp_path / "out", Scripts()
    words = [models[model], data, "--output", out, "--valid", 4, "--set", "lora.r=4", "optimizer.params.lr=1e-3",
             "train_iters=4", "maximum_tokens=4"]  # fmt: skip
    code, printed, err = finetune(scripts, *words)
    assert code == 0, printed + err
    assert f"finetune: talk to it: python deepy.py chat {out}\n" in printed
    keys = yaml.safe_load((out / "finetune.yml").read_text())
    assert keys["load"] == str(models[model]) and keys["lora"]["r"] == 4 and keys["optimizer"]["params"]["lr"] == 1e-3
    rows = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 4
    assert "\nlora:\n  r: 4\n" in (out / "best_model" / "README.md").read_text()
    adapter = json.loads((out / "best_model" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(models[model])
    assert (out / "demo_outputs" / "comparison.md").is_file() and (out / "report.html").is_file()
    if kind == "texts":
        return
    template = (out / "best_model" / "chat_template.jinja").read_bytes()
    model_template = models[model] / "chat_template.jinja"
    assert template == (model_template if model_template.is_file() else out / "chat_template.jinja").read_bytes()
    code, said_words = run_ranks(
        talk, 1, [str(out), "--maximum-tokens", "3"], "What is lamp 3 for?\nAnd 4?\n", init=False
    )[0]
    assert code == 0 and len(said_words.splitlines()) >= 2

    # typed again, nothing is prepared again and no step is made again
    ran = len(scripts.ran)
    assert finetune(scripts, *words)[0] == 0
    assert scripts.ran[ran:] == [["deepy.py", "train.py", str(out / "finetune.yml")]]
    assert len((out / "logs" / "metrics.jsonl").read_text().splitlines()) == len(rows)

    # more steps, written into the file, go on from there
    config = out / "finetune.yml"
    config.write_text(config.read_text().replace("train_iters: 4", "train_iters: 6"))
    code, printed, err = finetune(scripts, *words)
    assert code == 0 and "best model" in printed, printed + err
    rows = [json.loads(line) for line in (out / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 6


def test_the_configuration_is_train_pys(models: dict[str, Path], tmp_path: Path) -> None:
    """An interrupted preparation begins again; a finished one, edited, stays as it is."""
    data, out, scripts = write(tmp_path / "data.jsonl", list(ROWS["chats"])), tmp_path / "out", Scripts()
    words = [models["chat"], data, "--output", out, "--prepare-only"]

    class Stop(Exception):
        pass

    def stop(words: Sequence[str]) -> int:
        raise Stop

    with pytest.raises(Stop):
        main([str(word) for word in words], stop, hf_model_keys)
    assert not (out / "finetune.yml").exists()
    assert finetune(scripts, *words)[0] == 0 and [run[0] for run in scripts.ran] == [
        "tools/datasets/preprocess_data_with_chat_template.py"] * 2  # fmt: skip
    config = out / "finetune.yml"
    edited = re.sub(r"train_epochs: \d+", "train_iters: 2", config.read_text())
    config.write_text(edited)
    assert finetune(scripts, *words)[0] == 0 and config.read_text() == edited and len(scripts.ran) == 2
    code, printed, _ = on_ranks(
        "train", str(config), "--set", f"save={tmp_path}/other", "demo_prompts=null", "chat=false"
    )
    assert code == 0, printed
    assert json.loads((tmp_path / "other" / "status.json").read_text())["iteration"] == 2


def test_another_fine_tuning_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    data, out, scripts = write(tmp_path / "data.jsonl", list(ROWS["chats"])), tmp_path / "out", Scripts()
    words = [models["chat"], data, "--output", out, "--prepare-only"]
    assert finetune(scripts, *words)[0] == 0
    (out / "latest").write_text("global_step1")
    config = (out / "finetune.yml").read_bytes()
    write(tmp_path / "data.jsonl", list(ROWS["chats"][:9]))
    for changed, message in (
        (words, f"begun with {data}, which has changed since; name another folder"),
        ([models["base"], *words[1:]], f"MODEL {models['chat']}, and now it is {models['base']}"),
        ([*words, "--set", "seed=3"], "--set nothing, and now it is seed=3; edit "),
        ([*words, "--set", "sead=3"], "sead: unknown key; did you mean seed?"),
        ([words[0], "none.jsonl", *words[2:]], "DATA none.jsonl: no such file"),
    ):
        code, _, err = finetune(scripts, *changed)
        assert code == 1 and message in err and len(err.splitlines()) == 1, err
    assert (out / "finetune.yml").read_bytes() == config
    (out / "latest").unlink()  # nothing is trained yet
    code, printed, _ = finetune(scripts, *words, "--set", "seed=3")
    assert code == 0 and "prepared anew" in printed and (out / "finetune.old.yml").read_bytes() == config
    assert "seed: 3\n" in (out / "finetune.yml").read_text()
    (out / "finetune.json").write_text("")
    code, _, err = finetune(scripts, *words)
    assert code == 1 and "finetune.json: is damaged" in err
    code, _, err = finetune(scripts, models["chat"], data, "--output", tmp_path)
    assert code == 1 and str(tmp_path) in err and "--output" in err


@pytest.mark.parametrize(("words", "message"), [
    (["none.jsonl"], "none.jsonl"),
    (["data.jsonl", "--set", "save=x"], "save"),
    (["data.jsonl", "--set", "train_data_paths=[x]"], "train_data_paths"),
    (["data.jsonl", "--set", "no_such_key=1"], "no_such_key"),
    (["data.jsonl", "--set", "seq_length=banana"], "seq_length"),
    (["data.jsonl", "--set", "eval_iters=0", "save_best=validation/lm_loss"], "save_best"),
    (["data.jsonl", "--valid", "30"], "valid 30"),
    (["data.jsonl", "--chat-template", "none.jinja"], "none.jinja"),
])  # fmt: skip
def test_refusals_are_one_line(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               words: list[str], message: str) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data.jsonl", list(ROWS["chats"]))
    code, _, err = finetune(Scripts(), models["chat"], *words, "--output", "out")
    assert code == 1 and len(err.splitlines()) == 1 and message in err and not Path("out/finetune.yml").exists()


def test_models_and_folders_that_are_none_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", list(ROWS["chats"]))
    (tmp_path / "run" / "best_model").mkdir(parents=True)
    (tmp_path / "file").touch()
    for model, out, message in ((tmp_path / "run", "a", "best_model"), (tmp_path / "none", "b", "MODEL: .*none"),
                                (models["chat"], "file", "file")):  # fmt: skip
        code, _, err = finetune(Scripts(), model, data, "--output", tmp_path / out)
        assert code == 1 and re.fullmatch(f"deepy.py finetune: error: .*{message}.*\n", err)


def test_the_template_of_models_without_one(models: dict[str, Path]) -> None:
    """A conversation begins with the rendered prompt; only answers are marked, each with the end of text."""
    template = Path(import_module("megatron.finetuning").__file__ or "").with_name("chat_template.jinja").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["base"])
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Why?"),
        assistant("So."),
        user("Still?"),
        assistant("Yes."),
    ]

    def rendered(count: int, **options: Any) -> str:
        return tokenizer.apply_chat_template(messages[:count], chat_template=template, tokenize=False, **options)

    rendered_text, end = rendered(5), tokenizer.eos_token
    assert (
        rendered_text
        == f"Be brief.\n\nUser:\nWhy?\n\nAssistant:\nSo.{end}\n\nUser:\nStill?\n\nAssistant:\nYes.{end}\n\n"
    )
    assert rendered_text.startswith(rendered(2, add_generation_prompt=True)) and rendered(4).endswith("Assistant:\n")
    tokens = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [token for token, mask in zip(tokens["input_ids"], tokens["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == f"So.{end}Yes.{end}"
