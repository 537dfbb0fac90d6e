"""The recipes of docs/recipes: each page typed, with tiny models and data in the place of published ones."""

import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest
import torch

import megatron.launch
from megatron.process.metrics_file import read_metrics
from megatron.process.run_files import Problems
from tests.checkpointing.family_models import random_model
from tests.data.preprocessing.chat_tokenizers import CHATML, fast_tokenizer
from tests.launch.runs import ROOT, environment
from tests.marks import with_more
from tests.pool import run_ranks
from tests.recipes.test_recipes import text, turn
from tests.training.runs import GOLDEN
from tools.docs.recipe_pages import (
    DATA,
    MODELS,
    PAGES,
    SMALL_RUNS,
    CommandFailed,
    Typist,
    sizes_by_script,
    write_stand_ins,
)

NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
IN_PROCESSES = "grpo-arithmetic"  # the page whose commands have interpreters of their own
QUICK = {
    "train_iters": "2", "train_batch_size": "4", "train_micro_batch_size_per_gpu": "4", "seq_length": "64",
    "eval_iters": "1", "precision": "fp32", "num_workers": "0", "warmup_iters": "0", "lr_decay_iters": "2",
    "eval_interval": "2",
}  # fmt: skip
SCRATCH = {
    **QUICK, "num_layers": "8", "hidden_size": "32", "num_attention_heads": "4", "max_position_embeddings": "256",
    "log_interval": "1",
    "split": "60,40,0", "zero_optimization.stage": "0", "warmup": "0.5", "warmup_iters": "null",
}  # fmt: skip
FINETUNE = {"seq_length": "64", "train_epochs": "1"}
SIZES = {
    **dict.fromkeys(("smollm2-chat", "gemma-text", "qwen-lora", "olmo-dpo"), FINETUNE),
    "grpo-arithmetic": {**QUICK, "train_batch_size": "8", "rollout.max_completion_length": "4", "eval_iters": "0"},
    "unlearning-tofu": {**QUICK, "train_iters": "4", "eval_iters": "0"},
    "distillation": {**QUICK, "eval_iters": "0", "train_epochs": "null", "warmup_iters": "null"},
    "pretrain-125m": SCRATCH,
    "mamba-hybrid": {**SCRATCH, "num_kv_heads": "4"},
    "mixture": {**SCRATCH, "train_data_weight_schedule.until": "[1]"},
}


def run_typed(rank: int, world_size: int, words: Sequence[str], chat_input: str) -> tuple[object, str]:
    """For the pool: exit code and output of a command; what deepy.py starts on ranks runs in its process."""
    read, write = os.pipe()
    os.write(write, chat_input.encode())
    os.close(write)
    os.dup2(read, 0)
    megatron.launch.launch = lambda script, args, *_: import_module(Path(script).stem).main(args)
    sys.argv = list(words)
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
        code = import_module(words[0].removesuffix(".py").replace("/", ".")).main()
    return code, output.getvalue()


class PoolTypist(Typist):
    """Types into ranks of the pool: fresh interpreters import torch for each command of a page."""

    def _run(self, command: list[str]) -> None:
        code, output = run_ranks(run_typed, 1, command[1:], self.chat_input, init=False, timeout=290)[0]
        if code:
            raise CommandFailed(f"{shlex.join(command)}\n{output}")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of tiny models and data, by published name."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = fast_tokenizer(CHATML)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "hidden_size": 16}
    random_model("llama 3", torch.float32, **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    shutil.copy(GOLDEN / "dataset/tokenizer.json", folder / "tokenizer.json")
    chats = [turn(text(i, 4), text(i + 1, 5)) for i in range(60)]
    pairs = [
        {"prompt": text(i, 3), "chosen": text(i + 1, 2 + i % 3), "rejected": text(i + 2, 1 + i % 4)} for i in range(60)
    ]
    data = write_stand_ins(folder, chats, pairs, [text(i, 60) for i in range(60)])
    return dict.fromkeys(MODELS, str(folder / "model")) | data


@pytest.mark.parametrize("name", with_more(NAMES, *({*NAMES} - {IN_PROCESSES})))
def test_a_page_works_as_typed(
    name: str, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (PAGES / f"{name}.md").read_text()
    sizes = sizes_by_script(SIZES[name])
    sizes["finetune"] = FINETUNE
    kind = Typist if name == IN_PROCESSES else PoolTypist
    typist = kind(tmp_path / "typed", names, sizes, environment())
    monkeypatch.chdir(typist.folder)
    typist.type_page(page)
    run = SMALL_RUNS[name]
    rows = list(read_metrics(typist.folder / run.save / "logs/metrics.jsonl", Problems()))
    for series in run.series:
        assert any(row.get(series) is not None for row in rows), (series, rows)
    names_in_page = {published for published in (*MODELS, *DATA) if published in page}
    assert names_in_page == {published for published in (*MODELS, *DATA) if f"huggingface.co/{published})" in page or
                    f"huggingface.co/datasets/{published})" in page}  # fmt: skip


def test_every_recipe_is_in_the_list_and_has_a_plot() -> None:
    index = (ROOT / "docs/recipes.md").read_text()
    assert sorted(SMALL_RUNS) == NAMES and len(NAMES) == 10
    for name in NAMES:
        page = (PAGES / f"{name}.md").read_text()
        assert f"(recipes/{name}.md)" in index and f"({name}.png)" in page and (PAGES / f"{name}.png").exists()
        for heading in ("## Type", "## You will see", "## Time and memory"):
            assert f"\n{heading}\n" in page
        assert re.search(r"It took [\d.]+ minutes and [\d.]+ GB of memory\.", page)
