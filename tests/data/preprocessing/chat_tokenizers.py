"""A byte-level BPE trained on the spot, with the control tokens of common chat templates, and rows by it."""

from datetime import date
from functools import cache
from typing import Any

from megatron.data.preprocessing.chat_documents import encode_rows
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import prepare
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer

ASK, ANSWER = {"role": "user", "content": "What does silk cost?"}, {"role": "assistant", "content": "Nine coins."}

ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
TEXT = (
    "The quiet harbour trades copper for silk and salt. What does the lantern cost in winter? "
    'It costs nine coins, or ten in a storm, they say. user assistant system tool 0123456789 {} [] "name": '
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRACKETED = (  # no token of its own, and a blank before the answer that merges with its first word
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@cache
def _trained():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(ADDED), **options)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer.to_str()


def fast_tokenizer(template: str | None = None, **special: str) -> Any:
    """A transformers tokenizer, eos <|im_end|> unless told otherwise."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<|im_end|>"} | special
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), **special)
    hf.chat_template = template
    return hf


def chat_of(hf: Any) -> ChatTokenizer:
    return ChatTokenizer(hf, date(2026, 1, 31))


def chat_tokenizer(template: str | None = CHATML, **special: str) -> ChatTokenizer:
    return chat_of(fast_tokenizer(template, **special))


def encoded(rows: list, chat: ChatTokenizer, **options: Any) -> tuple:
    """The documents of rows, and what is counted of them."""
    chosen = ChatOptions(**options)
    chosen.check()
    return encode_rows([prepare(row, chat, chosen) for row in rows], chat, chosen)


def texts_of(row: Any, chat: ChatTokenizer) -> list[tuple[str, str]]:
    """(whole text, trained text) of each document of a row."""
    trained = [d.ids if d.labels is None else d.labels[d.labels >= 0] for (d,) in row.documents]
    return [(chat.hf.decode(d.ids), chat.hf.decode(ids)) for (d,), ids in zip(row.documents, trained, strict=True)]
