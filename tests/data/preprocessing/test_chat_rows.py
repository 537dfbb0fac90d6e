"""Shapes of chat data, the chat tool's flags, and input that cannot be used."""

import json

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_tokenizer import load_chat_tokenizer
from tests.data.preprocessing import chat_tokenizers
from tests.data.preprocessing.chat_tokenizers import (
    ANSWER,
    ASK,
    BRACKETED,
    CHATML,
    GENERATION,
    LLAMA3,
    encoded,
    texts_of,
)
from tests.data.samples import jsonl, refused
from tools.datasets import preprocess_data_with_chat_template as tool

ROW = {"messages": [ASK, ANSWER]}
BOS = {"bos_token": "<|begin_of_text|>"}
SCORE = {"reward_key": "score"}


def encode(row, template=CHATML, keys=("messages",), special=None, **options):
    chat = chat_tokenizers.chat_tokenizer(template, **(special or {}))
    (encoded_row,), counts = encoded([row], chat, keys=keys, **options)
    return encoded_row, counts, chat


def texts(row, *args, **options):
    encoded_row, _, chat = encode(row, *args, **options)
    return texts_of(encoded_row, chat)


EOT = {"special": {"eos_token": "<|endoftext|>"}}
SHAREGPT = [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": ANSWER["content"]}]
LONGER = {"prompt": [ASK], "completion": [ANSWER, ASK, {**ANSWER, "content": "Ten."}]}


@pytest.mark.parametrize("row, options, expected", [
    ({"conversations": SHAREGPT}, {"keys": ("conversations",)}, "Nine coins.<|im_end|>\n"),
    (ROW, {"template": BRACKETED, **EOT}, "Nine coins.\n<|endoftext|>"),  # only where the template has none
    (ROW, EOT, "Nine coins.<|im_end|>\n"),
    ({"messages": [ASK, ANSWER, ASK]}, {"template": BRACKETED, **EOT}, "Nine coins.\n"),
    (ROW, {"template": LLAMA3, "for_rm": True}, "<|eot_id|>"),
    (ROW, {"template": BRACKETED, "for_rm": True}, "<|im_end|>"),
    (LONGER, {"keys": ("completion",), "scope": "last_turn"}, "Ten.<|im_end|>\n"),
    ({"messages": [ASK, {**ANSWER, "content": "CafÃ©"}]}, {"ftfy": True}, "Café<|im_end|>\n"),
    *(({"messages": [ASK, {**ANSWER, "content": "Ten.", **mask}, ASK, ANSWER]}, {}, "Nine coins.<|im_end|>\n")
      for mask in ({"weight": 0}, {"train": False}, {"loss": False})),
])  # fmt: skip
def test_what_is_trained_of_a_row(row, options, expected):
    ((full_text, trained),) = texts(row, **options)
    assert trained == expected and full_text.startswith(texts(ROW, template=options.get("template", CHATML))[0][0][:30])
    assert full_text.endswith("<|endoftext|>") == (options.get("template") == BRACKETED and "special" in options)


def test_tools_and_template_variables():
    template = "{{ tools | tojson if tools else '' }}{{ city }}" + CHATML
    tools = [{"type": "function", "function": {"name": "price", "parameters": {}}}]
    row = {**ROW, "chat_template_kwargs": {"city": "Oslo"}}
    ((full_text, trained),) = texts({**row, "tools": tools}, template)
    assert texts({**row, "tools": json.dumps(tools)}, template) == [(full_text, trained)]
    assert '"name": "price"' in full_text and "Oslo<|im_start|>" in full_text and trained == "Nine coins.<|im_end|>\n"


def test_columns_made_into_messages():
    maps = (("user", "For {topic}, {{n}}: {question}"), ("assistant", "{answer}"))
    ((full_text, trained),) = texts(
        {"topic": "silk", "question": "what?", "answer": 9}, maps=maps, system="Be {brief}."
    )
    system, user = "<|im_start|>system\nBe {brief}.<|im_end|>\n", "<|im_start|>user\nFor silk, {n}: what?<|im_end|>"
    assert full_text.startswith(system + user) and trained == "9<|im_end|>\n"


def test_a_system_message_of_the_row_stays():
    row = {"messages": [{"role": "system", "content": "Mine."}, ASK, ANSWER]}
    encoded_row, counts, chat = encode(row, system="File's.")
    ((full_text, _),) = texts_of(encoded_row, chat)
    assert "Mine." in full_text and "File's" not in full_text
    assert counts["conversations that keep a system message of their own"] == 1


def test_exactly_one_bos():
    """A template writes its own; to plain text the tokenizer adds it, and text that brings one is refused."""
    from tokenizers import processors

    hf = chat_tokenizers.fast_tokenizer(LLAMA3, **BOS, eos_token="<|eot_id|>")
    begin = {"single": "<|begin_of_text|> $A", "special_tokens": [("<|begin_of_text|>", hf.bos_token_id)]}
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(**begin)
    chat, keys = chat_tokenizers.chat_of(hf), ("completion",)
    assert chat.adds_bos
    rows = [{"prompt": "The ", "completion": "silk"}, {"prompt": [ASK], "completion": [ANSWER]}]
    assert all((row.documents[0][0].ids == chat.bos).sum() == 1 for row in encoded(rows, chat, keys=keys)[0])
    with pytest.raises(DataError, match="begins with <.begin_of_text.> twice"):
        encoded([{"prompt": "<|begin_of_text|>The ", "completion": "silk"}], chat, keys=keys)


def test_blanks_that_a_tokenizer_leaves_out_of_its_ranges():
    """ByteLevel's trim_offsets: a blank that ends the answer is a token of no characters; it is trained."""
    from tokenizers import processors

    template = GENERATION.replace(" + '<|im_end|>' }}{% end", " }}{% end").replace("<|im_end|>", "")
    hf = chat_tokenizers.fast_tokenizer(template.replace("<|im_start|>", "* "))
    hf.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat, row = chat_tokenizers.chat_of(hf), {"messages": [ASK, {**ANSWER, "content": "  Nine  coins. "}, ASK]}
    (encoded_row,), _ = encoded([row], chat, keys=("messages",))
    assert texts_of(encoded_row, chat)[0][1] == "  Nine  coins. "


def test_binary_rewards():
    encoded_rows = [
        encode({**ROW, "good": good}, reward_key="good", binary_reward=True)[0] for good in (True, False, 1, 0, -1)
    ]
    assert [row.reward for row in encoded_rows] == [1, -1, 1, -1, -1]


def test_over_long_rows():
    full_document = encode(ROW)[0].documents[0][0]
    n = len(full_document.ids)
    assert np.array_equal(encode(ROW, max_length=n)[0].documents[0][0].ids, full_document.ids)
    refused(rf"^row: {n} tokens, more than --max-length {n - 1}; see --overlong$", encode, ROW, max_length=n - 1)
    for overlong, ids, name in (
        ("drop", None, "over-long rows dropped"),
        ("truncate_left", full_document.ids[3:], "over-long rows truncated"),
        ("truncate_right", full_document.ids[:-3], "over-long rows truncated"),
    ):
        encoded_row, counts, _ = encode(ROW, max_length=n - 3, overlong=overlong)
        assert (encoded_row is None) if ids is None else np.array_equal(encoded_row.documents[0][0].ids, ids), overlong
        assert counts[name] == 1
    encoded_row, counts, _ = encode(ROW, max_length=5, overlong="truncate_right")
    assert encoded_row is None and counts["over-long rows left out, as nothing in the rest is trained"] == 1


def test_over_long_rows_in_pieces():
    full_document = encode(ROW)[0].documents[0][0]
    encoded_row, counts, _ = encode(ROW, max_length=6, overlong="split")
    (pieces,) = encoded_row.documents
    assert all(len(piece.ids) <= 6 and (piece.labels >= 0).any() for piece in pieces)
    trained = np.concatenate([piece.labels[piece.labels >= 0] for piece in pieces])
    assert np.array_equal(trained, full_document.labels[full_document.labels >= 0])
    left_out = counts["pieces left out, as nothing in them is trained"]
    assert left_out and len(pieces) + left_out == -(-len(full_document.ids) // 6)


def test_both_sides_of_a_pair_go():
    pair = {"chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": "It costs nine coins, or ten in a storm"}]}
    encoded_row, _, _ = encode(pair, keys=("chosen", "rejected"))
    limit = len(encoded_row.documents[0][0].ids)
    assert encode(pair, keys=("chosen", "rejected"), max_length=limit, overlong="drop")[0] is None


@pytest.mark.parametrize("row, options, message", [
    ([], {}, "list, not an object"),
    ({"text": "x"}, {}, r'"messages" .*text'),
    ({"messages": []}, {}, '"messages" .*empty'),
    ({"messages": "hello"}, {}, '"messages" is text'),
    ({"messages": [ASK, "x"]}, {}, '"messages" message 1 is str'),
    ({"messages": [{"content": "x"}]}, {}, '"messages" message 0 .*role'),
    ({"messages": [{"role": "user"}]}, {}, '"messages" message 0 .*content'),
    ({"messages": [{"role": "user", "content": 3}]}, {}, "content is int"),
    ({"messages": [ASK, {**ANSWER, "role": "model"}]}, {}, r'"assistant" .*found: user, model'),
    ({**ROW, "tools": "[{"}, {}, '"tools" .*JSON'),
    ({**ROW, "tools": {}}, {}, '"tools" is dict'),
    ({**ROW, "chat_template_kwargs": [1]}, {}, '"chat_template_kwargs" is list'),
    ({"messages": [{**ASK, "content": "\ud800"}, ANSWER]}, {}, "surrogate"),
    (ROW, {"template": "{{ raise_exception('no system role') }}"}, "template fails: no system role"),
    (ROW, {"template": "{{ messages[9].content }}{{ x.y.z }}"}, "template fails: "),
    (ROW, {"template": None}, "no chat template.*--chat-template"),
    (ROW, {"template": "{% if true %} {% endif %}"}, "message 0 .*silk"),
    (ROW, {"template": BRACKETED, "special": {"eos_token": None}}, "no eos_token"),
    (ROW, {"template": "{{ bos_token }}" + LLAMA3, "special": BOS}, "begin_of_text.* twice"),
    ({"chosen": [ANSWER], "rejected": [ASK]}, {"keys": ("chosen", "rejected")}, "begin differently"),
    ({"prompt": [ASK], "completion": [{**ASK, "content": "and?"}]}, {"keys": ("completion",)}, '"completion" .*role'),
    ({"prompt": [ASK], "chosen": [ASK, ANSWER]}, {"keys": ("chosen",)}, '"chosen" begins'),
    ({"prompt": [ASK], "completion": [{**ANSWER, "weight": 0}]}, {"keys": ("completion",)}, "message 0 .*weight"),
    ({"messages": [ASK, {**ANSWER, "weight": 0}]}, {"mask": False}, "message 1 .*weight"),
    ({"messages": [ASK, {**ANSWER, "loss_scale": 0.5}]}, {}, "message 1: loss_scale"),
    ({**ROW, "score": float("nan")}, SCORE, '"score" is nan'),
    ({**ROW, "score": 1e39}, SCORE, '"score" is 1e[+]39'),
    ({**ROW, "score": "9"}, SCORE, "\"score\" is '9'"),
    (ROW, SCORE, '"score" is missing'),
    ({**ROW, "score": 0.5}, SCORE | {"binary_reward": True}, "--binary-reward "),
    *(({"messages": [ASK, {**ANSWER, "tool_calls": calls}]}, {}, '"messages" message 1: tool_calls')
      for calls in ([{"function": "f"}], ["f"], "f")),
    (ROW, {"template": "{{ 1 / 0 }}"}, "template fails: .*zero"),
    (ROW, {"template": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"}, "template fails: .*recursion"),
    (ROW, {"template": "{{ bos_token + '\\n' + bos_token }}" + CHATML, "special": BOS}, r"<\|begin_of_text\|> twice"),
    (ROW, {"template": "{{ ' ' + bos_token + bos_token }}" + CHATML, "special": BOS}, "begin_of_text.* twice"),
    ({"prompt": "a", "response": "b"}, {"keys": ("response",)}, "completion, chosen or rejected"),
    ({"a": "x"}, {"maps": (("user", "{b}"),)}, r"--map user: .*'b' .*a"),
    ({"a": "x"}, {"maps": (("user", "{a"),)}, "braces"),
])  # fmt: skip
def test_rows_that_cannot_be_used(row, options, message):
    refused(rf"^row: .*{message}[^\n]*$", encode, row, **options)


@pytest.mark.parametrize("options", [
    {"binary_reward": True}, {"overlong": "drop"}, {"max_length": 1}, {"for_rm": True, "mask": False},
    {"for_rm": True, "scope": "last_turn"}, {"maps": (("user", "x"),), "keys": ("a", "b")},
    {"overlong": "split", "max_length": 8, "keys": ("chosen", "rejected")},
    {"overlong": "truncate_right", "max_length": 8, "for_rm": True},
], ids=str)  # fmt: skip
def test_flags_that_exclude_each_other(options):
    refused("^--", ChatOptions(**options).check)


@pytest.fixture
def saved(tmp_path):
    """A tokenizer folder whose template writes the date."""
    hf = chat_tokenizers.fast_tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    hf.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_row_19_as_typed_and_its_frozen_date(saved, tmp_path):
    flags = f"--input {jsonl(tmp_path / 'chats.jsonl', [ROW] * 40)} --tokenizer-path {saved} --jsonl-keys messages"
    tool.main(f"{flags} --output-prefix {tmp_path}/out --dataset-impl mmap --num-docs 40 --workers 50".split())
    text, labels = (IndexedDataset(f"{tmp_path}/out_messages_{kind}") for kind in ("document", "label_document"))
    assert len(text) == 40 and np.array_equal(text.sizes, labels.sizes) and text.dtype == np.int32
    metadata = json.loads((tmp_path / "out_metadata.json").read_text())
    decode = load_chat_tokenizer(str(saved)).hf.decode
    assert decode(text[39]).split("<")[0].endswith(metadata["template_date"][:4])
    assert metadata["counts"]["trained tokens"] == int((labels.tokens >= 0).sum())
    tool.main(f"{flags} --output-prefix {tmp_path}/old --date 2024-07-26".split())
    assert decode(IndexedDataset(f"{tmp_path}/old_messages_document")[0]).startswith("26 Jul 2024<|im_start|>")
    assert json.loads((tmp_path / "old_metadata.json").read_text())["template_date"] == "2024-07-26"


def test_a_bad_row_is_named_or_skipped(saved, tmp_path, capsys):
    source = jsonl(tmp_path / "chats.jsonl", [ROW, {"messages": []}, ROW])
    source.write_text(source.read_text() + "{\n")
    flags = f"--input {source} --output-prefix {tmp_path}/out --tokenizer-path {saved} --jsonl-keys messages".split()
    first_problem = f'{source}:2: "messages" '
    for policy, message in (
        ("stop", first_problem),
        ("1", rf"2 bad rows, .* allows 1; the first: {first_problem}|{source}:4: "),
    ):
        with pytest.raises(SystemExit, match=rf"^preprocess_data_with_chat_template.py: error: ({message})"):
            tool.main([*flags, "--on-bad-row", policy])
        assert not list(tmp_path.glob("out*"))
    for words in (["--on-bad-row", "drop"], ["--on-error", "skip"], []):
        tool.main([*flags, *words])
        assert len(IndexedDataset(f"{tmp_path}/out_messages_document")) == 2
        message = capsys.readouterr().err
        assert "2 bad rows" in message and first_problem in message


def test_what_is_not_read_or_not_written_is_named(saved, tmp_path, capsys):
    reasoned = {"messages": [ASK, {**ANSWER, "reasoning_content": "Silk is dear."}], "loss_weight": 0.5, "weight": 1}
    source = jsonl(tmp_path / "chats.jsonl", [reasoned, {"messages": [ASK]}])
    flags = f"--input {source} --output-prefix {tmp_path}/out --tokenizer-path {saved} --jsonl-keys messages"
    tool.main([*flags.split(), "--untrained", "keep"])
    unread_line, *notes = capsys.readouterr().out.splitlines()
    assert "weight, loss_weight" in unread_line and any("reasoning" in line and line.endswith(": 1") for line in notes)


def test_a_job_of_bad_rows_names_the_first(saved, tmp_path):
    source = jsonl(tmp_path / "chats.jsonl", [{"messages": [{**ASK, "role": "robot", "content": 3}]}] * 3)
    flags = f"--input {source} --output-prefix {tmp_path}/out --tokenizer-path {saved} --jsonl-keys messages"
    with pytest.raises(SystemExit, match=rf"3 bad rows .*{source}:1: .*message 0"):
        tool.main(flags.split())
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("flags, message", [
    ("--tokenizer-path nobody/nothing", "nobody/nothing: .*Hugging"),
    ("--tokenizer-path ./nowhere", "no such folder"),
    ("--tokenizer-path {data}", "no tokenizer of transformers"),
    ("--tokenizer-path {saved} --chat-template nowhere.jinja", "nowhere.jinja: no such file"),
    ("--tokenizer-path {saved} --system-file nowhere.txt", "nowhere.txt: "),
    ("--tokenizer-path {saved} --map user", "ROLE=TEXT"),
    ("--tokenizer-path {saved} --binary-reward", "--binary-reward .*--reward-key"),
])  # fmt: skip
def test_one_line_for_flags_that_cannot_be(saved, tmp_path, monkeypatch, flags, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    source = jsonl(tmp_path / "chats.jsonl", [ROW])
    flags = flags.format(saved=saved, data=tmp_path / "data")
    with pytest.raises(SystemExit, match=rf"^preprocess_data_with_chat_template.py: error: [^\n]*{message}[^\n]*$"):
        tool.main(f"--input {source} --output-prefix {tmp_path}/out {flags}".split())


def test_a_date_of_no_plain_format_cannot_be_frozen():
    refused("its date cannot be frozen", chat_tokenizers.chat_tokenizer, "{{ strftime_now(form) }}" + CHATML)


def test_template_file_and_system_file(saved, tmp_path):
    (tmp_path / "plain.jinja").write_text(BRACKETED)
    (tmp_path / "system.txt").write_text("Be brief.\n")
    source = jsonl(tmp_path / "chats.jsonl", [{"q": "silk", "a": "nine"}])
    flags = f"--chat-template {tmp_path}/plain.jinja --system-file {tmp_path}/system.txt --map user={{q}}"
    path_flags = f"--input {source} --output-prefix {tmp_path}/out --tokenizer-path {saved}"
    tool.main(f"{path_flags} {flags} --map assistant={{a}}".split())
    ids = IndexedDataset(f"{tmp_path}/out_conversation_document")[0]
    text = "[system] Be brief.\n[user] silk\n[assistant] nine\n<|im_end|>"
    assert load_chat_tokenizer(str(saved)).hf.decode(ids) == text


@pytest.mark.parametrize("template", [CHATML, GENERATION])
@pytest.mark.parametrize("scope", [None, "all_assistant", "last_turn"])
def test_a_conversation_without_an_answer_is_kept_when_asked(template, scope):
    completed = {"prompt": [ASK], "completion": [{**ASK, "content": "and?"}]}
    for row, options, words in (
        ({"messages": [ASK]}, {"template": template, "scope": scope}, ASK["content"]),
        (completed, {"keys": ("completion",)}, "and?"),
    ):
        encoded_row, counts, chat = encode(row, **options, untrained="keep")
        ((full_text, trained),) = texts_of(encoded_row, chat)
        assert words in full_text and not trained and counts["rows without a trained token"] == 1


@pytest.mark.parametrize(("rejected", "count"), [("Nine coins.", 1), ("Nine coins. Or ten.", 0)])
def test_pairs_of_the_same_answer_are_counted(rejected, count):
    row = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": rejected}]}
    _, counts, _ = encode(row, keys=("chosen", "rejected"))
    assert counts["pairs whose chosen and rejected are the same"] == count
    # Where the cut makes them so
    limit = len(encode(row, keys=("chosen",))[0].documents[0][0].ids) - 3
    _, counts, _ = encode(row, keys=("chosen", "rejected"), max_length=limit, overlong="truncate_right")
    assert counts["pairs whose chosen and rejected are the same"] == 1


@pytest.mark.parametrize(("scope", "count"), [(None, 1), ("completion", 1), ("all_assistant", 0), ("last_turn", 0)])
def test_turns_of_others_that_a_completion_trains_are_counted(scope, count):
    row = {"prompt": [ASK], "completion": [ANSWER, {**ASK, "content": "In winter?"}, {**ANSWER, "content": "Ten."}]}
    encoded_row, counts, chat = encode(row, keys=("completion",), scope=scope)
    ((_, trained),) = texts_of(encoded_row, chat)
    assert ("In winter?" in trained) == bool(count)
    assert counts["turns of others trained, as they follow the prompt (see --loss-scope)"] == count
