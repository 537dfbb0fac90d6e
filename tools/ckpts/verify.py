"""Checks every file of checkpoints against manifest.json: size, SHA-256, and dtype and shape of each tensor.

    python tools/ckpts/verify.py checkpoints/run                      # all global_stepN in the folder
    python tools/ckpts/verify.py checkpoints/run/global_step1000
    python tools/ckpts/verify.py s3://bucket/run                      # downloads each, deletes the copy

Prints a line for each checkpoint: intact, or damaged with the names of the damaged files. The exit code is 1
if any checkpoint is damaged, else 0.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm  # noqa: E402

from megatron.neox_arguments.values.remote_paths import is_remote  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import place  # noqa: E402


def check(path: Path) -> str:
    """Checks all files of a checkpoint against its manifest.json, and returns a one-line summary.

    Raises CheckpointError if a file is damaged or missing."""
    from megatron.checkpointing import CheckpointError, read_manifest, verify

    manifest = read_manifest(path)
    if manifest is None:
        raise CheckpointError(
            f"{path}: cannot be checked without manifest.json: it is a checkpoint of GPT-NeoX, or damaged"
        )
    sizes = {name: record.size for name, record in manifest.files.items()}
    bad = []
    with tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, file=sys.stderr, disable=None) as bar:
        for name, size in sorted(sizes.items()):
            try:
                verify(path, [name])
            except CheckpointError as problem:
                bad.append(str(problem).removeprefix(f"{path}: damaged: ").partition("; ")[0])
            bar.update(size)
    if bad:
        raise CheckpointError(f"{path}: damaged: {', '.join(bad)}")
    tensors = sum(len(record.tensors) for record in manifest.files.values())
    total = sum(sizes.values()) / 1e9
    return f"{path}: whole: iteration {manifest.iteration}, {len(sizes)} files, {tensors} tensors, {total:.3f} GB"


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("path", nargs="+", type=place, help="a checkpoint global_stepN, or a folder of them")
    options = parser.parse_args(argv)
    from megatron.checkpointing import CheckpointError, list_checkpoints
    from megatron.checkpointing.remote_staging import local_copy, remote_checkpoints

    damaged = False
    for path in options.path:
        try:
            checkpoints = remote_checkpoints(path) if is_remote(str(path)) else list_checkpoints(path) or [path]
            if not is_remote(str(path)) and not path.is_dir():
                raise CheckpointError(f"{path}: no such folder; give a checkpoint global_stepN, or a folder of them")
        except CheckpointError as problem:
            sys.exit(f"verify.py: error: {problem}")
        for checkpoint in checkpoints:
            try:
                with local_copy(checkpoint) as local_path:
                    print(check(local_path).replace(str(local_path), str(checkpoint)), flush=True)
            except CheckpointError as problem:
                damaged = True
                sys.stderr.write(f"verify.py: error: {problem}\n")
    sys.exit(1 if damaged else 0)


if __name__ == "__main__":
    run_command(main)
