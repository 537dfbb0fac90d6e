"""Chat data at its edges: answers without words, tokens with blanks, false stop tokens, plain prompts."""

import pytest

from megatron.data import DataError
from megatron.data.preprocessing.chat_tokenizer import load_chat_tokenizer
from megatron.data.preprocessing.time_limit import check_operations
from tests.data.preprocessing import chat_tokenizers
from tests.data.preprocessing.chat_tokenizers import ANSWER, ASK, BRACKETED, CHATML, GENERATION, LLAMA3, chat_tokenizer
from tests.data.samples import jsonl
from tools.datasets import analyze
from tools.datasets import preprocess_data_with_chat_template as tool

TALK = [ASK, ANSWER, {**ASK, "content": "In winter?"}, {**ANSWER, "content": "Ten."}]
COMPLETED = {"prompt": [ASK], "completion": [ANSWER]}


def answer_message(text):
    return {**ANSWER, "content": text}


def encode(row, template=CHATML, keys=("messages",), chat=None, **options):
    """Whole texts, trained texts, and counts."""
    chat = chat or chat_tokenizer(template, eos_token="<|endoftext|>", bos_token="<|begin_of_text|>")
    (encoded_row,), counts = chat_tokenizers.encoded([row], chat, keys=keys, **options)
    return *map(list, zip(*chat_tokenizers.texts_of(encoded_row, chat), strict=True)), counts


def test_a_text_prompt_with_messages_is_the_users():
    as_text, as_messages = ({"prompt": p, "completion": [ANSWER]} for p in (ASK["content"], [ASK]))
    assert encode(as_text, keys=("completion",))[:2] == encode(as_messages, keys=("completion",))[:2]
    sides = {"chosen": [ANSWER], "rejected": [answer_message("Ten.")]}
    pairs = [encode({"prompt": p, **sides}, keys=("chosen", "rejected")) for p in (ASK["content"], [ASK])]
    assert pairs[0] == pairs[1]


def test_a_prompt_of_text_that_the_messages_hold_is_not_repeated():
    (full_text,), (trained,), _ = encode({"prompt": ASK["content"], "completion": TALK}, keys=("completion",))
    assert full_text.count(ASK["content"]) == 1 and trained == "Nine coins.<|im_end|>\nTen.<|im_end|>\n"
    pair = {side: [{**ASK, "content": "Other words."}, answer_message(side)] for side in ("chosen", "rejected")}
    wholes, trained, _ = encode({"prompt": "dialogue: ...", **pair}, keys=("chosen", "rejected"))
    assert trained[0] == "chosen<|im_end|>\n" and "dialogue" not in wholes[0]


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_an_answer_without_words_trains_its_stop_token(blank):
    row = {"messages": [ASK, answer_message(blank), *TALK[2:]]}
    assert encode(row)[1] == [f"{blank}<|im_end|>\nTen.<|im_end|>\n"]
    assert encode(row, GENERATION)[1] == [f"{blank}<|im_end|>Ten.<|im_end|>"]
    assert encode(row, LLAMA3)[1] == ["<|eot_id|>Ten.<|eot_id|>"]
    assert encode({"messages": [ASK, answer_message(blank)]}, BRACKETED)[1][0].endswith("\n<|endoftext|>")
    bare = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}{% endfor %}"
    bare += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    assert encode({"messages": [ASK, answer_message(blank)]}, bare)[1] == ["<|endoftext|>"]
    assert encode(COMPLETED | {"completion": [answer_message(blank)]}, bare, ("completion",))[1] == ["<|endoftext|>"]
    silent = CHATML.replace("{% if add_generation_prompt", "{% if false and add_generation_prompt")
    with pytest.raises(DataError, match="the template writes '<.im_start.>assistant.n' before the answer"):
        encode(row, silent)


def words(**added):
    """Whole words, blanks dropped; added: of the control tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "Nine": 1, "coins": 2, "Ten": 3, ".": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, **added) for token in chat_tokenizers.ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.mark.parametrize("added", [{}, {"lstrip": True}, {"rstrip": True}])
def test_the_next_turns_token_is_not_trained_for_the_blanks_before_it(added):
    hf = words(**added)
    hf.chat_template = CHATML
    trained = encode({"messages": TALK}, chat=chat_tokenizers.chat_of(hf))[1]
    assert trained[0].split() == "Nine coins . <|im_end|> Ten . <|im_end|>".split()


def test_a_token_of_the_answers_own_is_no_stop_token():
    row = {"messages": [ASK, answer_message("<think>42 </think>"), *TALK[2:], ASK, answer_message("Ten </think>")]}
    (full_text,), (trained,), counts = encode(row, BRACKETED)
    assert trained == "<think>42 </think>\nTen.\nTen </think>\n<|endoftext|>" and full_text.endswith("<|endoftext|>")
    assert counts["answers without a stop token"] == 2  # the last has the one that is added
    _, (trained,), counts = encode(row, CHATML)
    assert trained.endswith("Ten </think><|im_end|>\n") and not counts["answers without a stop token"]
    assert encode({"messages": [ASK, answer_message("Ten.<|endoftext|>")]}, BRACKETED)[1] == ["Ten.<|endoftext|>\n"]


def test_an_answer_closed_by_the_eos_token_has_a_stop_token():
    for row, keys, only_last, num_unstopped in (
        ({"messages": TALK}, ("messages",), True, 0),
        ({"messages": TALK}, ("messages",), False, 1),
        (COMPLETED, ("completion",), False, 0),
    ):
        _, (trained,), counts = encode(row, BRACKETED, keys, scope="last_turn" if only_last else None)
        assert trained.endswith("<|endoftext|>") and counts["answers without a stop token"] == num_unstopped
    dangling = encode({"messages": [*TALK, ASK]}, BRACKETED)
    assert dangling[1] == ["Nine coins.\nTen.\n"] and dangling[2]["answers without a stop token"] == 2


def test_a_template_without_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.preprocessing.time_limit.RENDER_SECONDS", 0.2)
    hours = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "endless.jinja").write_text(hours)
    chat_tokenizers.fast_tokenizer(None).save_pretrained(tmp_path / "tokenizer")
    chat = load_chat_tokenizer(str(tmp_path / "tokenizer"), str(tmp_path / "endless.jinja"))
    with pytest.raises(DataError, match=r"^row: the chat template fails: stopped after 0.2 s.*endless.jinja\)"):
        encode({"messages": TALK}, chat=chat)


def test_a_row_truncated_on_the_left_keeps_its_bos():
    chat, limits = chat_tokenizer(LLAMA3, bos_token="<|begin_of_text|>"), {"max_length": 6, "overlong": "truncate_left"}
    (encoded_row,), _ = chat_tokenizers.encoded([{"messages": TALK}], chat, keys=("messages",), **limits)
    ((full_text, trained),) = chat_tokenizers.texts_of(encoded_row, chat)
    assert full_text.startswith("<|begin_of_text|>") and full_text.count("<|begin_of_text|>") == 1
    assert full_text.endswith("<|eot_id|>") and full_text.removeprefix("<|begin_of_text|>").endswith(trained)
    ((document,),) = encoded_row.documents
    assert len(document.ids) == len(document.labels) == 6 and document.labels[0] == -100


def test_flags_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.main("--input x --output-prefix y --tokenizer-path z --date foo".split())
    assert "--date: 'foo' is not a date; write it like 2026-01-31" in capsys.readouterr().err
    words().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"nope: no such file \(--chat-template\)"):
        analyze.load(str(tmp_path / "tokenizer.json"), str(tmp_path / "nope"))


def test_analyze_takes_a_prompt_of_text_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chat_tokenizer().hf.save_pretrained(tmp_path / "tokenizer")
    tables = []
    for prompt in (ASK["content"], [ASK]):
        source = jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": [ANSWER]}])
        analyze.main([str(source), "--tokenizer", str(tmp_path / "tokenizer")])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "prompt" in tables[0]


@pytest.mark.parametrize("template", ["{{ f(**words) }}", "{{ f(1, ** words) }}", "2 ** 3"])
def test_words_of_a_call_are_no_power(template: str) -> None:
    check_operations(template)


@pytest.mark.parametrize("template", ["{{ 2**3 }}", "{% generation %}\n{{ 9 ** 9 }}{% endgeneration %}"])
def test_a_power_in_a_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=f"line {1 + template.count(chr(10))}:"):
        check_operations(template)
