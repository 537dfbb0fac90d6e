"""A byte-level BPE trained on the spot, with the control tokens of common chat templates."""

from datetime import date
from functools import cache
from typing import Any

from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer

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
PLAIN = (  # no token of its own, and a blank before the answer that merges with its first word
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@cache
def _trained():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(ADDED), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer.to_str()


def fast_tokenizer(template: str | None = None, **special: str) -> Any:
    """A transformers tokenizer, eos <|im_end|> unless told otherwise."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<|im_end|>", **special}
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), **special)
    hf.chat_template = template
    return hf


def chat_tokenizer(template: str | None = CHATML, **special: str) -> ChatTokenizer:
    return ChatTokenizer(fast_tokenizer(template, **special), date(2026, 1, 31))
