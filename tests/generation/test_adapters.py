"""`--adapter`: the text of transformers with peft, from every command, of peft's folders and checkpoints."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.checkpointing.adapters import open_with_base, write_adapters
from megatron.checkpointing.huggingface import HFFolder, import_hf
from tests.generation.runs import command, lines
from tests.generation.serving.server import NAME, greedy_texts, make_adapters, make_model
from tests.pool import run_ranks
from tests.tools import test_ask as asking

PROMPTS = ("The lantern", "A storm came over the", "Once")
TOKENS = 12


class Adapted(NamedTuple):
    """base, folder: HuggingFace's folder and peft's. imported, adapters: the same in ours."""

    model: Any
    base: Path
    folder: Path
    imported: Path
    adapters: Path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    place = tmp_path_factory.mktemp("adapted")
    make_model(place)
    tuned = make_adapters(place, "peft", 5, r=4, lora_alpha=8, target_modules="all-linear", use_dora=True)
    imported, _ = import_hf(HFFolder(place / NAME), place / "base")
    base, (source,) = open_with_base([place / "peft"], imported)
    return Adapted(tuned, place / NAME, place / "peft", imported, write_adapters(base, source, place / "ours"))


def generated(tmp_path: Path, ranks: int, *words: str) -> list[str]:
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    keys = [f"maximum_tokens={TOKENS}", "temperature=0", f"log_dir={tmp_path}/logs"]
    out = ["-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl")]
    results = run_ranks(command, ranks, [*words, *out, "--set", "text_gen_type=input-file", *keys], init=False)
    assert [code for code, _, _ in results] == [0] * ranks, results
    return [line["text"] for line in lines(tmp_path / "out.jsonl")]


@pytest.mark.product
@pytest.mark.parametrize("ranks", [1, 2])
def test_generate_writes_what_peft_does(adapted: Adapted, tmp_path: Path, ranks: int) -> None:
    expected = greedy_texts(adapted.model, PROMPTS, TOKENS)
    with adapted.model.disable_adapter():
        assert greedy_texts(adapted.model, PROMPTS, TOKENS) != expected
    layout = [] if ranks == 1 else ["--set", f"model_parallel_size={ranks}"]
    words = ["--hf-model", str(adapted.base), *layout]
    assert generated(tmp_path, ranks, *words, "--adapter", str(adapted.folder)) == expected
    half = [f"{adapted.folder}=0.5", f"{adapted.folder}=0.5"]
    assert (
        generated(tmp_path, ranks, *words, *(word for adapter in half for word in ("--adapter", adapter))) == expected
    )

    adapters_path = adapted.adapters
    words = [
        str(adapters_path / "configs" / "adapter.yml"),
        "--set",
        f"vocab_file={adapted.base}/tokenizer.json",
        *layout[1:],
    ]
    words += ["tokenizer_type=HFTokenizer"]
    assert generated(tmp_path, ranks, *words, f"load={adapters_path.parent}") == expected
    separate_words = ["lora=null", f"load={adapted.imported.parent}", "--adapter", str(adapters_path)]
    assert generated(tmp_path, ranks, *words, *separate_words) == expected


def test_ask_opens_adapters_by_every_name(adapted: Adapted) -> None:
    adapters_path, expected = adapted.adapters, asking.hf_answer(adapted.model, asking.QUESTIONS[0], None)
    names = [["--model", str(adapted.folder)], ["--model", str(adapters_path)], ["--model", str(adapters_path.parent)],
             ["--model", str(adapted.imported), "--adapter", str(adapters_path)],
             ["--model", str(adapted.base), "--adapter", str(adapted.folder)]]  # fmt: skip
    for words in names:
        code, out, err = asking.run(*words, "--json", asking.QUESTIONS[0])
        assert code == 0, (words, err)
        assert json.loads(out)["answers"][0]["answer"] == expected, words
    for model, adapter, facts in ((adapters_path, adapted.folder, "name its base model"),
                                  (adapted.base, adapters_path, "trained on other weights than"),
                                  (adapted.base, adapted.base, "holds no adapters")):  # fmt: skip
        code, _, err = asking.run("--model", str(model), "--adapter", str(adapter), "q")
        assert code == 1 and facts in err
