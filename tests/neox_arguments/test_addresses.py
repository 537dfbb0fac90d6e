"""Addresses in texts that others read: what lets in goes, what names a place stays."""

import pytest

from megatron.neox_arguments import UserError
from megatron.neox_arguments.addresses import without_secrets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://s3.amazonaws.com/b/k.jsonl?X-Amz-Signature=a%2Fb&X-Amz-Date=1", "https://s3.amazonaws.com/b/k.jsonl"),
        ("https://a.blob.core.windows.net/c/f?sv=2024&sig=x", "https://a.blob.core.windows.net/c/f"),
        ("https://storage.googleapis.com/b/o?GoogleAccessId=a&Signature=c", "https://storage.googleapis.com/b/o"),
        ("http://me:p@ss@host:8000/v1", "http://host:8000/v1"),
        ("https://hf_token@huggingface.co/org/x", "https://huggingface.co/org/x"),
        ("s3://key:secret@bucket/run", "s3://bucket/run"),
        ("https://host/callback#access_token=abc", "https://host/callback"),
        ("abfs://container@account.dfs.core.windows.net/run", "abfs://container@account.dfs.core.windows.net/run"),
        (
            "https://github.com/a/b#install, or hf://org/name@main",
            "https://github.com/a/b#install, or hf://org/name@main",
        ),
        ('GET "https://h/a?b=c" failed: is it there?', 'GET "https://h/a" failed: is it there?'),
        ("no address: why? a@b.c", "no address: why? a@b.c"),
    ],
)
def test_what_an_address_shows(text: str, expected: str) -> None:
    assert without_secrets(text) == expected
    assert str(UserError(text)) == expected, "whatever a library put into its message"
