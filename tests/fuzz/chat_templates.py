"""Chat templates, and the conversations that they render: for serving, generation and training."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.generation.prompts.chat import find_template
from megatron.generation.prompts.questions import read_questions
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import make_tokenizer
from tests.data.preprocessing import chat_tokenizers
from tests.data.preprocessing.chat_tokenizers import ANSWER, ASK, CHATML, GENERATION, LLAMA3, encoded, fast_tokenizer
from tests.fuzz.campaign import Kind
from tests.fuzz.cases import Case
from tests.fuzz.mutations import json_bytes, spoilt_bytes, spoilt_value
from tests.fuzz.rows import ROWS
from tests.generation.serving.server import FOLDER
from tests.model.stages import SMALL

# A text of gigabytes takes as long as the memory allows, as nothing interrupts a single operation
_PARTS = (
    "{% for m in messages %}", "{% endfor %}", "{{ m['content'] }}", "{{ m.content.x.y }}", "{{ 1 / 0 }}",
    "{{ messages }}", "{{ raise_exception('no') }}", "{{ strftime_now('%d %b') }}", "{{ strftime_now(1) }}",
    "{% generation %}", "{% endgeneration %}", "{% set x = namespace(a=1) %}", "{% if tools %}", "{% endif %}",
    "{% else %}", "{{ eos_token }}", "{{ ''.__class__.__mro__ }}", "{{ range(10 ** 9) | list }}",
    "{{ 'x' * 10 ** 12 }}", "{% include 'a' %}", "{# x #}", "{% for i in range(10 ** 12) %}{% endfor %}",
    "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}", "{{ m | tojson }}", "{% break %}",
    "{{ messages[99].content }}", "{{ messages | map(attribute='role') | list | join }}", "{% extends 'b' %}",
    "{{ self.x() }}", "{{ cycler.__init__ }}", "{{ messages.append(messages) }}", "{{ undefined + 1 }}",
    "{{ [].pop() }}", "{{ 9 ** 9999999 }}", "{{ '%100000d' % 1 }}", "{% raw %}", "{{ '\\ud800' }}",
    "{{ bos_token * 3 }}",
)  # fmt: skip
_CALLS = CHATML.replace("m['content'] +", "m['content'] + (m.tool_calls | default([]) | tojson) +")
_TEMPLATES = (CHATML, LLAMA3, GENERATION, chat_tokenizers.BRACKETED, "{{ tools | default([]) | tojson }}" + _CALLS)
_PLAIN_ROW = {"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER, ASK, ANSWER]}


@st.composite
def _cases(draw: DrawFn) -> Case:
    template = draw(st.sampled_from(_TEMPLATES))
    match draw(st.sampled_from(["bytes", "parts", "messages"])):
        case "bytes":
            content = draw(spoilt_bytes(template.encode()))
        case "parts":
            for part in draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3)):
                ends = [0, *(end for end in range(len(template)) if template[end - 1 : end + 1] in ("}}", "%}"))]
                place = draw(st.sampled_from(ends)) + 1 if draw(st.booleans()) else len(template)
                template = template[:place] + part + template[place:]
            content = template.encode()
        case "messages":
            content = template.encode()
    row = draw(
        st.sampled_from(
            [_PLAIN_ROW, *(row for row in ROWS if "messages" in row)] if template == _TEMPLATES[-1] else [_PLAIN_ROW]
        )
    )
    rows = json.dumps(row).encode() if draw(st.booleans()) else draw(spoilt_value(row).map(json_bytes))
    return {"template.jinja": content, "rows.jsonl": rows}


@cache
def _tokenizer() -> Any:
    return make_tokenizer("HFTokenizer", str(FOLDER / "tokenizer.json"))


def _run(folder: Path) -> None:
    args = NeoXArgs.from_dict({**SMALL, "chat_template": str(folder / "template.jinja")})
    template = find_template(args, _tokenizer())
    template.stop_token_ids  # noqa: B018 - renders
    text = (folder / "template.jinja").read_text()
    for question in read_questions(folder / "rows.jsonl", chat=True):
        question.tokens(_tokenizer(), template, 1000)
    row = json.loads((folder / "rows.jsonl").read_bytes())
    encoded([row], chat_tokenizers.chat_of(fast_tokenizer(text)), keys=("messages",))


KIND = Kind("chat_templates", _cases(), _run)
