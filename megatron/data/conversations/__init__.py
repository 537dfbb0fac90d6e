"""Conversations: readers for every format of rows and requests, and their comparison with a chat
template's text.

All that gives a model messages reads them here: training data, prompts, questions, the server.
"""

from megatron.data.conversations.messages import (
    CONVERSATION_COLUMNS,
    Message,
    TemplateSettings,
    conversation,
    message_texts,
    row_conversation,
    row_system,
    template_settings,
    with_system,
)
from megatron.data.conversations.rendered import RenderedCheck
