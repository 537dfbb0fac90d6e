"""Defines the options of `tools/datasets/preprocess_data_with_chat_template.py`: how rows become
documents."""

from dataclasses import dataclass

from megatron.data.errors import DataError

OVERLONG = ("refuse", "drop", "truncate_left", "truncate_right", "split")
UNTRAINED = ("refuse", "keep")
SCOPES = ("completion", "all_assistant", "last_turn")


@dataclass(frozen=True)
class ChatOptions:
    """The options that decide how a row of chat data becomes documents.

    keys: the columns to read; each gives its own output files.
    role: the role whose messages are trained.
    scope: one of SCOPES; None: completion after a prompt, else all_assistant.
    mask: label only the model's answers.
    for_rm: label only the last token.
    maps: messages as (role, text with {column}), which replace a column of messages.
    max_length: the most tokens of a document; None: no limit.
    overlong: one of OVERLONG, for longer documents.
    untrained: one of UNTRAINED, for documents without a trained token.
    """

    keys: tuple[str, ...] = ("conversation",)
    role: str = "assistant"
    scope: str | None = None
    mask: bool = True
    for_rm: bool = False
    reward_key: str | None = None
    binary_reward: bool = False
    system: str | None = None
    maps: tuple[tuple[str, str], ...] = ()
    ftfy: bool = False
    max_length: int | None = None
    overlong: str = "refuse"
    untrained: str = "refuse"

    def check(self) -> None:
        """Raise DataError for options that exclude each other."""
        several = len(self.keys) > 1 or self.reward_key is not None
        no_spans = self.for_rm or not self.mask
        for wrong, message in (
            (self.binary_reward and self.reward_key is None, "--binary-reward needs --reward-key"),
            (self.for_rm and not self.mask, "--for-rm and --no-mask exclude each other; leave one out"),
            (
                self.scope is not None and no_spans,
                "--loss-scope and --only-last cannot be used with --for-rm or --no-mask",
            ),
            (
                self.maps and len(self.keys) > 1,
                "--map makes one conversation of each row; give one name in --jsonl-keys",
            ),
            (self.max_length is not None and self.max_length < 2, "--max-length must be at least 2 tokens"),
            (self.overlong != "refuse" and self.max_length is None, f"--overlong {self.overlong} needs --max-length"),
            (
                self.overlong == "split" and several,
                "--overlong split takes one key in --jsonl-keys, and no --reward-key",
            ),
            (
                self.for_rm and self.overlong in ("truncate_right", "split"),
                f"--overlong {self.overlong} cuts off the last token, which --for-rm trains; choose another --overlong",
            ),
        ):
            if wrong:
                raise DataError(message)
