"""Reads conversations from every supported format of rows and requests, and checks what a chat template makes
of them.

Training data, prompts, evaluation questions and the server all read messages with this package.
"""

from megatron.data.conversations.messages import (
    CONVERSATION_COLUMNS,
    Message,
    TemplateSettings,
    check_characters,
    conversation,
    message_texts,
    row_conversation,
    row_system,
    template_settings,
    with_system,
)
from megatron.data.conversations.rendered import RenderedCheck
