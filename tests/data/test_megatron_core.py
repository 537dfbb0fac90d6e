"""Megatron-core reads what we write, and we read what it writes.

It runs in a process of its own: both import names are `megatron`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.batch import collate
from megatron.model.attention import document_mask
from tests.data.samples import DATASET

VERSION = "0.16.1"
PACKAGE = Path(__file__).parents[2] / ".cache" / f"megatron-core-{VERSION}"

READ_AND_COPY = """
import json, sys, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
seen = []
for prefix in sys.argv[1:]:
    data = IndexedDataset(prefix)
    boundaries = data.document_indices.tolist()
    builder = IndexedDatasetBuilder(prefix + "_copy.bin", dtype=data.index.dtype)
    for start, end in zip(boundaries, boundaries[1:]):
        rows = [data[i] for i in range(start, end)]
        tokens = torch.tensor([int(t) for row in rows for t in row], dtype=torch.int64)
        builder.add_document(tokens, [len(row) for row in rows])
    builder.finalize(prefix + "_copy.idx")
    seen.append({"rows": [data[i].tolist() for i in range(len(data))], "boundaries": boundaries})
print(json.dumps(seen))
"""


@pytest.fixture(scope="session")
def megatron_core() -> Path:
    """The installed package's folder; installed once into .cache, beside anything of the same name."""
    if not (PACKAGE / "megatron").is_dir():
        unfinished = PACKAGE.with_name(f"{PACKAGE.name}.{os.getpid()}")
        install = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished))
        subprocess.run([sys.executable, *install, f"megatron-core=={VERSION}"], check=True)
        try:
            unfinished.rename(PACKAGE)
        except OSError:  # another test process was faster
            assert (PACKAGE / "megatron").is_dir()
    return PACKAGE


def test_both_ways(megatron_core: Path, tmp_path: Path):
    golden = IndexedDataset(DATASET / "corpusA_text_document")
    expected = [golden[i].tolist() for i in range(len(golden))]
    prefixes = []
    for dtype in (np.uint16, np.int32):
        prefixes.append(tmp_path / np.dtype(dtype).name)
        with IndexedDatasetWriter(prefixes[-1], dtype) as writer:
            for i, row in enumerate(expected):
                writer.add_document(row)
                if i == 3:
                    writer.add_document([])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_AND_COPY, *map(str, prefixes)],
        env=os.environ | {"PYTHONPATH": str(megatron_core), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for prefix, seen in zip(prefixes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert seen["rows"] == expected
        assert seen["boundaries"] == [*range(5), *range(4, 81)]
        megatron_copy = IndexedDataset(f"{prefix}_copy")
        assert [megatron_copy[i].tolist() for i in range(len(megatron_copy))] == expected
        for suffix in (".bin", ".idx"):
            assert Path(f"{prefix}{suffix}").read_bytes() == Path(f"{prefix}_copy{suffix}").read_bytes()


RESETS = """
import json, sys, torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as resets
found = []
for row in json.load(sys.stdin):
    mask, loss_mask, positions = resets(torch.tensor(row), 0, True, True, True, True)
    found.append({"hidden": mask[0].tolist(), "weights": loss_mask.tolist(), "positions": positions.tolist()})
print(json.dumps(found))
"""


def test_resets_at_documents_are_megatrons(megatron_core: Path):
    """Masks, positions and loss masks of rows with few, many and no ends of documents."""
    windows = np.random.default_rng(3).integers(0, [[2], [4], [9], [9], [9]], (5, 13))
    windows[3], windows[4, [0, 11, 12]] = 5, 0
    batch = collate(windows, eod=0, eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True)
    assert batch.cu_seqlens is not None and batch.positions is not None
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RESETS],
        env=os.environ | {"PYTHONPATH": str(megatron_core), "OMP_NUM_THREADS": "1"},
        input=json.dumps(windows[:, :-1].tolist()),
        cwd=megatron_core,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = document_mask(batch.cu_seqlens, 5, 12)[:, 0]
    for row, megatron_row in enumerate(json.loads(done.stdout.splitlines()[-1])):
        assert (~shown[row]).tolist() == megatron_row["hidden"]
        assert batch.positions[row].tolist() == megatron_row["positions"]
        assert batch.loss_weights[row].tolist() == megatron_row["weights"]
