"""Lists the corpora that GPT-NeoX's prepare_data.py knows by name with their URLs, and downloads them.

Many of these URLs are dead or contested by now. A file that you put into `<data-dir>/<name>/` yourself is
used instead of a download.
"""

import re
from collections.abc import Callable
from pathlib import Path

from megatron.data import DataError
from megatron.data.downloads import DownloadError, download

GPT2_VOCAB = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json"
GPT2_MERGES = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt"

_EAI = "http://eaidata.bmk.sh/data"
_EYE = "https://the-eye.eu/public/AI"
_PARTS = f"{_EYE}/pile_preliminary_components"

# URL of the raw data by the name of the corpus; {00..29} stands for numbered parts
SOURCES = {
    "arxiv": f"{_PARTS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz",
    "books1": f"{_PARTS}/books1.tar.gz",
    "books3": f"{_PARTS}/books3.tar.gz",
    "c4": "https://huggingface.co/datasets/allenai/c4/resolve/main/en/c4-train.{00000..01023}-of-01024.json.gz",
    "c4_openwebtext": "https://the-eye.eu/eleuther_staging/c4/realnewslike/c4-train.{00000..00511}-of-00512.json.gz",
    "enron": f"{_EAI}/enron_emails.jsonl.zst",
    "enwik8": "https://data.deepai.org/enwik8.zip",
    "europarl": f"{_PARTS}/EuroParliamentProceedings_1996_2011.jsonl.zst",
    "freelaw": f"{_PARTS}/FreeLaw_Opinions.jsonl.zst",
    "github": f"{_EAI}/github_small.jsonl.zst",
    "hackernews": f"{_PARTS}/hn.tar.gz",
    "nih": f"{_PARTS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst",
    "openwebtext2": f"{_PARTS}/openwebtext2.jsonl.zst.tar",
    "pile": f"{_EYE}/pile/train/{{00..29}}.jsonl.zst",
    "pile_subset": f"{_EYE}/pile/train/00.jsonl.zst",
    "pubmed": f"{_PARTS}/PMC_extracts.tar.gz",
    "stackexchange": f"{_PARTS}/stackexchange_dataset.tar",
    "ubuntu_irc": f"{_PARTS}/ubuntu_irc_until_2020_9_1.jsonl.zst",
    "youtube_subtitles": f"{_PARTS}/yt_subs.jsonl.zst",
}


def __getattr__(name: str) -> str:
    """Raises ImportError for names that GPT-NeoX's module has but this module lacks; says what replaces them.

    For other names it raises AttributeError, whose message `from ... import` would replace by its own.
    """
    if name in ("DATA_DOWNLOADERS", "prepare_dataset"):
        raise ImportError(
            f"{name}: does not exist in this project; use SOURCES of {__name__}, which prepare_data.prepare downloads"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parts(address: str) -> list[str]:
    """Expands a URL that contains numbers such as {00..29} into one URL per number."""
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", address)
    if numbers is None:
        return [address]
    first_number, last_number = numbers.groups()
    return [
        address.replace(numbers[0], f"{n:0{len(first_number)}}") for n in range(int(first_number), int(last_number) + 1)
    ]


def fetch(address: str, target: Path, mirror: str | None, report: Callable[[str], None]) -> None:
    """Downloads the file at the URL `address` to `target`, which appears only when it is complete.

    mirror: URL of a folder that has the file under the same name, used instead. report: called with a line of
    text when the download starts, and as it goes on. Raises DataError if it fails."""
    if mirror:
        address = f"{mirror.rstrip('/')}/{address.rsplit('/', 1)[1]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    report(f"{address} -> {target}")
    try:
        download(address, target, report)
    except DownloadError as problem:
        raise DataError(
            f"{problem}; put the file at {target} by other means, or name another folder that holds it with "
            "--mirror URL"
        ) from None
