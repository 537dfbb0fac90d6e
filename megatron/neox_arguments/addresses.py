"""Addresses (URLs) as messages, pages and files may have them: without what lets others in."""

import re

_URL = re.compile(
    r"\b(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<who>[^\s/?#'\"<>]*@)?(?P<place>[^\s?#'\"<>]*)"
    r"(?P<query>\?[^\s#'\"<>]*)?(?P<fragment>#[^\s'\"<>]*)?"
)
_WEB = ("http", "https", "ftp")


def without_secrets(text: str) -> str:
    """A text whose addresses have no user and password, no query and no fragment with values.

    Queries of presigned addresses are signatures, under names that each service chooses, so all of a query
    goes. A user alone stays where it names a place and no person: `abfs://container@account`.
    """
    return _URL.sub(_shown, text) if "://" in text else text


def _shown(found: re.Match[str]) -> str:
    scheme, who, place, fragment = found["scheme"], found["who"] or "", found["place"], found["fragment"] or ""
    if ":" in who or scheme.lower() in _WEB:
        who = ""
    return f"{scheme}://{who}{place}{'' if '=' in fragment else fragment}"
