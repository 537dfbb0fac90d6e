"""Repairs texts before the cleaning rules see them, and masks personal data."""

import ipaddress
import re
import unicodedata
from collections.abc import Callable
from functools import cache, partial

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

# _CONTROL: the control characters C0 and C1 except tab and line feed, the byte order mark and annotation
# marks. _BREAKS: separators of lines and pages, which become line feeds.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ufff9-\ufffb]")
_BREAKS = re.compile(r"\r\n?|[\x0b\x0c\x1c-\x1e\x85]")


def fix_encoding(text: str) -> str:
    """Repair wrongly decoded text with ftfy, such as "cafÃ©" for "café".

    Curly quotes, full-width characters and ligatures stay as they are, because a model should know them.
    """
    return text if text.isascii() else _ftfy()(text)


@cache
def _ftfy() -> Callable[[str], str]:
    ftfy = import_optional("ftfy", DataError("--normalize ftfy needs the ftfy package: pip install 'neox[clean]'"))
    config = ftfy.TextFixerConfig(
        unescape_html=False, uncurl_quotes=False, fix_character_width=False, fix_latin_ligatures=False,
        fix_line_breaks=False, remove_control_chars=False, remove_terminal_escapes=False, normalization=None,
        explain=False,
    )  # fmt: skip
    return partial(ftfy.fix_text, config=config)


def compose(text: str) -> str:
    """Return the text in Unicode's normal form C (NFC), in which a letter and its accent are one
    character."""
    return unicodedata.normalize("NFC", text)


def remove_control(text: str) -> str:
    """Remove control characters, and replace all line and page separators by line feeds."""
    return _CONTROL.sub("", _BREAKS.sub("\n", text))


NORMALIZATIONS: dict[str, Callable[[str], str]] = {"ftfy": fix_encoding, "control": remove_control, "nfc": compose}
"""The repairs of texts by their names in --normalize, in the order in which they are applied."""

_EMAIL = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}\b")
_IP = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.]*\d)")


def mask_personal(text: str) -> tuple[str, int]:
    """Replace e-mail addresses and public IPv4 addresses by reserved examples (RFC 2606, RFC 5737).

    Returns (text, number of replacements).
    """
    text, emails = _EMAIL.subn("email@example.com", text) if "@" in text else (text, 0)
    addresses = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal addresses
        if not ipaddress.ip_address(match[0]).is_global:
            return match[0]
        addresses += 1
        return "192.0.2.1"

    return _IP.sub(replaced, text), emails + addresses
