"""Reads, compares and lowers the ceilings: how many lint findings each room and page may have."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

CEILINGS = Path(__file__).with_name("ceilings.toml")
_HEADER = (
    "# Findings that tools/lint/wording.py tolerates, by room or page; without a row, none. `--write` lowers rows.\n"
)

Numbers = Mapping[str, Mapping[str, float]]
"""Numbers of findings by kind, then by room or page; a room or page that is missing has 0."""


def read_ceilings(path: Path) -> Numbers:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def write_ceilings(path: Path, ceilings: Numbers) -> None:
    sections = []
    for kind, places in ceilings.items():
        rows = "".join(f'"{place}" = {number}\n' for place, number in sorted(places.items()) if number)
        sections.append(f"\n[{kind}]\n{rows}")
    path.write_text(_HEADER + "".join(sections), encoding="utf-8")


def exceeded(counts: Numbers, ceilings: Numbers) -> list[tuple[str, str, float, float]]:
    """Returns (kind, room or page, count, ceiling) for each count above its ceiling; a missing ceiling is
    0."""
    return [
        (kind, place, number, ceilings.get(kind, {}).get(place, 0))
        for kind, places in counts.items()
        for place, number in places.items()
        if number > ceilings.get(kind, {}).get(place, 0)
    ]


def too_high(counts: Numbers, ceilings: Numbers) -> list[tuple[str, str, float, float]]:
    """Returns (kind, room or page, count, ceiling) for each ceiling above its count, which must be
    lowered."""
    return [
        (kind, place, counts.get(kind, {}).get(place, 0), ceiling)
        for kind, places in ceilings.items()
        for place, ceiling in places.items()
        if ceiling > counts.get(kind, {}).get(place, 0)
    ]


def lowered(counts: Numbers, ceilings: Numbers) -> Numbers:
    """Returns the ceilings, each lowered to its count if the count is lower."""
    return {
        kind: {place: min(ceiling, counts.get(kind, {}).get(place, 0)) for place, ceiling in places.items()}
        for kind, places in ceilings.items()
    }
