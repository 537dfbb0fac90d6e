"""Reward models as HuggingFace's sequence classification: equal scores, and there and back without changing a
bit."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import CheckpointError, has_score_head, layer_file, local_layer_state, save_tensors
from megatron.checkpointing.families import from_hf, hf_config
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf, load_checkpoint_args
from megatron.checkpointing.huggingface.logit_check import our_logits
from megatron.checkpointing.huggingface.raw_llama import write_raw
from megatron.checkpointing.weights import load_weights
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.family_models import CASES, config_of
from tests.checkpointing.test_huggingface import tensors_of
from tests.marks import with_more
from tests.model.stages import random_weights, small

PAD, EOS, LENGTHS = 1, 2, (5, 9, 3)


@torch.no_grad()
def reward_folder(folder: Path, case: str, labels: int = 1) -> Path:
    """A random reward model of transformers, with a tokenizer whose pad token is its end of text."""
    config = config_of(case, num_labels=labels, eos_token_id=EOS)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        value = 0.15 * torch.randn(param.shape, generator=generator)
        is_norm = param.dim() == 1 and name.endswith("weight") and "gemma" not in case
        param.copy_(1 + value if is_norm else value)
    model.save_pretrained(folder)
    special = ["<unk>", "<spare>", "<eos>"]
    vocabulary = tokenizers.models.WordLevel({**{name: i for i, name in enumerate(special)},
                                              **{f"w{i}": i for i in range(3, 90)}}, unk_token="<unk>")  # fmt: skip
    made = tokenizers.Tokenizer(vocabulary)
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
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


# transformers has none for them
WITHOUT_SCORES = ("granite", "cohere", "apertus", "olmoe", "mamba", "falcon mamba", "nemotron")
SCORED = [case for case in CASES if not case.startswith(WITHOUT_SCORES)]
IN_TEST = ("gpt_neox", "llama 3", "gemma 3")
# The first of a class of configurations by `make test-all`: what its others change is not of the head.
FIRST = {CASES[case][0]: case for case in (*reversed(SCORED), *IN_TEST)}.values()


@pytest.mark.parametrize("case", with_more(SCORED, *(set(FIRST) - set(IN_TEST)), product=set(SCORED) - {*FIRST, *IN_TEST}))
def test_scores_are_equal_and_there_and_back_changes_no_bit(case: str, tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", case)
    path, parity = import_hf(HFFolder(folder), tmp_path / "neox", tensor=2)
    assert parity.difference <= 1e-5
    args, _ = load_checkpoint_args(path)
    assert args.score_head
    comparison = export_hf(path, args, tmp_path / "back")
    assert comparison is not None and comparison.difference <= 1e-5
    theirs, ours = tensors_of(folder), tensors_of(tmp_path / "back")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    config = json.loads((tmp_path / "back/config.json").read_text())
    # Without windows it is a LLaMA.
    assert (
        case == "mistral full"
        or config["architectures"] == json.loads((folder / "config.json").read_text())["architectures"]
    )
    assert config["num_labels"] == 1 and config["pad_token_id"] == 0 and config["eos_token_id"] == EOS

    def weights(layer: int) -> dict[str, Tensor]:
        return load_weights(path, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer]

    with torch.no_grad():
        alone = torch.stack([our_logits(args, weights, row[None])[0, -1, 0] for row in texts()])
    torch.testing.assert_close(scores_of_transformers(tmp_path / "back"), alone, rtol=1e-5, atol=1e-5)


def test_what_ends_texts_does_not_pad_them(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", "llama 3")
    path, _ = import_hf(HFFolder(folder), tmp_path / "neox")
    args, _ = load_checkpoint_args(path)
    with pytest.raises(CheckpointError, match="--pad-token-id 2 ends texts, and transformers reads the score"):
        export_hf(path, args, tmp_path / "back", pad_token_id=EOS)
    with pytest.raises(CheckpointError, match="no token is known to pad with"):
        export_hf(path, args, tmp_path / "back", tokenizer=False)
    assert not (tmp_path / "back").exists()
    export_hf(path, args, tmp_path / "back", pad_token_id=PAD)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (tokenizer.pad_token_id, tokenizer.pad_token) == (PAD, "<spare>")
    card = (tmp_path / "back/README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card and "text-classification" in card
    assert not (tmp_path / "back/generation_config.json").exists()


def test_what_has_no_place_for_a_score_is_refused(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", "llama 2")
    with pytest.raises(CheckpointError, match="Meta's format does not: a score in the place of logits"):
        write_raw(HFFolder(folder), tmp_path / "raw", 1)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_gpt_neox_say_themselves_what_they_are(tied: bool, tmp_path: Path) -> None:
    """Its files have no manifest."""
    models = {"language": small(no_weight_tying=not tied), "reward": small(score_head=True)}
    for name, args in models.items():
        (tmp_path / name).mkdir()
        for layer, weights in random_weights(args).items():
            state = local_layer_state(layer, weights, args, tensor_rank=0, tensor_size=1)
            save_tensors(state, tmp_path / name / layer_file(layer, 0))
        assert has_score_head(tmp_path / name, args) == (name == "reward")
    whole = {"layers": [5, 6], "tensor_rank": 0, "tensor_size": 1}
    with pytest.raises(CheckpointError, match="a language model, from which train_impl: rm begins with finetune"):
        load_weights(tmp_path / "language", models["reward"], **whole)
    begun = load_weights(tmp_path / "language", models["reward"], **{**whole, "layers": [5]}, new_head=True)
    assert begun.keys() == {5} and len(begun[5]) == 2
    with pytest.raises(CheckpointError, match=r"extra.*: a reward model, which gives scores and no text"):
        load_weights(tmp_path / "reward", models["language"], **whole)


def test_classifiers_are_refused(tmp_path: Path) -> None:
    folder = reward_folder(tmp_path / "hf", "llama 3", labels=2)
    with pytest.raises(CheckpointError, match="num_labels: 2: a classifier, no reward model"):
        import_hf(HFFolder(folder), tmp_path / "neox")


def test_families_without_reward_models_are_refused() -> None:
    args = NeoXArgs.from_dict({**from_hf(config_of("granite").to_dict(), lambda name: None)[0], "score_head": True})
    with pytest.raises(CheckpointError, match="transformers has no reward models of granite"):
        hf_config(args, family="granite")
