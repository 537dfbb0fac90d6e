"""Checks of what templates omit, beyond the table of readers in tests/generation/prompts/test_readers.py."""

from collections.abc import Sequence

import pytest
from jinja2 import Environment

from megatron.data import DataError
from megatron.data.conversations import Message, RenderedCheck
from megatron.data.conversations.rendered import REASONING_LEFT_OUT

ASK, ANSWER = {"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "High."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "tide", "arguments": {"days": 2, "port": "Brest"}}}]}  # fmt: skip # noqa: E501
LOOP = "{% for m in messages %}"


def check(template: str, messages: Sequence[Message]) -> dict[str, int]:
    def render(rendered_messages: Sequence[Message]) -> str:
        return Environment().from_string(template).render(messages=rendered_messages)

    return dict(RenderedCheck()(messages, render(messages), render))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (LOOP + "{{ m.content | trim }}{% endfor %}", [{**ASK, "content": " Tide?\n"}, ANSWER]),
        (LOOP + "{{ m.content | tojson }}{% endfor %}", [{**ASK, "content": 'The "tide"\n at Brest?'}]),
        # The system message moves to the last question, as Mistral's
        ("{{ messages[1].content }}{{ messages[0].content }}", [{"role": "system", "content": "Be brief."}, ASK]),
        (LOOP + "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ m.content }}{% endfor %}", [CALL]),
        (
            LOOP + "{% for c in m.tool_calls %}<{{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
            "<{{ k }}>{{ v }}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}",
            [CALL],
        ),
    ],
)
def test_other_spellings_are_found(template: str, messages: list[Message]) -> None:
    assert check(template, messages) == {}


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        # A short text that the template itself holds
        ("user: {{ messages[-1].content }}", [{**ASK, "content": "user"}, ANSWER], 0),
        ("{{ messages[1].content }}{{ messages[0].content }}", [ASK, ANSWER], 1),  # another order
        (LOOP + "{{ m.content[:3] }}{% endfor %}", [ANSWER], 0),
        (LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}", [CALL], 0),
        # Arguments as text within JSON
        (LOOP + "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson | string | tojson }}"
         "{% endfor %}{% endfor %}", [CALL], 0),
    ],
)  # fmt: skip
def test_what_is_left_out_is_refused(template: str, messages: list[Message], number: int) -> None:
    with pytest.raises(DataError, match=rf"^message {number} "):
        check(template, messages)


def test_reasoning_that_a_template_drops_is_counted() -> None:
    template = LOOP + "{{ m.content.split('</think>')[-1] }}{% endfor %}"
    talk = [ASK, {**ANSWER, "content": "<think>hm</think>High."}, ASK, {**ANSWER, "reasoning_content": "Again."}]
    assert check(template, talk) == {REASONING_LEFT_OUT: 2}
    assert check(LOOP + "{{ m.content }}{{ m.reasoning_content }}{% endfor %}", talk) == {}
