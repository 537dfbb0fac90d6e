"""Texts end at every id that `generation_config.eos_token_id` lists, as transformers and lm-eval have it."""

import json
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from megatron.checkpointing.huggingface import HFFolder, declared_eos_ids, import_hf
from megatron.generation import SamplingParams, complete
from tests.evaluation.runs import instances, language_model, loaded, make_model

PROMPTS = ("The sun rises in the", "Once upon a time", "A short text")
TOKENS = 24


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """Returns transformers' greedy tokens, with the end tokens that the folder declares."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                         pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=["generation_config.json", "config.json"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three ends, two of which it writes."""
    path = Path(make_model(tmp_path_factory.mktemp("model")))
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [generated(path, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    ends = [0, texts[0][5], texts[1][9]]
    tokenizer.add_special_tokens({"additional_special_tokens": tokenizer.convert_ids_to_tokens(ends[1:])})
    tokenizer.save_pretrained(path)
    file = path / request.param
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    if request.param == "config.json":
        (path / "generation_config.json").unlink()
    return path


@pytest.mark.parametrize("source", ["folder", "checkpoint"])
def test_texts_end_where_transformers_ends_them(source: str, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [generated(folder, prompt) for prompt in prompts]
    assert sum(len(text) < TOKENS for text in expected) >= 2, "several end before their time"
    if source == "checkpoint":
        import_hf(HFFolder(folder), tmp_path)
    model = loaded(str(folder), **({"load": str(tmp_path)} if source == "checkpoint" else {}))
    completions = complete(model, prompts, SamplingParams(), maximum_tokens=TOKENS, seeds=range(len(prompts)))
    for completion, text in zip(completions, expected, strict=True):
        assert completion.finished == (len(text) < TOKENS)
        assert completion.tokens == (text[:-1] if completion.finished else text)


def test_lm_eval_writes_as_its_own_backend(folder: Path) -> None:
    neox_model = language_model(loaded(str(folder)))
    hf_model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    requests = instances("generate_until", [(prompt, {"until": [], "max_gen_toks": TOKENS}) for prompt in PROMPTS])
    assert neox_model.generate_until(requests) == hf_model.generate_until(requests, disable_tqdm=True)


def test_what_a_model_declares() -> None:
    def eos_ids(**files: object) -> tuple[int, ...]:
        return declared_eos_ids({f"{name}.json": json.dumps(content).encode() for name, content in files.items()})

    assert eos_ids(generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 2}) == (3, 1)
    assert eos_ids(generation_config={"eos_token_id": 5}) == (5,)
    assert eos_ids(generation_config={"do_sample": True}, config={"eos_token_id": 2}) == (), "as transformers"
    assert eos_ids(config={"eos_token_id": [2, 4]}) == (2, 4)
    assert eos_ids(config={"eos_token_id": None}) == eos_ids() == ()
