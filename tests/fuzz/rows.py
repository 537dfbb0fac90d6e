"""Files of rows for preprocessing and fine-tuning, in every format, and folders of datasets."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.finetuning.rows import RowSource, write_rows
from tests.data.preprocessing.chat_tokenizers import ANSWER, ASK
from tests.data.preprocessing.test_readers import CONTENT
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import Case
from tests.fuzz.mutations import odd_files, spoilt_bytes, spoilt_file, spoilt_folder, spoilt_json, texts
from tests.generation.serving.server import FOLDER
from tools.datasets import preprocess_data, preprocess_data_with_chat_template

_CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1", "function": {
    "name": "price", "arguments": "{\"of\": \"silk\"}"}}]}  # fmt: skip
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": [ASK, ANSWER], "tools": [{"type": "function", "function": {"name": "price", "parameters": {}}}]},
    {"messages": [{"role": "system", "content": "Be brief."}, ASK, _CALL, {"role": "tool", "content": "9"}, ANSWER]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": [ASK], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "No."}], "margin": 0.5},
    {"prompt": "a", "completion": "b", "label": True},
    {"question": "a", "answer": "b"},
    {"instruction": "a", "input": "c", "output": "b"},
    {"text": "a quiet harbour"},
)  # fmt: skip
_KEYS = tuple(
    tuple(keys.split())
    for keys in ("messages", "conversations", "chosen rejected", "completion", "answer", "output", "text")
)
_DATASET = {
    "state.json": {"_data_files": [{"filename": "file.arrow"}], "_split": "train", "_indices_files": None},
    "dataset_dict.json": {"splits": ["train"]},
}


@st.composite
def _file(draw: DrawFn) -> Case:
    """A file of texts in some format: its bytes spoilt, or another format's under its name."""
    name = draw(st.sampled_from(sorted(CONTENT)))
    content = CONTENT[name] if draw(st.integers(0, 9)) else CONTENT[draw(st.sampled_from(sorted(CONTENT)))]
    entry = draw(spoilt_bytes(content)) if draw(st.integers(0, 19)) else draw(odd_files)
    return {f"texts/{name}": entry}


@st.composite
def _rows(draw: DrawFn) -> Case:
    """A file of JSON rows for chats, pairs, judged answers or texts: values spoilt."""
    row = draw(st.sampled_from(ROWS))
    lines = [json.dumps(row).encode(), draw(spoilt_json(row)), draw(spoilt_json(row))]
    content = b"\n".join(line.replace(b"\n", b" ") for line in lines)
    return {draw(st.sampled_from(["rows.jsonl", "chats.jsonl"])): content}


@st.composite
def _folder(draw: DrawFn) -> Case:
    """A folder that `save_to_disk` wrote, or one as on the Hub."""
    if draw(st.booleans()):
        name = "state.json" if draw(st.booleans()) else "dataset_dict.json"
        spoilt = draw(spoilt_file(json.dumps(_DATASET[name]).encode()))
        folder = "" if name == "state.json" else "train/"
        files = {"dataset_dict.json": json.dumps(_DATASET["dataset_dict.json"]).encode()} if folder else {}
        files[f"{folder}state.json"] = json.dumps(_DATASET["state.json"]).encode()
        return {f"saved/{part}": entry for part, entry in {**files, f"{folder}file.arrow": CONTENT["stream.arrow"],
                                                           name: spoilt}.items()}  # fmt: skip
    readme = b"---\nconfigs:\n- config_name: a\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n# Rows\n"
    files = {"README.md": readme, "a.jsonl": CONTENT["a.jsonl"][:400]}
    return {f"saved/{name}": entry for name, entry in {**files, **draw(spoilt_folder(files, ["README.md"]))}.items()}


@st.composite
def _splits(draw: DrawFn) -> Case:
    return {"texts/a.jsonl": CONTENT["a.jsonl"], "split.txt": draw(
        st.one_of(texts, st.sampled_from(["train[", "train[:5%]", "train[-3:]", "train[5:2]", "train+test", "all[1:]"]))
    ).encode(errors="surrogatepass")}  # fmt: skip


def _run(folder: Path) -> None:
    if (folder / "rows.jsonl").exists():  # for `deepy.py finetune`
        write_rows(RowSource(str(folder / "rows.jsonl"), "0.3"), folder / "out")
        return
    if (folder / "chats.jsonl").exists():
        _read_chats(folder / "chats.jsonl")
        return
    saved, texts_folder = folder / "saved", folder / "texts"
    place = saved if saved.exists() else next(texts_folder.iterdir(), texts_folder / "a.jsonl")
    words = ["--input", place, "--output-prefix", folder / "out", "--tokenizer-type", "CharLevelTokenizer"]
    if (folder / "split.txt").exists():
        words += [f"--split={(folder / 'split.txt').read_bytes().decode(errors='surrogateescape')}"]
    command(preprocess_data.main, *words)


def _read_chats(file: Path) -> None:
    row = json.loads(file.read_bytes().splitlines()[0])
    keys = next(keys for keys in _KEYS if row.keys() >= set(keys))
    reward = [word for name in ("label", "margin") if name in row for word in ("--reward-key", name)]
    words = ["--input", file, "--output-prefix", file.parent / "out", "--on-bad-row", "stop", "--jsonl-keys", *keys]
    command(preprocess_data_with_chat_template.main, *words, "--tokenizer-path", FOLDER, *reward)


KIND = Kind("rows", st.one_of(_file(), _file(), _rows(), _rows(), _folder(), _splits()), _run)
