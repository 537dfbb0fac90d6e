"""Renders conversations as prompts, with the chat template of the model or of the file `chat_template`."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpointing import find_checkpoint
from megatron.checkpointing.huggingface import HF_SUBFOLDER, find_hf, is_hf, read_companion_files
from megatron.data import DataError
from megatron.data.conversations import Message, RenderedCheck, TemplateSettings, check_characters
from megatron.data.preprocessing.time_limit import RenderTimeout, check_operations, render_limit
from megatron.distributed import World, on_rank_zero
from megatron.generation.batching.requests import RequestError
from megatron.generation.prompts.files import read_key_file
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer import Tokenizer

_ANSWER = "answer"
_END_CHARS = 1000  # of the text after an answer, of which the first token counts; a template may write megabytes
_UNIQUE = "\x02answer\x03"  # a text that is in no conversation


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template in Jinja, which is rendered in the same way as transformers renders it.

    text: the template. tokenizer: the tokenizer whose special tokens the template can use. source: the
        template's file or folder, for error messages.
    """

    text: str
    tokenizer: Tokenizer
    source: str
    _check: RenderedCheck = field(default_factory=RenderedCheck, repr=False, compare=False)
    _check_replies: RenderedCheck = field(default_factory=RenderedCheck, repr=False, compare=False)

    def render(
        self,
        messages: Sequence[Message],
        settings: TemplateSettings = TemplateSettings(),  # noqa: B008 - frozen
        *,
        generation_prompt: bool = True,
        open_end: bool = False,
    ) -> str:
        """Renders a conversation as text. Raises RequestError if the template fails or omits a message.

        generation_prompt: whether to add the text with which an answer begins.
        open_end: whether the last message is the beginning of an answer, so that no end-of-message text
            follows it.
        """

        def render(rendered_messages: Sequence[Message]) -> str:
            return self._render(rendered_messages, settings, generation_prompt, open_end)

        text = render(messages)
        try:
            check_characters(text)
        except DataError as problem:
            raise RequestError(f"{problem} ({self.source})") from None
        self._compare(self._check, messages, text, render, settings.tools)
        return text

    def _compare(self, check: RenderedCheck, *compared: Any) -> None:
        try:
            check(*compared)
        except DataError as problem:
            raise RequestError(f"{problem} ({self.source})") from None

    def _render(
        self, messages: Sequence[Message], settings: TemplateSettings, generation_prompt: bool, open_end: bool
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self.tokenizer
        ids = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
        names: dict[str, Any] = {role: tokenizer.special_tokens.get(-1 if i is None else i) for role, i in ids.items()}
        try:
            check_operations(self.text)
            with render_limit():
                rendered: Any = render_jinja_template(
                    conversations=[[dict(message) for message in messages]],
                    tools=settings.tools,
                    chat_template=self.text,
                    add_generation_prompt=generation_prompt,
                    continue_final_message=open_end,
                    **{role: name for role, name in names.items() if name is not None},
                    **settings.variables or {},
                )
        except RenderTimeout as problem:
            raise RequestError(f"the chat template fails: {problem} ({self.source})") from None
        except Exception as problem:  # a template is a program: it can raise anything
            reason = " ".join(str(problem).split()) or type(problem).__name__
            raise RequestError(f"the chat template raises an error for these messages: {reason}") from None
        return rendered[0][0]

    def tokens(
        self,
        messages: Sequence[Message],
        settings: TemplateSettings = TemplateSettings(),  # noqa: B008 - frozen
    ) -> list[int]:
        """Returns the token ids of a conversation, up to where the model's next answer begins. Raises
        RequestError as `render` does."""
        return self.tokenizer.tokenize_bare(self.render(messages, settings))

    def tokens_after(
        self, messages: Sequence[Message], settings: TemplateSettings, last: int, replies: Sequence[Message]
    ) -> list[int]:
        """Returns the token ids that the template writes between the model's answer to `messages` and its
        next answer.

        They are the end of the answer to `messages`, the `replies` to it, and the text with which the next
        answer begins. Raises RequestError if the template fails or does not render answers verbatim.

        last: the last token of the answer to `messages`. If the template ends answers with this token, the
            result does not repeat it.
        """

        def render(following: Sequence[Message]) -> str:
            conversation = [*messages, {"role": "assistant", "content": _UNIQUE}, *following]
            return self._render(conversation, settings, generation_prompt=True, open_end=False)

        text_above, mark, text_below = render(replies).rpartition(_UNIQUE)
        if not mark or _UNIQUE in text_above:
            raise RequestError(
                "the chat template does not render an earlier answer verbatim exactly once, so the answer's tokens "
                "cannot be located; use another chat_template"
            )
        self._compare(self._check_replies, replies, text_below, render)
        end = self.tokenizer.special_tokens.get(last) or self.tokenizer.detokenize([last])
        bare = text_below.lstrip()
        return self.tokenizer.tokenize_bare(bare.removeprefix(end) if bare.startswith(end) else text_below)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids that end an answer: the tokenizer's end-of-document and EOS tokens, and the special
        token that the template writes after an answer."""
        stop_tokens = {self.tokenizer.eod, self.tokenizer.eos}
        try:
            conversation: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
            text = self.render(conversation, generation_prompt=False)
        except RequestError:
            return tuple(sorted(stop_tokens))
        end = text.rpartition(_ANSWER)[2].lstrip()[:_END_CHARS]
        end_tokens = self.tokenizer.tokenize_bare(end)[:1]
        return tuple(sorted(stop_tokens | {token for token in end_tokens if token in self.tokenizer.special_tokens}))


def find_template(args: NeoXArgs, tokenizer: Tokenizer, carried: Mapping[str, bytes] | None = None) -> ChatTemplate:
    """Returns the chat template: the file `chat_template`, else the template beside `vocab_file`, else the
    loaded model's.

    Raises ConfigError if there is no template, or if its file cannot be read.

    carried: in training, {name: content} of the tokenizer files of the trained model; None: they are read
        from the model's folder.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(["chat templates need the transformers package: pip install 'neox[serve]'"])
    if args.chat_template is not None:
        return ChatTemplate(read_key_file(args, "chat_template"), tokenizer, args.chat_template)
    for source, files in _template_sources(args, carried):
        template = _template_of(files)
        if template is not None:
            return ChatTemplate(template, tokenizer, source)
    raise ConfigError(
        [
            "no chat template was found beside vocab_file or in the loaded model's folder; set chat_template to a "
            "template file"
        ]
    )


def find_shared_template(
    args: NeoXArgs, tokenizer: Tokenizer, world: World, carried: Mapping[str, bytes] | None = None
) -> ChatTemplate:
    """Returns, on every rank, the chat template that `find_template` finds on rank 0. All ranks call it
    together."""

    def find() -> tuple[str, str]:
        template = find_template(args, tokenizer, carried)
        return template.text, template.source

    text, source = on_rank_zero(world, find)
    return ChatTemplate(text, tokenizer, source)


def _template_sources(args: NeoXArgs, carried: Mapping[str, bytes] | None) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    if args.vocab_file is not None:
        vocab = Path(args.vocab_file)
        vocab_folder = vocab if vocab.is_dir() else vocab.parent
        yield str(vocab_folder), read_companion_files(vocab_folder)
    if carried is not None:
        yield "the model that is trained", carried
        return
    source = args.load or args.save
    if source is not None and is_hf(source):
        folders = [find_hf(source)]
    elif source is not None:
        path = find_checkpoint(source, args.iteration)
        folders = [path / HF_SUBFOLDER, path / "tokenizer"]
    else:
        folders = []
    for folder in folders:
        yield str(folder), read_companion_files(folder)


def _template_of(files: Mapping[str, bytes]) -> str | None:
    """Returns the chat template in a tokenizer's files; None if there is none. If there are several
    templates, it returns the one named `default`.

    files: {file name: content}.
    """
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            content: Any = parse_json(files.get(name, b"{}"))
        except ValueError:
            continue
        template = content.get("chat_template") if isinstance(content, dict) else None
        if isinstance(template, list):  # of {name, template}
            template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get(
                "default"
            )
        if isinstance(template, str):
            return template
    return None
