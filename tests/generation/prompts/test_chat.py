"""Prompts of conversations against transformers' own."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from megatron.data.conversations import TemplateSettings
from megatron.generation.batching.requests import RequestError
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.request_parsing import RequestParser
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import HFTokenizer
from tests.data.preprocessing.chat_tokenizers import BRACKETED, CHATML, LLAMA3, fast_tokenizer
from tests.generation.serving.server import FOLDER, SHAPE

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What does the lantern cost?"},
            {"role": "assistant", "content": "Nine coins."},
            {"role": "user", "content": "And in a storm?"}]  # fmt: skip
CASES = {"chatml": (CHATML, {}, ["<|endoftext|>", "<|im_end|>"]),
         "chatml of a base model": (CHATML, {"eos_token": "<|endoftext|>"}, ["<|endoftext|>", "<|im_end|>"]),
         "llama 3": (LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                     ["<|endoftext|>", "<|eot_id|>"]),
         "no token of its own": (BRACKETED, {"eos_token": "<|endoftext|>"}, ["<|endoftext|>"])}  # fmt: skip


def args_of(folder: Path, **values: object) -> NeoXArgs:
    return NeoXArgs.from_dict({**SHAPE, "vocab_file": str(folder), "load": str(folder / "none"), **values})


def template_of(folder: Path, text: str) -> ChatTemplate:
    (folder / "chat.jinja").write_text(text)
    return find_template(args_of(FOLDER, chat_template=str(folder / "chat.jinja")), HFTokenizer(FOLDER))


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    text, special, ends = CASES[name]
    hf = fast_tokenizer(text, **special)
    hf.save_pretrained(tmp_path)
    template = find_template(args_of(tmp_path), HFTokenizer(tmp_path))
    assert template.render(MESSAGES, generation_prompt=False) == hf.apply_chat_template(MESSAGES, tokenize=False)
    expected = hf.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert template.tokens(MESSAGES) == expected
    assert sorted(template.stop_token_ids) == sorted(hf.convert_tokens_to_ids(ends))
    if len(ends) == 2:  # the template ends answers by a token, which may be the one that the model wrote
        (end, other_end), history = hf.convert_tokens_to_ids(ends[::-1]), MESSAGES[:2]
        written = [*hf(MESSAGES[2]["content"], add_special_tokens=False)["input_ids"], end]
        continuation = template.tokens_after(history, TemplateSettings(), end, MESSAGES[3:])
        assert [*template.tokens(history), *written, *continuation] == expected
        assert template.tokens_after(history, TemplateSettings(), other_end, MESSAGES[3:]) == [end, *continuation]


def test_a_template_of_its_own_wins(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ messages[0]['content'] }}|")
    assert template.render(MESSAGES[:1]) == "Be brief.|" and template.source == str(tmp_path / "chat.jinja")
    with pytest.raises(ConfigError, match="chat_template: .*no.jinja: "):
        find_template(args_of(FOLDER, chat_template=str(tmp_path / "no.jinja")), HFTokenizer(FOLDER))


def test_older_places(tmp_path: Path) -> None:
    """Templates in tokenizer_config.json, one or several by name; with the model that is loaded."""
    hf = transformers.AutoTokenizer.from_pretrained(FOLDER)
    tokenizer = HFTokenizer(FOLDER)
    (tokenizer_folder := tmp_path / "plain").mkdir()
    (tokenizer_folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": hf.chat_template}]
    for template in (hf.chat_template, several):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert find_template(args_of(tokenizer_folder, load=str(tmp_path)), tokenizer).text == hf.chat_template
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no chat template .*vocab_file"):
        find_template(args_of(tokenizer_folder, load=str(tmp_path)), tokenizer)


TOOL_CALL_MESSAGES = [
    {"role": "user", "content": "What does the lantern cost?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"of": "lantern"}'}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": t} for t in ("Nine ", "coins.")]},
]  # fmt: skip


def test_calls_of_tools_come_to_the_template_as_objects(tmp_path: Path) -> None:
    """As transformers' templates expect them; a template that leaves them out is not passed over."""
    text = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.of }}){% endfor %}{% endif %}"
        "{{ '\\n' }}{% endfor %}"
    )
    deaf = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = HFTokenizer(FOLDER)

    def prompt(template: str, messages: list[dict[str, object]]) -> str:
        chat = template_of(tmp_path, template)
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 4})
        parsed = RequestParser(("m",), tokenizer, 4096, (0,), chat).chat_completion(body.encode())
        return tokenizer.detokenize(parsed.requests[0].tokens)

    rendered = "[user] What does the lantern cost?\n[assistant] price(lantern)\n[tool] Nine coins.\n"
    assert prompt(text, TOOL_CALL_MESSAGES) == rendered
    broken = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}
    for template, messages, facts in (
        (deaf, TOOL_CALL_MESSAGES, r"message 1 \(assistant\)"),
        (deaf, [{"role": "developer", "content": "Be brief."}, *TOOL_CALL_MESSAGES[:1]], r"message 0 \(developer\)"),
        (text, [TOOL_CALL_MESSAGES[0], broken], "message 1: .* arguments of f .*JSON"),
    ):
        with pytest.raises(APIError, match=facts):
            prompt(template, messages)


def test_a_template_without_end_is_stopped_in_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.preprocessing.time_limit.RENDER_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"  # hours
    template = template_of(tmp_path, endless)
    with ThreadPoolExecutor(1) as pool:
        for ask in (template.tokens, lambda messages: pool.submit(template.tokens, messages).result()):
            with pytest.raises(RequestError, match=r"0.2 s.*chat.jinja\)"):
                ask(MESSAGES)


def test_what_a_template_refuses(tmp_path: Path) -> None:
    template = template_of(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="raises an error .*: roles must alternate"):
        template.tokens(MESSAGES)
    assert template.stop_token_ids == (0,)
