"""Prompts of conversations against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from megatron.generation.chat import find_template
from megatron.generation.requests import RequestError
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import HFTokenizer
from tests.data.chat_tokenizers import CHATML, LLAMA3, PLAIN, fast_tokenizer
from tests.generation.serving import FOLDER, SHAPE

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does the lantern cost?"},
    {"role": "assistant", "content": "Nine coins."},
    {"role": "user", "content": "And in a storm?"},
]
LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
CASES = {
    "chatml": (CHATML, {}, ["<|endoftext|>", "<|im_end|>"]),
    "chatml of a base model": (CHATML, {"eos_token": "<|endoftext|>"}, ["<|endoftext|>", "<|im_end|>"]),
    "llama 3": (LLAMA3, LLAMA3_TOKENS, ["<|endoftext|>", "<|eot_id|>"]),
    "no token of its own": (PLAIN, {"eos_token": "<|endoftext|>"}, ["<|endoftext|>"]),
}


def args_of(folder: Path, **values: object) -> NeoXArgs:
    return NeoXArgs.from_dict({**SHAPE, "vocab_file": str(folder), "load": str(folder / "none"), **values})


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    text, special, ends = CASES[name]
    hf = fast_tokenizer(text, **special)
    hf.save_pretrained(tmp_path)
    found = find_template(args_of(tmp_path), HFTokenizer(tmp_path))
    assert found.render(MESSAGES, False) == hf.apply_chat_template(MESSAGES, tokenize=False)
    expected = hf.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert found.tokens(MESSAGES) == expected
    assert sorted(found.ends) == sorted(hf.convert_tokens_to_ids(ends))


def test_a_template_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}|")
    tokenizer = HFTokenizer(FOLDER)
    found = find_template(args_of(FOLDER, chat_template=str(tmp_path / "chat.jinja")), tokenizer)
    assert found.render(MESSAGES) == "Be brief.|" and found.source == str(tmp_path / "chat.jinja")
    with pytest.raises(ConfigError, match="chat_template: .*no.jinja: cannot be read"):
        find_template(args_of(FOLDER, chat_template=str(tmp_path / "no.jinja")), tokenizer)


def test_older_places(tmp_path: Path) -> None:
    """Templates in tokenizer_config.json, one or several by name; with the model that is loaded."""
    hf = transformers.AutoTokenizer.from_pretrained(FOLDER)
    tokenizer = HFTokenizer(FOLDER)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": hf.chat_template}]
    for template in (hf.chat_template, several):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        found = find_template(args_of(plain, load=str(tmp_path)), tokenizer)
        assert found.text == hf.chat_template
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="there is no chat template beside vocab_file or with the model"):
        find_template(args_of(plain, load=str(tmp_path)), tokenizer)


def test_what_a_template_refuses(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    found = find_template(args_of(FOLDER, chat_template=str(tmp_path / "chat.jinja")), HFTokenizer(FOLDER))
    with pytest.raises(RequestError, match="the chat template refuses these messages: roles must alternate"):
        found.tokens(MESSAGES)
    assert found.ends == (0,)
