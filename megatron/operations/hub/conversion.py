"""Converts a checkpoint to a folder with a model card that transformers loads (peft for LoRA adapters)."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.operations.hub.card import CONFIG, RunFacts, draw_curves, write_card
from megatron.operations.hub.checkpoints import EPHEMERAL, MANIFEST
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.repository import LocalFile, digest
from megatron.operations.run_folder import RunFolderError, open_run

if TYPE_CHECKING:
    from megatron.checkpointing import Manifest
    from megatron.neox_arguments import NeoXArgs


def convert(checkpoint: Path, output: Path, tokenizer: str | None = None) -> None:
    """Converts a checkpoint to a HuggingFace folder `output`, which appears only when it is complete.

    tokenizer: path or Hub name of a tokenizer that replaces the checkpoint's. Raises CheckpointError, and
    HubError for a tokenizer with LoRA adapters.

    The conversion holds one layer in memory at a time; the check of logits then holds one full model.
    """
    from megatron.checkpointing.adapters import export_peft, open_adapter
    from megatron.checkpointing.huggingface import add_tokenizer, export_hf
    from megatron.checkpointing.saved_config import checkpoint_args

    partial = output.with_name(f"{output.name}.part")
    for folder in (output, partial):
        if folder.exists():
            shutil.rmtree(folder)
    args = checkpoint_args(checkpoint)
    if args.lora is not None:
        if tokenizer is not None:
            raise HubError(
                f"{checkpoint}: holds LoRA adapters, which are published without a tokenizer; remove "
                "--tokenizer_hf_path"
            )
        export_peft(open_adapter(checkpoint), partial)
    else:
        export_hf(checkpoint, args, partial, tokenizer=tokenizer is None)
        if tokenizer is not None:
            add_tokenizer(partial, tokenizer)
    configured_keys = args.public_values
    (partial / CONFIG).write_text(json.dumps(configured_keys, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    rewrite_card(checkpoint, partial, {})
    partial.rename(output)


def rewrite_card(checkpoint: Path, folder: Path, scores: Mapping[str, float]) -> None:
    """Writes the facts of the run into the model card of a converted folder, replacing facts written before.

    Metrics logged after the checkpoint are left out. scores: scores by name from an evaluation of
    `folder`."""
    from megatron.checkpointing import read_manifest, step_of
    from megatron.checkpointing.saved_config import checkpoint_args

    args, manifest, step = checkpoint_args(checkpoint), read_manifest(checkpoint), step_of(checkpoint)
    rows = [row for row in _rows(checkpoint) if row.get("iteration", 0) <= step]
    tokens, data = _tokens(rows, step, manifest, args), manifest.data if manifest else {}
    write_card(folder, RunFacts(step, args, tokens, data, rows, scores, draw_curves(folder, rows)))


def neox_files(checkpoint: Path, repository: str, model: str) -> dict[str, LocalFile]:
    """Returns the files to publish for a checkpoint in GPT-NeoX's format, by their names on the Hub.

    The files are those of the checkpoint, `latest`, and a model card that says how to resume the training.
    repository: where they are published. model: repository of the converted model, which the card names.
    Raises CheckpointError if a file differs from the manifest.
    """
    from megatron.checkpointing import verify

    manifest, tag = verify(checkpoint), checkpoint.name
    recorded = {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != EPHEMERAL):
        name = path.relative_to(checkpoint).as_posix()
        files[f"{tag}/{name}"] = LocalFile(path, digest(path, recorded.get(name)))
    card = _NEOX_CARD.format(model=model, repository=repository, tag=tag, manifest=MANIFEST)
    for name, content in {"latest": f"{tag}\n".encode(), "README.md": card.encode()}.items():
        files[name] = LocalFile(content, digest(content))
    return files


_NEOX_CARD = """\
---
library_name: gpt-neox
tags:
- gpt-neox
base_model: {model}
---

# A checkpoint in GPT-NeoX's format

This is the checkpoint from which [{model}](https://huggingface.co/{model}/tree/{tag}) was converted, with the optimizer
state if the run saved it. `{manifest}` has the SHA-256 of each file. To load it, download it:

```
hf download {repository} --revision {tag} --local-dir checkpoints/{tag}-copy
```

Then set `load: checkpoints/{tag}-copy` in the configuration.
"""


def _rows(checkpoint: Path) -> list[dict[str, Any]]:
    try:
        return open_run(checkpoint.parent).rows()
    except RunFolderError:  # a checkpoint of GPT-NeoX, or the logs were removed
        return []


def _tokens(rows: list[dict[str, Any]], step: int, manifest: "Manifest | None", args: "NeoXArgs") -> int | None:
    """Returns the number of tokens trained up to `step`; None if it is unknown.

    rows: of metrics.jsonl, which may have it. Else it is the manifest's consumed samples times
    `seq_length`."""
    logged = [row["consumed_tokens"] for row in rows if row.get("iteration") == step and "consumed_tokens" in row]
    if logged:
        return int(logged[-1])
    return manifest.consumed_samples * args.seq_length if manifest is not None and args.seq_length else None
