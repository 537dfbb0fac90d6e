"""tools/datasets/split.py, its files read with numpy alone."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDatasetWriter
from tests.data.samples import DATASET
from tests.tools.commands import refused, run_tool
from tools.datasets import split

run = partial(run_tool, split.main)
TYPES = {3: np.int16, 4: np.int32, 6: np.float32, 8: np.uint16}


def rows(prefix: Path) -> list[tuple[float, ...]]:
    """The documents of a pair by the format's own description, without our reader."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    code, count = index[17], int(np.frombuffer(index, "<u8", 1, 18)[0])
    boundaries = int(np.frombuffer(index, "<u8", 1, 26)[0])
    sizes = np.frombuffer(index, "<i4", count, 34)
    pointers = np.frombuffer(index, "<i8", count, 34 + 4 * count)
    ends = np.frombuffer(index, "<i8", boundaries, 34 + 12 * count)
    tokens = np.fromfile(f"{prefix}.bin", TYPES[code])
    width = tokens.dtype.itemsize
    sequences = [tokens[p // width : p // width + n] for p, n in zip(pointers, sizes, strict=True)]
    return [tuple(np.concatenate([*sequences[a:b], []]).tolist()) for a, b in zip(ends, ends[1:], strict=False)]


def copied(folder: Path, *names: str) -> None:
    for name in names:
        for suffix in (".bin", ".idx"):
            shutil.copy(DATASET / f"{name}{suffix}", folder / f"{name}{suffix}")


def test_labels_and_rewards_follow_their_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = [f"chat_kto_conversation{kind}_document" for kind in ("", "_label", "_reward")]
    copied(tmp_path, *names)
    full_rows = list(zip(*(rows(tmp_path / name) for name in names), strict=True))
    run(tmp_path / names[0], "--valid", 0.2, "--test", 3, "--seed", 5, "--output-dir", tmp_path / "out")
    parts = {
        part: list(zip(*(rows(tmp_path / "out" / part / name) for name in names), strict=True))
        for part in ("train", "valid", "test")
    }
    assert len(parts["valid"]) == round(0.2 * len(full_rows)) and len(parts["test"]) == 3
    assert sorted(sum(parts.values(), [])) == sorted(full_rows), "all of them, none twice"
    assert all(part == sorted(part, key=full_rows.index) for part in parts.values()) and parts["train"] != full_rows
    tokens = sum(len(row[0]) for row in parts["valid"])
    line = f"{tmp_path}/out/valid/{names[0]}.bin, .idx: {len(parts['valid'])} documents, {tokens} tokens"
    assert line in capsys.readouterr().out


def test_the_seed_decides(tmp_path: Path):
    copied(tmp_path, "chat_conversation_document", "chat_conversation_label_document")
    draws = []
    for number, seed in enumerate((1, 1, 2)):
        target = tmp_path / str(number)
        run(tmp_path / "chat_conversation_document", "--valid", 0.3, "--seed", seed, "--output-dir", target)
        draws.append([file.read_bytes() for file in sorted((target / "valid").iterdir())])
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 4


def write(prefix: Path, documents: list[list[float]], dtype: type = np.int32) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))


@pytest.mark.parametrize("sides", [("chosen",), ("chosen", "rejected"), ()])
def test_pairs_stay_together(sides: tuple[str, ...], tmp_path: Path):
    """Named by one side, by both, or by their --output-prefix; scores and empty documents too."""
    for side, offset in (("chosen", 100), ("rejected", 500)):
        documents = [[offset + n] * (n % 4) for n in range(20)]
        write(tmp_path / f"p_{side}_document", documents)
        write(tmp_path / f"p_{side}_label_document", documents)
        write(tmp_path / f"p_{side}_document_ref", documents, np.float32)
    (tmp_path / "p_metadata.json").write_text('{"template_date": "2024"}')
    prefixes = [tmp_path / f"p_{side}_document" for side in sides] or [tmp_path / "p"]
    run(*prefixes, "--valid", 0.25)
    numbers = []
    for part, count in (("train", 15), ("valid", 5)):
        for name in ("chosen_document", "chosen_label_document", "chosen_document_ref"):
            chosen = rows(tmp_path / part / f"p_{name}")
            rejected = rows(tmp_path / part / f"p_{name.replace('chosen', 'rejected')}")
            assert [tuple(t + 400 for t in row) for row in chosen] == rejected and len(chosen) == count
        numbers += [row[0] - 100 for row in chosen if row]
        metadata = json.loads((tmp_path / part / "p_metadata.json").read_text())
        assert metadata["template_date"] == "2024" and metadata["split"]["documents"] == count
    assert sorted(numbers) == [n for n in range(20) if n % 4]


def test_what_cannot_be_split(tmp_path: Path):
    write(tmp_path / "a_document", [[1], [2], [3]])
    write(tmp_path / "b_document", [[1], [2]])
    a = tmp_path / "a_document"
    assert "3 documents" in refused(split.main, a, "--valid", 2, "--test", 1)
    assert "--valid" in refused(split.main, a, "--valid", 0.01)
    assert "share" in refused(split.main, a, "--valid", 1.5)
    assert "b_document" in refused(split.main, a, tmp_path / "b_document", "--valid", 1)
    run(a, "--valid", 1)
    original = Path(tmp_path / "valid" / "a_document.bin").read_bytes()
    assert "exist already" in refused(split.main, a, "--valid", 1)
    run(a, "--valid", 1, "--seed", 2, "--overwrite")
    assert Path(tmp_path / "valid" / "a_document.bin").read_bytes() != original
    write(tmp_path / "a_label_document", [[1], [2]])
    assert "a_label_document: 2 sequences" in refused(split.main, a, "--valid", 1, "--overwrite")
    assert not [file for file in tmp_path.rglob(".*tmp*")]
