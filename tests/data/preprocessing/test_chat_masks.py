"""Trained tokens of conversations: the three checks, and templates that fail them."""

import numpy as np
import pytest

from megatron.data import DataError
from megatron.data.preprocessing.chat_masks import completion_labels, delimiter_labels, span_labels, trained_spans
from tests.data.preprocessing.chat_tokenizers import ANSWER, ASK, BRACKETED, CHATML, GENERATION, LLAMA3, chat_tokenizer

TALK = [{"role": "system", "content": "The harbour trades copper."}, ASK, ANSWER,
        {"role": "user", "content": "In winter?"}, {"role": "assistant", "content": " Ten. "}]  # fmt: skip


def trained(template, messages=TALK, **settings):
    result = trained_spans(chat_tokenizer(template), messages, **settings)
    return [result.text[start:end] for start, end in result.spans]


SWAPPED = [{**m, "role": "model" if m["role"] == "assistant" else m["role"]} for m in TALK]
OPENING = [{"role": "assistant", "content": "Ahoy."}, ASK, ANSWER]
# Phi-3's, which renders the eos_token behind the last message only
END_MARKED = BRACKETED.replace("'\\n'", "'<|end|>\\n'").replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")


@pytest.mark.parametrize("template, messages, settings, expected", [
    (CHATML, TALK, {}, ["Nine coins.<|im_end|>\n", " Ten. <|im_end|>\n"]),
    (GENERATION, TALK, {}, ["Nine coins.<|im_end|>", " Ten. <|im_end|>"]),
    (LLAMA3, TALK, {}, ["Nine coins.<|eot_id|>", "Ten.<|eot_id|>"]),
    (BRACKETED, TALK, {}, ["Nine coins.\n", " Ten. \n"]),
    (END_MARKED, TALK, {}, ["Nine coins.<|end|>\n", " Ten. <|end|>\n<|im_end|>"]),
    (CHATML, TALK, {"only_last": True}, [" Ten. <|im_end|>\n"]),
    (GENERATION, TALK, {"only_last": True}, [" Ten. <|im_end|>"]),
    (CHATML, TALK[:4], {"only_last": True}, []),
    (CHATML.replace("assistant", "model"), SWAPPED, {"role": "model", "only_last": True}, [" Ten. <|im_end|>\n"]),
    # Of an opening without a prompt a template that marks nothing cannot tell the beginning
    (CHATML, OPENING, {}, ["Nine coins.<|im_end|>\n"]),
    (GENERATION, OPENING, {}, ["Ahoy.<|im_end|>", "Nine coins.<|im_end|>"]),
])  # fmt: skip
def test_spans(template, messages, settings, expected):
    assert trained(template, messages, **settings) == expected


def test_tool_calls():
    template = CHATML.replace("m['content'] +", "(m['content'] or m['tool_calls'] | tojson) +")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "price", "arguments": {}}}]}
    (text,) = trained(template, [*TALK[:2], call])
    assert '"name": "price"' in text and text.endswith("<|im_end|>\n")
    with pytest.raises(DataError, match="message 2 .*price"):
        trained(CHATML.replace("m['content'] +", "(m['content'] or 'a call') +"), [*TALK[:2], call])


# name: (template, what is replaced in it, by what, pieces of the message)
GENERATED = "{{ '<|im_start|>assistant\\n' }}"
REFUSED = {
    "check 1, other text": (CHATML, "m['content'] +", "(m['content'] | replace('Nine', 'Ten')) +", "'Nine coins.'"),
    "check 1, words of others":
        (GENERATION, "{% generation %}{{ ", "{% generation %}{{ messages[loop.index0 - 1]['content'] + ",
         "words of other messages: 'What does silk cost?Nine"),
    "check 1, no generation prompt":
        (CHATML, "{% if add_generation_prompt", "{% if false and add_generation_prompt", "'<|im_start|>assistant\\n'"),
    "check 2": (GENERATION, " + '<|im_end|>' }}{% endgeneration %}{{ ", " }}{% endgeneration %}{{ '<|im_end|>' + ",
                "<|im_end|> after the answer"),
    "check 3, history": (CHATML, "m['content']", "(m['content'] if loop.last else m['content'] | replace('Nine', 'N'))",
                         "'ine coins", "' coins"),
    "check 3, prompt": (GENERATION, GENERATED, GENERATED.replace("' }}", "<think></think>' }}"),
                        "'<think></think>'", "'Nine"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_cannot_be_verified(name):
    template, old, new, *pieces = REFUSED[name]
    assert old in template
    with pytest.raises(DataError, match="^message 2 [^\n]*$") as raised:
        trained(template.replace(old, new))
    assert all(piece in str(raised.value) for piece in pieces), raised.value


def test_marks_that_are_no_answers():
    template = GENERATION.replace("{% for", "{% generation %}{{ 'x' }}{% endgeneration %}{{ ' ' }}{% for", 1)
    with pytest.raises(DataError, match="the template marks 3 texts with .*, but the conversation has 2 answers"):
        trained(template)


def test_history_that_is_rewritten_can_still_be_trained_at_its_end():
    """As Qwen3 does with thoughts: they are dropped of all answers but the last."""
    template = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('</think>')[-1])")
    talk = [{**m, "content": f"<think>So</think>{m['content']}"} if m["role"] == "assistant" else m for m in TALK]
    with pytest.raises(DataError, match="message 2 cannot be verified: .*--only-last"):
        trained(template, talk)
    assert trained(template, talk, only_last=True) == ["<think>So</think> Ten. <|im_end|>\n"]


def test_span_labels_count_tokens_that_reach_into_a_span():
    ids, ranges = np.arange(10, 15), np.array([[0, 2], [2, 5], [5, 5], [5, 9], [9, 9]])
    assert span_labels(ids, ranges, "abcdefghi", [(3, 6)]).tolist() == [-100, 11, 12, 13, -100]
    assert span_labels(ids, ranges, "abcdefghi", []).tolist() == [-100] * 5


def test_completion_labels_begin_where_the_first_of_a_pair_parts():
    prompt, chosen, rejected = np.array([1, 2, 3]), np.array([1, 2, 3, 4]), np.array([1, 2, 9, 9])
    labels = completion_labels([prompt, prompt], [chosen, rejected])
    assert [row.tolist() for row in labels] == [[-100, -100, 3, 4], [-100, -100, 9, 9]]


def test_delimiter_labels():
    ids = np.array([5, 7, 8, 6, 7, 8, 9])
    assert delimiter_labels(ids, (7, 8))[0].tolist() == [-100, -100, -100, 6, 7, 8, 9]
    labels, has_delimiter = delimiter_labels(ids, (8, 7))
    assert labels.tolist() == ids.tolist() and not has_delimiter
    assert not delimiter_labels(ids[:1], (5, 7))[1]
