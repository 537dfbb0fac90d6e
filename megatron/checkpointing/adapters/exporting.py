"""Adapters of a checkpoint as a folder in peft's format, whole or not at all, and the check against peft."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing.adapters.base import BaseWeights, checkpoint_folder, config_below, family_below
from megatron.checkpointing.adapters.merging import some_tokens, unmerged_logits
from megatron.checkpointing.adapters.peft_folder import PeftFolder, write_peft
from megatron.checkpointing.adapters.sources import AdapterSource
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families import TEXT_TOWERS, is_multimodal
from megatron.checkpointing.huggingface.by_transformers import auto_class
from megatron.checkpointing.huggingface.companion_files import (
    companion_files_of,
    is_of_tokenizer,
    write_companion_files,
)
from megatron.checkpointing.huggingface.exporting import (
    LayerProgress,
    begin_folder,
    export_hf,
    no_progress,
    put_in_place,
)
from megatron.checkpointing.huggingface.folder import HFFolder, is_hf
from megatron.checkpointing.huggingface.model_files import read_config
from megatron.checkpointing.manifest import read_manifest
from megatron.data.files import sync
from megatron.model.weight_map import adapter_params

# As of logits against transformers: fp32, in proportion to the largest.
BOUND = 2e-5
_HF_RUN = "huggingface "  # how run ids of imports begin


def base_name(path: Path | str | None) -> str | None:
    """What peft's `base_model_name_or_path` says of the weights below adapters: a HuggingFace folder or name,
    also where a checkpoint was imported from it; else our checkpoint itself."""
    if path is None or is_hf(path) or not Path(path).is_dir():
        return None if path is None else str(path).removeprefix("hf://")
    path = checkpoint_folder(path)
    manifest = read_manifest(path)
    imported = manifest is not None and manifest.run_id.startswith(_HF_RUN)
    if not imported or manifest is None:
        return str(path)
    where = manifest.run_id.removeprefix(_HF_RUN)
    return where if Path(where).is_dir() else where.partition("@")[0]


def export_peft(
    source: AdapterSource,
    output: str | Path,
    *,
    base: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    notes: Mapping[str, bytes] | None = None,
    each: LayerProgress = no_progress,
) -> Path:
    """Write adapters as the folder `output` in peft's format, with the tokenizer of the run.

    base: the name of the model below, which peft loads; None: as the checkpoint says. family: as of
    `export_hf`; None: that of the model below, with the names of all of it where that is multimodal. dtype:
    of what is written; None: as it is stored. notes: further files by name. An earlier one is replaced.
    Raises CheckpointError."""
    source.verify()
    output = Path(output).resolve()
    layers = sorted(adapter_params(source.args))
    recorded = None if source.manifest is None else source.manifest.base
    # One that holds both began with the weights that `load` names.
    below = source.args.load if recorded is None else recorded["path"]
    named = base or base_name(below)
    in_wrapper = family in TEXT_TOWERS or family is None and is_multimodal(config_below(named) or config_below(below))
    family = family_below(below) if family is None or family in TEXT_TOWERS else family
    kinds = {value.dtype for layer in layers for value in source.read(layer).values()}
    files, vocab = _companions(source)
    temporary = begin_folder(output, sum(file.stat().st_size for file in source.path.iterdir() if file.is_file()))
    try:

        def read() -> Iterator[tuple[int, Mapping[str, Tensor]]]:
            for layer in each(layers, len(layers)):
                yield layer, source.read(layer)

        write_peft(
            temporary, source.args, read, dtype or max(kinds, key=lambda kind: kind.itemsize), family=family,
            base=named, vocab_size=vocab, in_wrapper=in_wrapper,
        )  # fmt: skip
        write_companion_files({**files, **(notes or {})}, temporary)
        sync(temporary)
        put_in_place(temporary, output)
    except OSError as problem:
        raise CheckpointError(f"{output}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output


def _companions(source: AdapterSource) -> tuple[dict[str, bytes], int | None]:
    """Files of the tokenizer, by name, and the rows of vocabulary that an export keeps; None: all."""
    if source.manifest is None:
        return {}, None
    try:
        extras = companion_files_of(source.path, source.args, scores=False)
    except CheckpointError:  # without its tokenizer an adapter is whole
        return {}, None
    files = {name: content for name, content in extras.files.items() if is_of_tokenizer(name)}
    rows = max(extras.vocab_size or 0, extras.tokens or 0) if extras.vocab_size else None
    return files, rows


@dataclass(frozen=True)
class PeftComparison:
    """difference: the largest absolute one between logits of ours and of peft; largest: the largest absolute
    logit; length: tokens of a row."""

    difference: float
    largest: float
    length: int

    @property
    def bound(self) -> float:
        return BOUND * max(1.0, self.largest)

    def __str__(self) -> str:
        return (
            f"largest logit difference to peft {self.difference:.2e} (bound {self.bound:.1e}, largest logit "
            f"{self.largest:.2f}, 2 x {self.length} tokens, fp32)"
        )


@torch.no_grad()
def compare_with_peft(base: BaseWeights, source: AdapterSource) -> PeftComparison:
    """Compare logits of weights with adapters, here and in transformers with peft. Raises CheckpointError
    when they differ by more than the bound, and without peft.

    Both models are in memory whole, in fp32. What is not in HuggingFace's or peft's format is written so in a
    temporary folder first.
    """
    try:
        import peft
        import transformers
    except ModuleNotFoundError as problem:
        raise CheckpointError(
            f"the comparison with peft needs {problem.name} (pip install {problem.name}); --against merged does not"
        ) from None
    with tempfile.TemporaryDirectory() as spare:
        model_folder = base.path if base.is_hf else Path(spare) / "model"
        adapter = source.path
        if not base.is_hf:
            export_hf(base.path, base.args, model_folder, dtype=torch.float32, tokenizer=False, check=False)
        config = read_config(model_folder)
        if source.manifest is not None or PeftFolder(source.path).is_multimodal is not is_multimodal(config):
            adapter = Path(spare) / "adapter"
            export_peft(source, adapter, base=str(model_folder), dtype=torch.float32)
        rows = HFFolder(model_folder).vocab_size
        scores = bool(source.args.score_head)
        auto = auto_class(transformers, config, scores)
        more = {"num_labels": 1, "pad_token_id": -1} if scores else {}
        model = auto.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager", **more)
        own = PeftFolder(adapter).vocab_size
        if own is not None and own > rows:
            model.resize_token_embeddings(own)
        tokens = some_tokens(source.args, rows)
        theirs = peft.PeftModel.from_pretrained(model, str(adapter)).eval()(tokens, use_cache=False).logits
    ours = unmerged_logits(base, source, tokens)
    ours = ours[:, -1] if scores else ours[..., : theirs.shape[-1]]
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    comparison = PeftComparison(difference, largest, tokens.shape[1])
    if not difference <= comparison.bound:  # NaN too
        raise CheckpointError(f"{source.path}: is not what peft computes: {comparison}")
    return comparison
