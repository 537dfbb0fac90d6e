"""What became of every document: counts by reason, and samples of what was dropped."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = 8  # of each reason
_SHOWN = 1200  # characters of one


@dataclass(frozen=True, order=True)
class Sample:
    """A dropped document. key: the hash of its text; those with the least are shown, whatever worker saw
    them. document, kept: numbers of it and of the one that stays in its place, for duplicates."""

    key: int
    text: str
    document: int | None = None
    kept: int | None = None


@dataclass
class Account:
    """Of one part or all. read: documents; chars: their characters; dropped, dropped_chars: by reason;
    details: further counts, by name and reason. samples: of documents by reason, and of pieces of texts."""

    read: int = 0
    chars: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_chars: Counter[str] = field(default_factory=Counter)
    details: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def drop(self, reason: str, text: str, key: int, document: int | None = None, kept: int | None = None) -> None:
        """Count a document that goes."""
        self.dropped[reason] += 1
        self.dropped_chars[reason] += len(text)
        self.sample(reason, text, key, document, kept)

    def sample(self, reason: str, text: str, key: int, document: int | None = None, kept: int | None = None) -> None:
        """Keep a text as one of the samples of a reason, if it is one of those with the least keys."""
        known = self.samples.setdefault(reason, [])
        if any(sample.key == key for sample in known):
            return  # the same text again
        if len(known) < SAMPLES or key < known[-1].key:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            known.append(Sample(key, shown, document, kept))
            known.sort()
            del known[SAMPLES:]

    def detail(self, name: str, counts: Mapping[str, int]) -> None:
        """Add further counts."""
        self.details.setdefault(name, Counter()).update({key: count for key, count in counts.items() if count})

    def add(self, other: "Account") -> None:
        """Add those of another part."""
        self.read, self.chars = self.read + other.read, self.chars + other.chars
        self.dropped.update(other.dropped)
        self.dropped_chars.update(other.dropped_chars)
        for name, counts in other.details.items():
            self.detail(name, counts)
        for reason, samples in other.samples.items():
            known = {sample.key: sample for sample in sorted([*samples, *self.samples.get(reason, [])], reverse=True)}
            self.samples[reason] = sorted(known.values())[:SAMPLES]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `of_dict` reads it."""
        return {
            "read": self.read, "chars": self.chars, "dropped": dict(self.dropped),
            "dropped_chars": dict(self.dropped_chars), "details": {name: dict(c) for name, c in self.details.items()},
            "samples": {
                reason: [[one.key, one.text, one.document, one.kept] for one in samples]
                for reason, samples in self.samples.items()
            },
        }  # fmt: skip

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> "Account":
        return cls(
            values["read"], values["chars"], Counter(values["dropped"]), Counter(values["dropped_chars"]),
            {name: Counter(counts) for name, counts in values["details"].items()},
            {reason: [Sample(*one) for one in samples] for reason, samples in values["samples"].items()},
        )  # fmt: skip
