"""Reward models as HuggingFace's sequence classification: equal scores, and no bit changed there and back."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from megatron.checkpointing import CheckpointError, has_score_head, load_weights
from megatron.checkpointing.families.convert import from_hf, hf_config
from megatron.checkpointing.families.registry import FAMILIES
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.huggingface.logit_check import neox_logits
from megatron.checkpointing.huggingface.raw_llama import write_raw
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.family_models import CASES, config_of, randomise
from tests.checkpointing.golden import fails, written
from tests.checkpointing.test_huggingface import imported, same_bits, tensors_of
from tests.marks import with_more
from tests.model.stages import random_weights, small

PAD, EOS, LENGTHS = 1, 2, (5, 9, 3)


def reward_folder(folder: Path, case: str, labels: int = 1) -> Path:
    """A random reward model of transformers, with a tokenizer whose pad token is its end of text."""
    config = config_of(case, num_labels=labels, eos_token_id=EOS)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    randomise(model, case).save_pretrained(folder)
    special = ["<unk>", "<spare>", "<eos>"]
    vocabulary = tokenizers.models.WordLevel({**{name: i for i, name in enumerate(special)},
                                              **{f"w{i}": i for i in range(3, 90)}}, unk_token="<unk>")  # fmt: skip
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    return folder


def texts() -> list[Tensor]:
    """Texts that end with the end of text, as conversations do."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]
    return [torch.cat([row, torch.tensor([EOS])]) for row in rows]


def scores_of_transformers(folder: Path) -> Tensor:
    """The scores of a padded batch, as its own config.json says where they are."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    rows = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True, padding_value=model.config.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in texts()], batch_first=True)
    with torch.no_grad():
        return model(rows, attention_mask=mask).logits[:, 0]


SCORED = [case for case in CASES if FAMILIES[config_of(case).model_type].has_scorer]
IN_TEST, MORE_CASES = ("gpt_neox", "llama 3", "gemma 3"), ("gpt 2", "qwen 2", "phi 3 long", "mixtral")


@pytest.mark.parametrize("case", with_more(SCORED, *MORE_CASES, product=set(SCORED) - {*IN_TEST, *MORE_CASES}))
def test_scores_are_equal_and_there_and_back_changes_no_bit(case: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", case)
    path, args = imported(folder, tmp_path / "neox", tensor=2)
    comparison = export_hf(path, args, tmp_path / "back")
    assert args.score_head and comparison is not None and comparison.difference <= 1e-5
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(folder))
    original, config = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "back"))
    # Without windows it is a LLaMA.
    assert case == "mistral full" or config["architectures"] == original["architectures"]
    assert config["num_labels"] == 1 and config["pad_token_id"] == 0 and config["eos_token_id"] == EOS

    def weights(layer: int) -> dict[str, Tensor]:
        return load_weights(path, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer]

    with torch.no_grad():
        unpadded_scores = torch.stack([neox_logits(args, weights, row[None])[0, -1, 0] for row in texts()])
    torch.testing.assert_close(scores_of_transformers(tmp_path / "back"), unpadded_scores, rtol=1e-5, atol=1e-5)


def test_families_with_scores_are_those_of_transformers() -> None:
    classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for model_type, family in FAMILIES.items():
        assert family.has_scorer == (model_type in classes), model_type


def test_what_ends_texts_does_not_pad_them(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", "llama 3")
    path, args = imported(folder, tmp_path / "neox")
    fails("--pad-token-id 2 ", export_hf, path, args, tmp_path / "back", pad_token_id=EOS)
    fails("no token .*pad", export_hf, path, args, tmp_path / "back", tokenizer=False)
    assert not (tmp_path / "back").exists()
    export_hf(path, args, tmp_path / "back", pad_token_id=PAD)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (tokenizer.pad_token_id, tokenizer.pad_token) == (PAD, "<spare>")
    card = (tmp_path / "back/README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card and "text-classification" in card
    assert not (tmp_path / "back/generation_config.json").exists()


def test_what_has_no_place_for_a_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Meta's format .*score"):
        write_raw(HFFolder(reward_folder(tmp_path / "hf", "llama 2")), tmp_path / "raw", 1)
    with pytest.raises(CheckpointError, match="num_labels: 2"):
        import_hf(HFFolder(reward_folder(tmp_path / "two", "llama 3", labels=2)), tmp_path / "neox")
    args = NeoXArgs.from_dict({**from_hf(config_of("granite").to_dict(), lambda name: None)[0], "score_head": True})
    fails("reward models of granite", hf_config, args, family="granite")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_gpt_neox_say_themselves_what_they_are(tied: bool, tmp_path: Path) -> None:
    """GPT-NeoX's files have no manifest."""
    models = {"language": small(no_weight_tying=not tied), "reward": small(score_head=True)}
    for name, args in models.items():
        path = written(tmp_path / name, args, random_weights(args))
        assert has_score_head(path, args) == (name == "reward")
    selection = {"layers": [5, 6], "tensor_rank": 0, "tensor_size": 1}
    fails(
        "language model.*train_impl: rm .*finetune", load_weights, tmp_path / "language", models["reward"], **selection
    )
    new_head_weights = load_weights(
        tmp_path / "language", models["reward"], **{**selection, "layers": [5]}, new_head=True
    )
    assert new_head_weights.keys() == {5} and len(new_head_weights[5]) == 2
    fails(r"extra.*reward model", load_weights, tmp_path / "reward", models["language"], **selection)
