"""A checkpoint as a folder that transformers (or, of adapters, peft) loads, with its model card."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
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
    """Write `checkpoint` as the folder `output`, which appears when it is whole. tokenizer: in the place of
    its own. Raises CheckpointError, HubError.

    One layer is in memory at a time, and for the comparison of logits one model.
    """
    from megatron.checkpointing.adapters import export_peft, open_adapter
    from megatron.checkpointing.huggingface import add_tokenizer, export_hf
    from megatron.checkpointing.saved_config import checkpoint_args

    whole = output.with_name(f"{output.name}.part")
    for folder in (output, whole):
        if folder.exists():
            shutil.rmtree(folder)
    args = checkpoint_args(checkpoint)
    if args.lora is not None:
        if tokenizer is not None:
            raise HubError(f"{checkpoint}: adapters are published without a tokenizer; leave --tokenizer_hf_path out")
        export_peft(open_adapter(checkpoint), whole)
    else:
        export_hf(checkpoint, args, whole, tokenizer=tokenizer is None)
        if tokenizer is not None:
            add_tokenizer(whole, tokenizer)
    facts = run_facts(checkpoint, args, {})
    (whole / CONFIG).write_text(json.dumps(_given(args), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    facts = _with_curves(facts, whole)
    write_card(whole, facts)
    whole.rename(output)


def rewrite_card(checkpoint: Path, folder: Path, scores: Mapping[str, float]) -> None:
    """The card of a converted folder, with scores of an evaluation of it."""
    from megatron.checkpointing.saved_config import checkpoint_args

    write_card(folder, _with_curves(run_facts(checkpoint, checkpoint_args(checkpoint), scores), folder))


def run_facts(checkpoint: Path, args: "NeoXArgs", scores: Mapping[str, float]) -> RunFacts:
    """What the card of a checkpoint says of its run; what the run has logged after it is left out."""
    from megatron.checkpointing import read_manifest, step_of

    manifest, step = read_manifest(checkpoint), step_of(checkpoint)
    rows = [row for row in _rows(checkpoint) if row.get("iteration", 0) <= step]
    return RunFacts(step, args, _tokens(rows, step, manifest, args), manifest.data if manifest else {}, rows, scores)


def neox_files(checkpoint: Path, repository: str, model: str) -> dict[str, LocalFile]:
    """The files of a revision in GPT-NeoX's format: the checkpoint below its own name, `latest`, and a card
    that says how a run goes on from them. Raises CheckpointError for files that are not as the manifest
    says."""
    from megatron.checkpointing import verify

    manifest, tag = verify(checkpoint), checkpoint.name
    known = {} if manifest is None else {name: record.sha256 for name, record in manifest.files.items()}
    files = {}
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != EPHEMERAL):
        name = path.relative_to(checkpoint).as_posix()
        files[f"{tag}/{name}"] = LocalFile(path, digest(path, known.get(name)))
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

That of [{model}](https://huggingface.co/{model}/tree/{tag}), with the state of its optimizer where the run saved it.
`{manifest}` has a digest of each file.

```
hf download {repository} --revision {tag} --local-dir checkpoints/{tag}-copy
```

and `load: checkpoints/{tag}-copy` in a configuration.
"""


def _with_curves(facts: RunFacts, folder: Path) -> RunFacts:
    return replace(facts, has_curves=draw_curves(folder, facts.rows))


def _rows(checkpoint: Path) -> list[dict[str, Any]]:
    try:
        return open_run(checkpoint.parent).rows()
    except RunFolderError:  # of GPT-NeoX, or its logs are gone
        return []


def _tokens(rows: list[dict[str, Any]], step: int, manifest: "Manifest | None", args: "NeoXArgs") -> int | None:
    """Tokens seen: as the run logged them, else all of the samples."""
    logged = [row["consumed_tokens"] for row in rows if row.get("iteration") == step and "consumed_tokens" in row]
    if logged:
        return int(logged[-1])
    return manifest.consumed_samples * args.seq_length if manifest is not None and args.seq_length else None


def _given(args: "NeoXArgs") -> dict[str, Any]:
    return json.loads(args.to_json())["given"]
