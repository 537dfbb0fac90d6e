"""Damage of every kind is found, and the first bad document named."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError
from megatron.data.indexed_dataset import check_boundaries
from megatron.data.inspection.file_groups import find_file_groups
from megatron.data.inspection.verify import VerifiedDataset, blocks, verify
from tests.data.samples import DATASET, TOKENIZER, copy_dataset, poke, refused, write_rows
from tools.datasets.verify import main

TEXT, LABEL, REWARD = (f"chat_kto_conversation_{kind}document" for kind in ("", "label_", "reward_"))
HEADER, COUNT = 34, 24  # bytes of an .idx before its tables; documents
SIZES = np.fromfile(DATASET / f"{TEXT}.idx", "<i4", COUNT, offset=HEADER)
POINTERS = HEADER + 4 * COUNT
BOUNDARIES = POINTERS + 8 * COUNT
START = 4 * int(SIZES[:7].sum())  # byte of document 7


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A copy of golden text, labels and rewards (int32, 24 documents)."""
    for file in DATASET.glob("chat_kto_*"):
        shutil.copy(file, tmp_path)
    return tmp_path / TEXT


def checked(prefix: Path, vocab_size: int | None = 380) -> list[VerifiedDataset]:
    return [verified for column in find_file_groups(prefix) for verified in verify(column, vocab_size)]


def test_golden_files_are_complete(chat: Path):
    text, label, reward = checked(chat)
    assert (text.documents, text.tokens, text.dtype, text.ids) == (COUNT, 4099, "int32", (0, 379))
    labels = np.fromfile(DATASET / f"{LABEL}.bin", "<i4")
    assert (label.trained, label.tokens) == (int((labels != -100).sum()), 4099) and reward.tokens == COUNT
    assert [verified.documents for verified in checked(DATASET / "corpusA_lazy_text_document")] == [80]
    names = [Path(verified.prefix).name for verified in checked(DATASET / "instruct")]
    assert names == ["instruct_text_document", "instruct_label_document"]


def rewrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


SHORTER = [[-100] * (1 if i == 7 else size) for i, size in enumerate(SIZES.tolist())]
NO_REWARD = [[1.0]] * 4 + [[np.nan]] + [[1.0]] * 19
WRAPPED = struct.pack("<2q", 2**63 - 1, -2)
# What is done in the folder to the text's index or data, or to others, and what is said
DAMAGE: dict[str, tuple[Callable[[Path, Path, Path], object], str]] = {
    "size": (lambda d, i, b: poke(i, HEADER + 28, "<i", -3), r"document 7 \(sequence 7\) has -3 tokens"),
    "pointer": (lambda d, i, b: poke(i, POINTERS + 56, "<q", 1), f"document 7 .* byte 1, but .* {START}"),
    "boundary": (lambda d, i, b: poke(i, BOUNDARIES + 56, "<q", 3), "document 6 is sequences 6 to 3.* 24"),
    "boundary off by one": (lambda d, i, b: poke(i, BOUNDARIES + 56, "<q", 6), "document 7 is .* is wrong"),
    "boundaries that wrap around": (lambda d, i, b: poke(i, BOUNDARIES + 56, "16s", WRAPPED),
                                    "document 7 is sequences 9223372036854775807 to -2.* 24"),
    "other file": (lambda d, i, b: shutil.copy(b, i), "not an index"),
    "cut index": (lambda d, i, b: rewrite(i, lambda content: content[:-1]), "needs"),
    "cut off": (lambda d, i, b: rewrite(b, lambda content: content[: START + 9]),
                f"after {START + 9} bytes, before the end of document 7 "),
    "longer": (lambda d, i, b: rewrite(b, lambda content: content + b"1234567"), "7 bytes after the last document"),
    "id": (lambda d, i, b: poke(b, START + 20, "<i", 380), "document 7, token 5: 380 is not a token id in a"),
    "negative id": (lambda d, i, b: poke(b, START, "<i", -1), "document 7, token 0: -1 is not a token id"),
    "label": (lambda d, i, b: poke(d / f"{LABEL}.bin", START + 20, "<i", 9), "document 7, token 5: 9 is neither -100"),
    "no labels": (lambda d, i, b: (d / f"{LABEL}.bin").unlink(), r"label_document.bin: no such file"),
    "fewer labels": (lambda d, i, b: write_rows(d / LABEL, SHORTER), "document 7 has 1 labels, but .* tokens"),
    "fewer rewards": (lambda d, i, b: write_rows(d / REWARD, [[1]] * 23), "23 documents, but .* has 24"),
    "no reward": (lambda d, i, b: write_rows(d / REWARD, NO_REWARD, np.float32), "document 4, token 0: nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(chat: Path, name: str):
    damage, message = DAMAGE[name]
    damage(chat.parent, chat.with_suffix(".idx"), chat.with_suffix(".bin"))
    refused(message, checked, chat)


def test_documents_of_several_sequences(tmp_path: Path):
    """As Megatron-core writes them: documents are groups of sequences."""
    sizes, boundaries = [3, 4, 5, 1, 2], [0, 2, 2, 5]
    np.arange(15, dtype="<u2").tofile(tmp_path / "m.bin")
    tables = struct.pack("<5i5q4q", *sizes, 0, 6, 14, 24, 26, *boundaries)
    (tmp_path / "m.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 5, 4) + tables)
    assert checked(tmp_path / "m", 15)[0].documents == 3
    for limit, document, token in ((5, 0, 5), (11, 2, 4)):
        refused(f"document {document}, token {token}: {limit} is not a token id", checked, tmp_path / "m", limit)


def test_wrong_boundaries_of_the_old_format(tmp_path: Path):
    copy_dataset(DATASET / "corpusA_lazy_text_document", tmp_path / "old")
    poke(tmp_path / "old.idx", -16, "<q", 3)
    refused(r"old.idx: document 78 is sequences 78 to 3.* 80", checked, tmp_path / "old")


@pytest.mark.parametrize("chunk", [2, 3, 4, 100])
def test_a_boundary_off_by_one_beside_the_edge_of_a_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.data.indexed_dataset.CHUNK", chunk)
    for wrong in range(1, 9):
        for offset in (-1, 1):
            boundaries = np.arange(10)
            boundaries[wrong] += offset
            with pytest.raises(DataError, match=f"document {wrong - 1 if offset > 0 else wrong} is .* is wrong"):
                check_boundaries(tmp := Path("x.idx"), boundaries, 9)
    check_boundaries(tmp, np.array([0, 2, 2, 5, 6, 8]), 8)
    check_boundaries(tmp, np.array([0, 0, 1, 2, 2, 2, 3]), 3)


def test_blocks_cover_all_sequences():
    sizes = np.array([0, 1, 1 << 22, 5, 0, (1 << 22) + 7, 3, 0], np.int32)
    ranges = list(blocks(sizes))
    assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]] and ranges[-1][1] == len(sizes)
    assert all(stop == start + 1 or sizes[start:stop].sum() <= 1 << 22 for start, stop in ranges)


def test_tool(chat: Path, capsys: pytest.CaptureFixture[str]):
    main([str(chat), "--vocab-file", str(TOKENIZER)])
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == f"{chat}: 24 documents, 4099 values, int32, ids 0 to 379 (vocabulary 380)"
    for words, message in (
        ([chat, "--vocab-size", 379], f"{chat}.bin: document "),
        ([chat.parent / "none"], "none.idx: "),
    ):
        with pytest.raises(SystemExit, match=f"^verify.py: error: [^\n]*{message}[^\n]*$"):
            main(list(map(str, words)))
