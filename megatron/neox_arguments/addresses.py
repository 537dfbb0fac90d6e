"""Removes passwords, tokens and other secrets from URLs, for messages, pages and files."""

import re
from collections.abc import Mapping
from typing import Any

_URL = re.compile(
    r"\b(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/?#'\"<>]*@)?(?P<place>[^\s?#'\"<>]*)"
    r"(?P<query>\?[^\s#'\"<>]*)?(?P<fragment>#[^\s'\"<>]*)?"
)
_WEB = ("http", "https", "ftp")


def without_secrets(text: str) -> str:
    """Returns the text with user, password, query and `key=value` fragments removed from its URLs.

    Queries of presigned URLs contain signatures, whose names differ by service, so the full query is removed.
    A user without a password is kept except in http, https and ftp, because it may name a place:
    `abfs://container@account`.
    """
    return _URL.sub(_redacted, text) if "://" in text else text


def without_secrets_inside(value: Any) -> Any:
    """Returns a tree of mappings and lists without the secrets of its URLs. Tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_secrets_inside(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets_inside(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def _redacted(match: re.Match[str]) -> str:
    scheme, user, place, fragment = match["scheme"], match["user"] or "", match["place"], match["fragment"] or ""
    if ":" in user or scheme.lower() in _WEB:
        user = ""
    return f"{scheme}://{user}{place}{'' if '=' in fragment else fragment}"
