"""Exports LoRA adapters to a folder in peft's format, and compares their logits with peft's."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpointing.adapters.base import BaseWeights, checkpoint_folder, config_below, family_below
from megatron.checkpointing.adapters.merging import unmerged_logits
from megatron.checkpointing.adapters.peft_folder import PeftFolder, write_peft
from megatron.checkpointing.adapters.sources import AdapterSource
from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.multimodal import TEXT_TOWERS, is_multimodal
from megatron.checkpointing.huggingface.companion_files import (
    CARD,
    companion_files_of,
    is_of_tokenizer,
    write_companion_files,
)
from megatron.checkpointing.huggingface.exporting import LayerProgress, export_hf, new_folder, no_progress
from megatron.checkpointing.huggingface.folder import HFFolder, is_hf
from megatron.checkpointing.huggingface.logit_check import BOUND, LogitComparison, bound_of, some_tokens
from megatron.checkpointing.huggingface.model_card import adapter_card
from megatron.checkpointing.huggingface.model_files import read_config
from megatron.checkpointing.huggingface.transformers_model import auto_class
from megatron.checkpointing.manifest import read_manifest
from megatron.model.weight_map import adapter_params
from megatron.neox_arguments import NeoXArgs

_HF_RUN = "huggingface "  # run ids of imports from HuggingFace begin so


def base_name(path: Path | str | None) -> str | None:
    """Returns the base model's name for peft's field `base_model_name_or_path`; None if `path` is None.

    path: of the base weights. The name is the HuggingFace folder or name if `path` is one, or was imported
        from one. Otherwise it is the path of the checkpoint."""
    if path is None or is_hf(path) or not Path(path).is_dir():
        return None if path is None else str(path).removeprefix("hf://")
    path = checkpoint_folder(path)
    manifest = read_manifest(path)
    imported = manifest is not None and manifest.run_id.startswith(_HF_RUN)
    if not imported or manifest is None:
        return str(path)
    source = manifest.run_id.removeprefix(_HF_RUN)
    return source if Path(source).is_dir() else source.partition("@")[0]


def export_peft(
    source: AdapterSource,
    output: str | Path,
    *,
    base: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    notes: Mapping[str, bytes] | None = None,
    run_args: NeoXArgs | None = None,
    progress: LayerProgress = no_progress,
) -> Path:
    """Write adapters to the folder `output` in peft's format, with the tokenizer of the run that trained
    them.

    base: the name of the base model, which peft loads; None: the base that the checkpoint records.
    family: the HuggingFace `model_type` whose module names are written; None: that of the base model. If the
        base is multimodal, module names include its wrapper.
    dtype: of the written tensors; None: as stored. notes: content of further files by name.
    run_args: the configuration of the run, whose files the card shows; None: the values in the checkpoint.
    An existing `output` is replaced as a whole, and never left half written. Raises CheckpointError."""
    source.verify()
    output = Path(output).resolve()
    layers = sorted(adapter_params(source.args))
    recorded = None if source.manifest is None else source.manifest.base
    # If the checkpoint also holds the base weights, the run read them from its key `load`.
    base_path = source.args.load if recorded is None else recorded["path"]
    base_model = base or base_name(base_path)
    in_wrapper = (
        family in TEXT_TOWERS or family is None and is_multimodal(config_below(base_model) or config_below(base_path))
    )
    family = family_below(base_path) if family is None or family in TEXT_TOWERS else family
    sizes = [(value.dtype, value.numel()) for layer in layers for value in source.read(layer).values()]
    widest = max((kind for kind, _ in sizes), key=lambda kind: kind.itemsize)
    files, vocab = _companions(source)
    if source.manifest is not None:
        trained = sum(number for _, number in sizes)
        files[CARD] = adapter_card(source.path, run_args or source.args, base_model, trained)
    size = sum(file.stat().st_size for file in source.path.iterdir() if file.is_file())
    with new_folder(output, size) as temporary:

        def read() -> Iterator[tuple[int, Mapping[str, Tensor]]]:
            for layer in progress(layers, len(layers)):
                yield layer, source.read(layer)

        write_peft(
            temporary, source.args, read, dtype or widest, family=family,
            base=base_model, vocab_size=vocab, in_wrapper=in_wrapper,
        )  # fmt: skip
        write_companion_files({**files, **(notes or {})}, temporary)
    return output


def _companions(source: AdapterSource) -> tuple[dict[str, bytes], int | None]:
    """Returns (content of the tokenizer's files by name, number of vocabulary rows to export; None: all)."""
    if source.manifest is None:
        return {}, None
    try:
        extras = companion_files_of(source.path, source.args, scores=False)
    except CheckpointError:  # an adapter is complete without a tokenizer
        return {}, None
    files = {name: content for name, content in extras.files.items() if is_of_tokenizer(name)}
    rows = max(extras.vocab_size or 0, extras.tokens or 0) if extras.vocab_size else None
    return files, rows


@torch.no_grad()
def compare_with_peft(base: BaseWeights, source: AdapterSource) -> LogitComparison:
    """Compares our logits of a model with adapters against those of transformers with peft, on random tokens.

    Both full models are in memory, in fp32. A NeoX checkpoint (base or adapters) is first exported to a
    temporary folder in HuggingFace's or peft's format. Raises CheckpointError if the logits differ by more
    than `LogitComparison.bound`, or if peft or transformers is not installed."""
    try:
        import peft
        import transformers
    except ModuleNotFoundError as problem:
        raise CheckpointError(
            f"the comparison with peft needs the package {problem.name}: pip install {problem.name}, or compare "
            "with merged weights instead (--against merged)"
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
        options = {"num_labels": 1, "pad_token_id": -1} if scores else {}
        model = auto.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager", **options)
        adapter_rows = PeftFolder(adapter).vocab_size
        if adapter_rows is not None and adapter_rows > rows:
            model.resize_token_embeddings(adapter_rows)
        tokens = some_tokens(source.args, rows)
        peft_logits = peft.PeftModel.from_pretrained(model, str(adapter)).eval()(tokens, use_cache=False).logits
    logits = unmerged_logits(base, source, tokens)
    logits = logits[:, -1] if scores else logits[..., : peft_logits.shape[-1]]
    comparison = LogitComparison.from_logits(
        logits, peft_logits, tokens, reference="peft", relative_bound=bound_of(source.args, BOUND)
    )
    if not comparison.is_close:
        raise CheckpointError(
            f"{source.path}: with these adapters the model gives other logits here than in peft: {comparison}; do not "
            "use them in peft, and report this"
        )
    return comparison
