"""Removes passwords, tokens and other secrets from URLs, for messages, pages and files."""

import re

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


def _redacted(match: re.Match[str]) -> str:
    scheme, user, place, fragment = match["scheme"], match["user"] or "", match["place"], match["fragment"] or ""
    if ":" in user or scheme.lower() in _WEB:
        user = ""
    return f"{scheme}://{user}{place}{'' if '=' in fragment else fragment}"
