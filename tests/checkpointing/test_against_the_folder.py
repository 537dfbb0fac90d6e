"""The check of a conversion: what `from_pretrained` of the folder loads, its files, and our weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpointing import CheckpointError, load_weights
from megatron.checkpointing.huggingface import HFFolder, export_hf, find_hf, import_hf, transformers_model
from megatron.checkpointing.huggingface.importing import import_plan
from megatron.checkpointing.huggingface.logit_check import compare_logits
from tests.checkpointing.family_models import VOCAB
from tests.checkpointing.test_huggingface import imported, loaded, model_folder, same_bits, tensors_of
from tests.checkpointing.test_quantised import in_fp8

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENS = torch.arange(24)[None] % VOCAB


def with_head(path: Path, factor: float, case: str = "smollm 3") -> Path:
    """A folder whose config.json ties the head, and whose file holds one, `factor` times the embedding."""
    file = model_folder(path, case) / "model.safetensors"
    tensors = load_file(file)
    assert HEAD not in tensors and json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    save_file({**tensors, HEAD: tensors[EMBEDDING] * factor}, file, {"format": "pt"})
    return path


@torch.no_grad()
def test_a_head_that_differs_from_the_embedding_is_its_own(tmp_path: Path) -> None:
    """As in transformers, whatever config.json says; and so it comes out again."""
    folder = with_head(tmp_path / "hf", 1.5)
    reason = HFFolder(folder).untied
    assert reason is not None and HEAD in reason
    checkpoint, args = imported(folder, tmp_path / "ours")
    assert args.no_weight_tying
    export_hf(checkpoint, args, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(folder))
    assert torch.equal(loaded(tmp_path / "back")(TOKENS).logits, loaded(folder)(TOKENS).logits)

    equal = with_head(tmp_path / "equal", 1.0)
    assert HFFolder(equal).untied is None and not imported(equal, tmp_path / "tied")[1].no_weight_tying


@pytest.mark.parametrize("case", ["kimi linear dense"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_tensors_whose_rows_files_divide(
    tmp_path: Path, case: str, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory the convolutions of queries, keys and values are one tensor. Whole, or read one by one."""
    if one_by_one:
        monkeypatch.setattr(transformers_model, "_load_obstacle", lambda *_: "it is too large")
    checkpoint, args = imported(model_folder(tmp_path / "hf", case), tmp_path / "ours")
    comparison = export_hf(checkpoint, args, tmp_path / "back")
    assert comparison is not None and (comparison.not_loaded is not None) is one_by_one
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))


def test_a_head_that_is_dropped_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule above both sides once had the wrong model, and agreed."""
    folder = with_head(tmp_path / "hf", 1.5)
    monkeypatch.setattr(HFFolder, "_read_tie", lambda self: None)
    with pytest.raises(CheckpointError, match="is not the same model"):
        import_hf(HFFolder(folder), tmp_path / "ours")
    assert not (tmp_path / "ours" / "latest").exists()


def test_every_row_is_compared_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits show only tokens of the batch: here a number of another token is changed, here or there."""
    folder = HFFolder(model_folder(tmp_path / "hf", "llama 3", vocab_size=1024))
    path, args = imported(folder, tmp_path / "ours")
    batch = torch.randint(0, 1024, (2, 48), generator=torch.Generator().manual_seed(0))
    row = next(token for token in range(1024) if token not in batch)

    def weights(layer: int) -> Mapping[str, Tensor]:
        tensors = load_weights(path, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer]
        if layer == 0:
            tensors["word_embeddings.weight"][row, 0] += 1
        return tensors

    with pytest.raises(CheckpointError, match=f"not the same model .*{EMBEDDING}"):
        compare_logits(folder, args, weights, 1024)

    load = transformers_model._loaded

    def load_changed(*arguments: Any) -> Mapping[str, Tensor]:
        tensors = {name: value.clone() for name, value in load(*arguments).items()}
        tensors[EMBEDDING][row, 0] += 1
        return tensors

    monkeypatch.setattr(transformers_model, "_loaded", load_changed)
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}, as loaded by transformers, differs"):
        import_hf(folder, tmp_path / "again")


def test_where_memory_is_short_modules_read_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers puts experts together in memory; mapped files need none."""
    monkeypatch.setattr(transformers_model, "free_host_memory", lambda unknown: 0)
    for case, short in (("mixtral", True), ("llama 3", False)):
        _, parity = import_hf(HFFolder(model_folder(tmp_path / case, case)), tmp_path / "ours" / case)
        assert (parity.not_loaded is not None) == short and ("from_pretrained" in str(parity)) == short


@pytest.mark.parametrize("hidden", [128, 160])
def test_quantised_folders_are_loaded_where_transformers_reads_them_right(hidden: int, tmp_path: Path) -> None:
    """transformers misreads FP8 in blocks of 128 where a size of 160 leaves a block of 32."""
    in_fp8(tmp_path / "hf", "llama 3", hidden_size=hidden, intermediate_size=2 * hidden)
    _, parity = import_hf(HFFolder(tmp_path / "hf"), tmp_path / "ours")
    assert (parity.not_loaded is None) == (hidden == 128)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "hf", "llama 3", vocab_size=1024)
    vocabulary = {f"w{i}": i for i in range(1024)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    import_plan(HFFolder(folder))
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    for convert in (import_plan, lambda opened: import_hf(opened, tmp_path / "ours")):
        with pytest.raises(
            CheckpointError, match="tokenizer.json has 1026 token ids, but the embedding has 1024 rows.*<new>"
        ):
            convert(HFFolder(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 1024}))
    with pytest.raises(CheckpointError, match="vocab.json has 1025 token ids, but the embedding has 1024 rows"):
        import_plan(HFFolder(folder))
    assert not (tmp_path / "ours").exists()


def test_a_path_to_nothing_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoints/nope: no such folder"):
        find_hf("checkpoints/nope")
