"""Every kind of input gives the same documents, and what cannot be read is named."""

import csv
import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron.data import DataError
from megatron.data.preprocessing import shards
from megatron.data.preprocessing.inputs import resolve
from megatron.data.preprocessing.shards import row_texts
from tests.data.samples import refused

ROWS = [{"text": f'row {i}, "quoted",\nsecond line ü {i * "x"}', "n": i} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def input_rows(*inputs: Path | str, keys: tuple[str, ...] | None = None, **options) -> Iterator[shards.InputRow]:
    return (row for file in resolve(inputs, **options) for shard in file.shards(keys) for row in shard.rows())


def read(*inputs: Path | str, key: str = "text", **options) -> list[str]:
    """All texts under `key`, whatever holds them."""
    return [row_texts(row, (key,))[0] for row in input_rows(*inputs, keys=(key,), **options)]


def _csv(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["text", "n"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def _zip(members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(raw := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return raw.getvalue()


def _tar(members: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(raw := io.BytesIO()), mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def arrow_of(opener: Callable, rows: list[dict] = ROWS, chunk: int = 7) -> bytes:
    table = pyarrow.Table.from_pylist(rows)
    with opener(sink := pyarrow.BufferOutputStream(), table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return sink.getvalue().to_pybytes()


def _parquet() -> bytes:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), raw := io.BytesIO(), row_group_size=9)
    return raw.getvalue()


def _truncated_zstd(content: bytes) -> bytes:
    """Cut between two blocks, where nothing but the frame's end is missing."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(content) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


def _zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


SPLIT = LINES.index(b"\n", 500) + 1
CONTENT = {
    "a.jsonl": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "unended.jsonl": LINES.rstrip(b"\n"),
    "windows.jsonl": b"\r\n" + LINES.replace(b"\n", b"\r\n"),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS).encode(),
    "pretty.json": b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "a.jsonl.gz": gzip.compress(LINES),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "frames.jsonl.zst": _zstd(LINES[:SPLIT]) + _zstd(LINES[SPLIT:]),
    "a.csv": _csv(","),
    "a.tsv": _csv("\t"),
    "a.csv.gz": gzip.compress(_csv(",")),
    "a.parquet": _parquet(),
    "stream.arrow": arrow_of(pyarrow.ipc.new_stream),
    "file.arrow": arrow_of(pyarrow.ipc.new_file),
    "a.zip": _zip({"folder/part.jsonl": LINES}),
    "a.tar.gz": gzip.compress(_tar({"part.jsonl": LINES[:SPLIT], "rest.jsonl.gz": gzip.compress(LINES[SPLIT:])})),
    "a.jsonl.zst.tar": _tar({"part.jsonl.zst": _zstd(LINES)}),
}


@pytest.mark.parametrize("chunk", [100, 1 << 20])
@pytest.mark.parametrize("name", CONTENT)
def test_the_same_rows_from_every_kind(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk)
    (tmp_path / name).write_bytes(CONTENT[name])
    assert read(tmp_path / name) == [row["text"] for row in ROWS]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=st.lists(st.text(max_size=30), max_size=12), chunk=st.integers(1, 90), array=st.booleans())
def test_any_sharding_loses_and_doubles_nothing(texts, chunk, array, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk)
    rows = [{"text": text} for text in texts]
    content = json.dumps(rows) if array else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.json").write_text(content, encoding="utf-8", newline="")
    assert read(tmp_path / "a.json") == texts


def test_whole_files_are_documents(tmp_path: Path):
    archive = _zip({"one": b"first", "two.v2": b"second"})
    files = {"c.txt": b"whole\n\nfile\n", "d": b"bare", "e.zip": archive, "f.txt.gz": gzip.compress(b"packed")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert read(*(tmp_path / name for name in files)) == ["whole\n\nfile\n", "bare", "first", "second", "packed"]


TRUNCATED, TABLE = "damaged or truncated", "damaged, or not in"
BAD = {
    "cut.jsonl.gz": (gzip.compress(LINES)[:-10], TRUNCATED),
    "cut.jsonl.zst": (_truncated_zstd(LINES), TRUNCATED),
    "cut-second.jsonl.zst": (_zstd(LINES) + _truncated_zstd(LINES), TRUNCATED),
    "cut.txt.zst": (_truncated_zstd(LINES), TRUNCATED),
    "bad.jsonl.zst": (b"no zstd here", TRUNCATED),
    "bad.zip": (b"PK no zip here", TRUNCATED),
    "bad.tar": (b"no tar here" * 100, TRUNCATED),
    "mid.parquet": (_parquet()[:20] + b"\xff" * 40 + _parquet()[60:], f"mid.parquet: {TABLE} Parquet"),
    "bad.parquet": (b"PAR1", f"{TABLE} Parquet"),
    "bad.arrow": (b"no arrow here", f"{TABLE} Arrow"),
    "nested.zip": (_zip({"inner.zip": b""}), "inner.zip .*archive"),
    "a.docx": (b"", "supported .*.jsonl"),
    "a.parquet.gz": (b"", "supported .*.jsonl"),
    "open.json": (b'[{"text": "a"}, {"text": "b"}', "comma.* element 1 "),
    "cut.json": (b'[{"text": "a"}, {"te', "element 1: not valid JSON"),
    "wrong.json": (b'[{"text": "a"}, {"text": oops}, {"text": "b"}]' + b" " * 100, "element 1: not valid JSON"),
    "latin.json": ('[{"text": "ü"}]'.encode("latin-1"), "not UTF-8"),
    "twice.csv": (b"text,text\na,b\n", "two columns"),
    "ragged.csv": (b"text,n\na,1\nb\n", "ragged.csv line 3: 1 .* 2 "),
    "quote.csv": (b'text,n\n"a" b,1\n', "quote.csv line 2: not CSV"),
    "latin.csv": ("text\nü\n".encode("latin-1"), 'latin.csv line 2: "text" .*UTF-8'),
    "latin.txt": ("ü".encode("latin-1"), "latin.txt: not UTF-8 .*byte 0"),
    "deep.jsonl": (b"[" * 100000, "deep.jsonl:1: "),
    "deep.json": (b"[" * 100000, "element 0: not usable JSON"),
    "digits.json": (b'["a", ' + b"9" * 5000 + b"]", "element 1: not usable JSON"),
    "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", "digits.jsonl:1: not usable JSON"),
    "null.jsonl": (b'{"text": null}', 'null.jsonl:1: "text" is NoneType'),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    refused(rf"{tmp_path}/.*{message}" if "Parquet" not in message else message, read, tmp_path / name)


@pytest.mark.parametrize("bad", [
    b"{bad}", b'{"text": "x", "n": oops, "m": [1, "],"]}', b"[" * 100000 + b"]" * 100000, b"9" * 5000, b'"\\x", "d"',
], ids=["key", "value", "deep", "digits", "escape"])  # fmt: skip
def test_behind_a_bad_element_an_array_goes_on(bad: bytes, tmp_path: Path):
    (tmp_path / "a.json").write_bytes(b'["a", ' + bad + b', "b"]' + b" " * 20)
    texts, problems = [], []
    for row in input_rows(tmp_path / "a.json"):
        try:
            texts += row_texts(row, ("text",))
        except DataError as problem:
            problems.append(str(problem))
    assert texts == (["a", "d", "b"] if b'"d"' in bad else ["a", "b"])
    assert len(problems) == 1 and problems[0].startswith(f"{tmp_path}/a.json: element 1: not ")


def test_what_is_missing_in_a_table_or_a_folder_is_named(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(_parquet())
    (tmp_path / "a.arrow").write_bytes(arrow_of(pyarrow.ipc.new_stream))
    (tmp_path / "empty").mkdir()
    table = pyarrow.Table.from_pylist([{"text": "a"}, {"text": "b"}, {"text": None}])
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    for name in ("a.parquet", "a.arrow"):
        refused('"body".*text, n', read, tmp_path / name, key="body")
    refused(r'rows.parquet: row 2 \(from 0\): "text" is NoneType', read, tmp_path / "rows.parquet")
    refused("none.jsonl: no such file", read, tmp_path / "none.jsonl")
    refused("empty: .*folder", read, tmp_path / "empty")


@pytest.mark.parametrize("chunk", [1, 7, 50, 1 << 20])
def test_the_line_number_is_right_in_every_shard(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk)
    content = b"".join(b'{"text": "good line"}\n' * 3 + b"\n" + b"bad\n" for _ in range(3))
    for name, data in (("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        bad = [row.location() for row in input_rows(tmp_path / name) if row.content.strip() == b"bad"]
        assert bad == [f"{tmp_path / name}:{n}" for n in (5, 10, 15)]


LONG_WINDOW = (
    "28b52ffd00907d010054027b2274657874223a2022526f772030206f6620746865207269766572206c6f672e227d0a310200e0133cb27a02"
)


def test_zstd_windows_of_pushshift_are_read(tmp_path: Path):
    (tmp_path / "long.jsonl.zst").write_bytes(bytes.fromhex(LONG_WINDOW))  # zstd --long=28
    assert read(tmp_path / "long.jsonl.zst")[0] == "Row 0 of the river log."


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_a_document_without_end_is_a_bad_row(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "DOCUMENT_BYTES", 100)
    text = LINES[:SPLIT] if ".txt" in name else json.dumps({"text": "x" * 300}).encode() + b'\n{"text": "short"}\n'
    (tmp_path / name).write_bytes({".gz": gzip.compress, ".zst": _zstd}.get(Path(name).suffix, bytes)(text))
    endless_row, *short_rows = input_rows(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}.* bytes in one document, more than 100"):
        endless_row.value()
    assert [row.value()["text"] for row in short_rows] == ["short"] * ("jsonl" in name)
