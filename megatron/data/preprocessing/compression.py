"""Decompresses gzip and zstd files as streams of bytes."""

import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

COMPRESSED = (".gz", ".zst")
ZSTD_WINDOW = 1 << 31  # bytes of memory that a frame may need, as written by zstd --long=31
ZSTD_BYTES = 1 << 15  # compressed bytes read at once, because they may expand a thousandfold


class _ZstdReader(io.RawIOBase):
    """Reads all frames of a zstd stream. (The package's own reader accepts a truncated frame as complete.)"""

    def __init__(self, packed: IO[bytes], new_frame: Callable[[], Any]):
        self.packed, self.new_frame = packed, new_frame
        self.frame: Any = None
        self.block, self.unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self.unpacked:
            if self.frame is not None and self.frame.eof:
                self.block, self.frame = self.frame.unused_data, None
            self.block = self.block or self.packed.read(ZSTD_BYTES)
            if not self.block:
                if self.frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            self.frame = self.frame or self.new_frame()
            self.unpacked, self.block = memoryview(self.frame.decompress(self.block)), b""
        size = min(len(buffer), len(self.unpacked))
        buffer[:size], self.unpacked = self.unpacked[:size], self.unpacked[size:]
        return size


@contextmanager
def decompressed(raw: IO[bytes], compression: str, source: str) -> Iterator[Any]:
    """Context manager that yields the content of the open file `raw` as a stream.

    compression: `.gz`, `.zst` or "" for none. source: the file's name in messages. Raises DataError for
      damaged zstd data, and if the zstandard package is missing.
    """
    if compression == ".gz":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream
    elif compression == ".zst":
        missing = DataError(f"{source}: reading .zst needs the zstandard package (pip install zstandard)")
        zstandard = import_optional("zstandard", missing)
        try:
            frames = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj
            yield io.BufferedReader(_ZstdReader(raw, frames), ZSTD_BYTES)
        except zstandard.ZstdError as problem:
            raise DataError(f"{source}: damaged or truncated ({problem}); make or copy it again") from problem
    else:
        yield raw
