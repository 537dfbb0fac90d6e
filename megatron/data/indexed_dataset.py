"""Reads and writes `.bin/.idx` pairs (format MMIDIDX, shared by GPT-NeoX and Megatron-core).

`.idx`, little-endian: magic `MMIDIDX\\0\\0` (9 bytes), u64 version = 1, u8 dtype code, u64 n sequences, u64 n
document boundaries, i32 sizes [n] in tokens, i64 byte pointers into `.bin` [n], i64 boundaries (first 0, last
n). `.bin`: the tokens, nothing else.
"""

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.data.errors import DataError, MissingDataError
from megatron.data.files import map_file, sha256, sync, temporary
from megatron.neox_arguments.errors import lfs_pointer_error

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FLOAT_CODES = (6, 7)  # float32, float64 in GPT-NeoX; the other way round in Megatron-core
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()} | {np.dtype(np.float32): 6}
CHUNK = 1 << 20  # sequences processed at once, so that memory does not grow with the file


def index_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def data_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def best_fitting_dtype(vocab_size: int | None) -> np.dtype:
    """Return the token type for a vocabulary: uint16 below 65,500 tokens, else int32, as in NeoX and
    Megatron."""
    return np.dtype(np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32)


def can_store(values: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether all values can be stored as `dtype` without a change."""
    if dtype.kind == "f":
        return values.dtype.kind in "iuf"
    limits = np.iinfo(dtype)
    return not len(values) or values.dtype.kind in "iu" and values.min() >= limits.min and values.max() <= limits.max


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair, memory-mapped; item i is a read-only 1-D array in the stored
    dtype.

    sizes: [n] int32, tokens of each sequence.
    pointers: [n] int64, the byte offset of each sequence in the `.bin`.
    boundaries: [documents + 1] int64, the index of each document's first sequence; the last value is n.
    known_sha256: `index_sha256` from a process that has already checked the files; the check is then skipped.
    Raises DataError if a file is missing, truncated or of another format, or if the two files do not belong
    together.
    """

    def __init__(self, prefix: str | Path, known_sha256: str | None = None):
        self.prefix = str(prefix)
        self.index_file, self.data_file = index_path(prefix), data_path(prefix)
        self.data_files: tuple[Path, ...] = (self.data_file,)
        for file in (self.index_file, self.data_file):
            if not file.is_file():
                missing = MissingDataError(
                    f"{file}: no such file. Data paths are written without .bin/.idx; "
                    "tools/datasets/preprocess_data.py makes the pair from text"
                )
                missing.prefix = self.prefix
                raise missing
        self._read_index()
        if known_sha256 is None:
            self._check_layout()
        else:
            self.index_sha256 = known_sha256
        self.tokens: np.ndarray = map_file(self.data_file, self.dtype)

    def _read_index(self) -> None:
        self.dtype, n, boundaries = _read_header(self.index_file)
        rows = map_file(self.index_file, np.uint8)
        sizes_end = HEADER.size + 4 * n
        pointers_end = sizes_end + 8 * n
        self.sizes: np.ndarray = rows[HEADER.size : sizes_end].view("<i4")
        self.pointers: np.ndarray = rows[sizes_end:pointers_end].view("<i8")
        self.boundaries: np.ndarray = rows[pointers_end : pointers_end + 8 * boundaries].view("<i8")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def __reduce__(self):
        # The receiving process maps the files itself: pickling the arrays would send the full corpus
        return type(self), (self.prefix, self.__dict__.get("index_sha256"))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence `index`, from token `offset` on; length None: up to its end."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        stop = int(self.sizes[index]) if length is None else offset + length
        return self.tokens[start + offset : start + stop]

    def span(self, begin: int, stop: int) -> np.ndarray:
        """Return all tokens of sequences [begin, stop), joined in the order of the file."""
        if begin >= stop:
            return self.tokens[:0]
        start, end = int(self.pointers[begin]), int(self.pointers[stop - 1])
        return self.tokens[start // self.dtype.itemsize : end // self.dtype.itemsize + int(self.sizes[stop - 1])]

    @cached_property
    def doc_idx(self) -> np.ndarray:
        """The document boundaries (`boundaries`), checked at the first use. Raises DataError if they are
        wrong.

        Training does not read them, because its documents are the sequences.
        """
        check_boundaries(self.index_file, self.boundaries, len(self.sizes))
        return self.boundaries

    @cached_property
    def index_sha256(self) -> str:
        """The hex SHA-256 of the `.idx`, used as cache key of everything computed from the sequence
        lengths."""
        return sha256(self.index_file)

    def _check_layout(self) -> None:
        remedy = "make the pair again with tools/datasets/preprocess_data.py, or copy it again"
        expected = 0
        for start in range(0, len(self.sizes), CHUNK):
            lengths = self.sizes[start : start + CHUNK].astype(np.int64) * self.dtype.itemsize
            ends = expected + np.cumsum(lengths)
            if lengths.min() < 0 or not np.array_equal(self.pointers[start : start + CHUNK], ends - lengths):
                raise DataError(f"{self.index_file}: its lengths and pointers contradict each other; {remedy}")
            expected = int(ends[-1])
        if self.boundaries[0] != 0 or self.boundaries[-1] != len(self.sizes):
            raise DataError(
                f"{self.index_file}: its document boundaries do not begin at 0, or do not end at its last sequence; "
                f"{remedy}"
            )
        size = self.data_file.stat().st_size
        if size != expected:
            raise DataError(
                f"{self.data_file}: {size} bytes, but {self.index_file} describes {expected}: "
                f"the file is truncated or belongs to another index; {remedy}"
            )


def check_boundaries(index_file: Path, boundaries: np.ndarray, n: int) -> None:
    """Raise DataError, naming the document, unless document boundaries begin at 0, never decrease and end at
    `n`.

    n: the number of sequences. It also raises if a document of two sequences is next to an empty document
      while all other documents hold at most one sequence: the boundary between the two is then off by one.
      Files in which other documents hold several sequences, such as files of sentences, are exempt.
    """
    if boundaries[0] != 0 or boundaries[-1] != n:
        raise _wrong_boundary(index_file, boundaries, 0 if boundaries[0] != 0 else len(boundaries) - 2, n)
    shifted: int | None = None
    sentences = False
    for start in range(0, len(boundaries) - 1, CHUNK):
        chunk_start = max(0, start - 1)  # with a neighbour on each side
        part = boundaries[chunk_start : start + CHUNK + 2]
        falling = part[1:] < part[:-1]  # a difference could overflow
        if falling.any():
            raise _wrong_boundary(index_file, boundaries, chunk_start + int(np.argmax(falling)), n)
        sequences = np.diff(part)  # of each document
        empty = np.pad(sequences == 0, 1)
        off = (sequences == 2) & (empty[:-2] | empty[2:])
        # Documents at the edges of a chunk lack a neighbour here: the next chunk judges them
        judged = slice(start - chunk_start, start - chunk_start + CHUNK)
        sentences |= bool(((sequences > 1) & ~off)[judged].any())
        if shifted is None and off[judged].any():
            shifted = start + int(np.argmax(off[judged]))
    if shifted is not None and not sentences:
        raise DataError(
            f"{index_file}: document {shifted} is sequences {boundaries[shifted]} to {boundaries[shifted + 1]}, next "
            "to "
            "an empty document, while all other documents hold at most one sequence: the boundary between these two "
            "documents is wrong; make or copy the file again"
        )


def _wrong_boundary(index_file: Path, boundaries: np.ndarray, document: int, n: int) -> DataError:
    end = boundaries[min(document + 1, len(boundaries) - 1)]
    return DataError(
        f"{index_file}: document {document} is sequences {boundaries[document]} to {end}, but documents must follow "
        f"each other from 0 to {n}; make or copy the file again"
    )


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return (token dtype, number of sequences, number of document boundaries) of an `.idx`.

    Raises DataError if the file's size does not match its header.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(OLD_MAGIC):
        raise DataError(f"{path}: this file has the old cached/lazy format; set data_impl: cached to read it")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise DataError(pointer)
    if not head.startswith(MAGIC[: len(head)]):
        raise DataError(
            f"{path}: not an index of a .bin/.idx pair (it does not begin with MMIDIDX); make or copy it again"
        )
    if len(head) < HEADER.size:
        raise DataError(f"{path}: truncated after {size} bytes; make or copy it again")
    _, version, code, n, boundaries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(
            f"{path}: format version {version}, but only version {VERSION} can be read; make the pair again"
        )
    if code not in DTYPES and code not in FLOAT_CODES:
        raise DataError(
            f"{path}: unknown dtype code {code}, expected one of {sorted([*DTYPES, *FLOAT_CODES])}; make the pair again"
        )
    expected = HEADER.size + 12 * n + 8 * boundaries
    if n and size == expected + n:
        raise DataError(
            f"{path}: an index of Megatron's multimodal data, which is not supported; make a pair from the text alone "
            "with tools/datasets/preprocess_data.py"
        )
    if size != expected or boundaries < 1:
        raise DataError(
            f"{path}: {size} bytes, but its header ({n} sequences, {boundaries} document boundaries) needs {expected}; "
            "make or copy it again"
        )
    dtype = _float_type(path, n) if code in FLOAT_CODES else DTYPES[code]
    return np.dtype(dtype).newbyteorder("<"), n, boundaries


def _float_type(index_file: Path, n: int) -> type:
    """Return float32 or float64, judged by the size of the `.bin`.

    The dtype code cannot tell: GPT-NeoX and Megatron-core use the two codes the other way round.
    """
    sizes = np.memmap(index_file, mode="r", dtype="<i4", offset=HEADER.size, shape=(n,)) if n else np.zeros(0)
    wide = data_path(str(index_file).removesuffix(".idx")).stat().st_size == 8 * int(sizes.sum(dtype=np.int64))
    return np.float64 if n and wide else np.float32


DocumentBlock = tuple[np.ndarray, np.ndarray]  # (lengths of sequences, ends of documents counted in these sequences)


def documents_of(lengths: np.ndarray) -> DocumentBlock:
    """Return the `DocumentBlock` of documents with the given lengths, each of one sequence.

    A document of length 0 has a boundary but no sequence, as in NeoX.
    """
    return lengths[lengths > 0], np.cumsum(lengths > 0)


def write_index(path: Path, dtype: np.dtype, blocks: Callable[[], Iterable[DocumentBlock]]) -> None:
    """Write the index file `path` (an `.idx`), and sync it to disk.

    blocks: returns all documents in blocks. It is called again for each table of the file, so that only one
      block is in memory at a time.
    """
    sequences = documents = 0
    for sizes, ends in blocks():
        sequences, documents = sequences + len(sizes), documents + len(ends)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], sequences, documents + 1))
        for sizes, _ in blocks():
            file.write(sizes.astype("<i4").tobytes())
        written = 0
        for sizes, _ in blocks():
            lengths = sizes.astype(np.int64) * dtype.itemsize
            file.write((written + np.cumsum(lengths) - lengths).astype("<i8").tobytes())
            written += int(lengths.sum())
        file.write(np.zeros(1, "<i8").tobytes())
        num_sequences = 0
        for sizes, ends in blocks():
            file.write((num_sequences + ends).astype("<i8").tobytes())
            num_sequences += len(sizes)
    sync(path)


def publish(data: Path, index: Path, prefix: str | Path) -> None:
    """Rename the finished files `data` and `index` to the `.bin` and `.idx` of `prefix`; if interrupted, call
    it again.

    Both files must be synced and on the same file system as `prefix`.
    """
    if data.exists():
        # The old index is removed first, so that an old and a new file are never a pair
        index_path(prefix).unlink(missing_ok=True)
        os.replace(data, data_path(prefix))
    if index.exists():
        os.replace(index, index_path(prefix))
    sync(index_path(prefix).parent)


class IndexedDatasetWriter:
    """Context manager that writes a `.bin/.idx` pair; both files get their names only when they are complete.

    Leaving the block normally publishes the pair; an exception leaves no file behind. It holds 4 bytes per
    document in memory.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"{prefix}: {self.dtype} cannot be stored; the types are {', '.join(map(str, CODES))}")
        self.index_file, self.data_file = index_path(prefix), data_path(prefix)
        self.data_file.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary(self.data_file)
        self._file = open(self._temporary, "wb")
        self._lengths: list[np.ndarray] = []
        self.documents = 0
        self.tokens = 0

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind, value, trace) -> None:
        self._file.close()
        if kind is not None:
            self._temporary.unlink(missing_ok=True)
            return
        sync(self._temporary)
        index = temporary(self.index_file)
        write_index(index, self.dtype, lambda: map(documents_of, self._lengths))
        publish(self._temporary, index, self.prefix)

    def add_document(self, tokens: ArrayLike) -> None:
        """Add a document. A document without tokens is stored as a boundary without a sequence, as in
        NeoX."""
        row = np.asarray(tokens)
        self.add_documents(row, [len(row)])

    def add_documents(self, tokens: np.ndarray, sizes: Sequence[int] | np.ndarray) -> None:
        """Add several documents. tokens: all their tokens, joined [sum(sizes)]. sizes: the length of each
        document."""
        lengths = np.asarray(sizes, dtype=np.int64)
        if lengths.sum() != len(tokens):
            raise DataError(f"{self.prefix}: {len(tokens)} tokens, but the document lengths sum to {lengths.sum()}")
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a document has {lengths.max()} tokens, more than 2,147,483,647; split it")
        if len(tokens) and tokens.dtype != self.dtype and not can_store(tokens, self.dtype):
            raise DataError(
                f"{self.prefix}: tokens from {tokens.min()} to {tokens.max()} do not fit {self.dtype}; choose a larger "
                "dtype"
            )
        self._file.write(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")).tobytes())
        self._lengths.append(lengths.astype(np.int32))
        self.documents += len(lengths)
        self.tokens += len(tokens)
