"""Renders conversations as text and tokens, with the chat template of a tokenizer."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.conversations import Message, RenderedCheck, TemplateSettings, message_texts
from megatron.data.errors import DataError
from megatron.data.preprocessing.time_limit import RenderTimeout, check_operations, render_limit
from megatron.neox_arguments.optional_packages import import_optional

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"""strftime_now\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")


class ChatTokenizer:
    """A fast tokenizer of `transformers` with its chat template, in which today's date is fixed.

    date: the day that `strftime_now` returns in the template; None if the template does not call it.
    added: texts of the added tokens.
    source: where the template comes from, for messages.
    """

    def __init__(self, hf: Any, day: date, template: str | None = None, source: str | None = None):
        self.hf = hf
        self.source = source or hf.name_or_path
        if not hf.is_fast:
            raise DataError(
                f"{hf.name_or_path}: this tokenizer has no tokenizer.json, which is needed to know the characters of "
                "each token"
            )
        # Truncation or padding saved in tokenizer.json would silently change conversations
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
        if getattr(hf.backend_tokenizer.model, "dropout", None):
            raise DataError(
                f"{hf.name_or_path}: its model has dropout, so each run would get other tokens; set model.dropout to "
                "null in tokenizer.json"
            )
        templates = template if template is not None else hf.chat_template
        template_texts = templates if isinstance(templates, dict) else {"": templates or ""}
        self.date = day if any("strftime_now(" in text for text in template_texts.values()) else None
        frozen = {name: _freeze(text, day) for name, text in template_texts.items()}
        hf.chat_template = frozen if isinstance(templates, dict) else frozen[""] or None
        self.added = tuple(token.content for token in hf.added_tokens_decoder.values() if token.content.strip())
        self.eos: int | None = hf.eos_token_id
        self.bos: int | None = hf.bos_token_id
        self.adds_bos = self.bos is not None and hf.backend_tokenizer.encode("x").ids[:1] == [self.bos]
        self.verified: set[tuple[str, str]] = set()  # checked texts before and after an answer, see chat_masks.py
        self._check = RenderedCheck()

    def require_template(self) -> None:
        """Raise DataError if the tokenizer has no chat template."""
        if not self.hf.chat_template:
            raise DataError(
                f"{self.hf.name_or_path}: the tokenizer has no chat template; give one with --chat-template"
            )

    def marks_generation(self, tools: list | None) -> bool:
        """Return whether the template marks the text that the model writes by `{% generation %}`."""
        return bool(_GENERATION.search(self.hf.get_chat_template(None, tools)))

    def render(
        self, messages: Sequence[Message], settings: TemplateSettings, *, generation_prompt: bool = False
    ) -> str:
        """Return the conversation as text. If the template fails, DataError with its error message is
        raised."""
        options = {"tools": settings.tools, "add_generation_prompt": generation_prompt, "tokenize": False}
        return self._guard(lambda: self.hf.apply_chat_template(list(messages), **options, **settings.variables or {}))

    def check_rendered(self, text: str, messages: Sequence[Message], settings: TemplateSettings) -> Counter:
        """Check that `text`, rendered from `messages`, holds all of them; return counts of what the template
        omits by design.

        Raises DataError if anything else is missing.
        """
        return self._check(messages, text, lambda altered: self.render(altered, settings), settings.tools)

    def render_generations(self, messages: Sequence[Message], settings: TemplateSettings) -> tuple[str, list[Span]]:
        """Return (text, character ranges that the template marks as written by the model).

        Adjacent ranges are joined.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = self._guard(
            lambda: render_jinja_template(
                conversations=[list(messages)],
                tools=settings.tools,
                chat_template=self.hf.get_chat_template(None, settings.tools),
                return_assistant_tokens_mask=True,
                **{**self.hf.special_tokens_map, **(settings.variables or {})},
            )
        )
        spans: list[Span] = []
        for start, end in marks[0]:
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            elif start < end:
                spans.append((start, end))
        return texts[0], spans

    def encode(
        self, texts: Sequence[str], *, special: bool = False, ranges: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, for each text, (token ids [n] int32, the range of characters of each token [n, 2]).

        ranges: False returns no ranges, which is faster.
        special: let the tokenizer add its own special tokens, as for plain text; a template writes them
          itself.
        """
        backend = self.hf.backend_tokenizer
        encode = backend.encode_batch if ranges else backend.encode_batch_fast
        pairs = []
        for encoding in encode(list(texts), add_special_tokens=special):
            offsets = np.asarray(encoding.offsets if ranges else [], dtype=np.int64).reshape(-1, 2)
            # White space that a tokenizer leaves out of its ranges belongs to the following token
            offsets[1:, 0] = np.minimum(offsets[1:, 0], np.maximum.accumulate(offsets[:-1, 1]))
            pairs.append((np.asarray(encoding.ids, dtype=np.int32), offsets))
        return pairs

    def ends_with_stop_token(self, text: str, last: Message) -> bool:
        """Return whether a rendered text ends with a stop token: the eos_token or an added token that the
        template wrote (as in TRL).

        last: the last message of the text. An added token that ends this message itself, such as `</think>`,
          does not count.
        """
        bare, eos = text.rstrip(), self.hf.eos_token
        if eos and bare.endswith(eos):
            return True
        message_ends = tuple(part.strip() for part in message_texts(last) if part.rstrip().endswith(self.added))
        return bare.endswith(self.added) and not bare.endswith(message_ends)

    def require_eos(self) -> int:
        """Return the id of the eos_token. Raises DataError if the tokenizer has none."""
        if self.eos is None:
            raise DataError(
                "the text does not end in a stop token, and the tokenizer has no eos_token to add; set one in "
                "tokenizer_config.json"
            )
        return self.eos

    def check_single_bos(self, text: str, *, special: bool) -> None:
        """Raise DataError if a document would begin with two bos tokens. special: as in `encode`."""
        bos = self.hf.bos_token
        if not bos:
            return
        begins = re.escape(bos) + r"\s*" + ("" if special and self.adds_bos else re.escape(bos))
        if re.match(r"\s*" + begins, text):
            raise DataError(f"begins with {bos} twice; remove one from the data or the template")

    def fingerprint(self) -> str:
        """Return the hex SHA-256 of the tokenizer and its template."""
        parts = [self.hf.backend_tokenizer.to_str(), json.dumps(self.hf.chat_template, sort_keys=True)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _guard(self, work):
        try:
            with render_limit():
                return work()
        except RenderTimeout as problem:
            raise DataError(f"the chat template fails: {problem} ({self.source})") from None
        except Exception as problem:  # a template is a program: it can raise anything
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise DataError(f"the chat template fails: {reason}") from None


def load_chat_tokenizer(path: str, template_file: str | None = None, day: date | None = None) -> ChatTokenizer:
    """Load a tokenizer from a folder, or by its name on the HuggingFace hub. Raises DataError if that fails.

    template_file: a chat template that replaces the tokenizer's own. day: today's date for the template.
    """
    missing = DataError("chat templates need the transformers package (pip install transformers)")
    transformers = import_optional("transformers", missing)
    local = Path(path).exists()
    if not local and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise DataError(f"{path}: no such folder (--tokenizer-path)")
    try:
        hf = transformers.AutoTokenizer.from_pretrained(path, local_files_only=local)
    except Exception as problem:  # the library raises the exceptions of its many parsers
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        finding = (
            "no tokenizer of transformers" if local else "neither a folder here nor available from the HuggingFace hub"
        )
        raise DataError(
            f"{path}: {finding} ({reason}); --tokenizer-path takes a folder, or a name while online"
        ) from None
    template = None if template_file is None else read_template(template_file)
    return ChatTokenizer(hf, day or date.today(), template, template_file)


def read_template(file: str) -> str:
    """Return the content of the file that --chat-template names. Raises DataError if it cannot be read."""
    if not Path(file).is_file():
        raise DataError(f"{file}: no such file (--chat-template)")
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{file}: cannot be read ({problem}) (--chat-template)") from None


def _freeze(template: str, day: date) -> str:
    """Return the template with every call `strftime_now("...")` replaced by its result on `day`."""
    try:
        check_operations(template)
    except ValueError as problem:
        raise DataError(f"the chat template cannot be used: {problem}") from None
    frozen = _NOW.sub(lambda call: json.dumps(day.strftime(call[2])), template)
    if "strftime_now(" in frozen:
        raise DataError("the chat template must call strftime_now with a quoted format: else its date cannot be frozen")
    return frozen
