"""Megatron-core, in a process of its own (`megatron` too), reads what we write, and we what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.data.batch import collate
from megatron.model.attention import document_mask
from tests.data.samples import DATASET, ROOT, pair, refused, rows_of, write_rows

VERSION = "0.16.1"
PACKAGE = ROOT / ".cache" / f"megatron-core-{VERSION}"

SCRIPT = """
import json, sys, torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as resets
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
seen, found = [], []
for prefix in sys.argv[1:]:
    data = IndexedDataset(prefix)
    boundaries = data.document_indices.tolist()
    builder = IndexedDatasetBuilder(prefix + "_copy.bin", dtype=data.index.dtype)
    for start, end in zip(boundaries, boundaries[1:]):
        rows = [data[i] for i in range(start, end)]
        tokens = torch.tensor([int(t) for row in rows for t in row], dtype=torch.int64)
        builder.add_document(tokens, [len(row) for row in rows])
    builder.finalize(prefix + "_copy.idx")
    modes = IndexedDatasetBuilder(prefix + "_modes.bin", dtype=data.index.dtype, multimodal=True)
    modes.add_document(torch.arange(5), [2, 3], modes=[0, 1])
    modes.finalize(prefix + "_modes.idx")
    seen.append({"rows": [data[i].tolist() for i in range(len(data))], "boundaries": boundaries})
for row in json.load(sys.stdin):
    mask, loss_mask, positions = resets(torch.tensor(row), 0, True, True, True, True)
    found.append({"hidden": mask[0].tolist(), "weights": loss_mask.tolist(), "positions": positions.tolist()})
print(json.dumps([seen, found]))
"""


@pytest.fixture(scope="module")
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


EXPECTED = rows_of(DATASET / "corpusA_text_document")
WINDOWS = np.random.default_rng(3).integers(0, [[2], [4], [9], [9], [9]], (5, 13))
WINDOWS[3], WINDOWS[4, [0, 11, 12]] = 5, 0  # rows with few, many and no ends of documents


@pytest.fixture(scope="module")
def read(megatron_core: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The prefixes that it has read and copied, what it read there, and what it makes of the windows."""
    prefixes = [tmp_path_factory.mktemp("core") / np.dtype(dtype).name for dtype in (np.uint16, np.int32)]
    for prefix in prefixes:
        write_rows(prefix, [*EXPECTED[:4], [], *EXPECTED[4:]], np.dtype(prefix.name).type)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, prefixes)],
                          env=os.environ | {"PYTHONPATH": str(megatron_core), "OMP_NUM_THREADS": "1"},
                          input=json.dumps(WINDOWS[:, :-1].tolist()), cwd=megatron_core, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return prefixes, *json.loads(done.stdout.splitlines()[-1])


@pytest.mark.more
def test_both_ways(read: Any):
    for prefix, contents in zip(*read[:2], strict=True):
        assert contents == {"rows": EXPECTED, "boundaries": [*range(5), *range(4, 81)]}
        assert rows_of(f"{prefix}_copy") == EXPECTED and pair(prefix) == pair(f"{prefix}_copy")


def test_a_multimodal_index_is_refused_by_name(read: Any):
    for prefix in read[0]:
        refused("_modes.idx: .*multimodal", open_dataset, f"{prefix}_modes")


def test_resets_at_documents_are_megatrons(read: Any):
    """Masks, positions and loss masks."""
    batch = collate(WINDOWS, eod=0, eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True)
    resets = {"hidden": ~document_mask(batch.documents.cu_seqlens, 5, 12)[:, 0], "weights": batch.loss_weights,
              "positions": batch.positions}  # fmt: skip
    assert read[2] == [{name: values[row].tolist() for name, values in resets.items()} for row in range(5)]
