"""Counts dropped documents by reason, and keeps some of their texts as examples for the report."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

SAMPLES = 8  # examples kept for each reason
_MAX_SAMPLE_CHARS = 1200  # longer examples are truncated


@dataclass(frozen=True, order=True)
class Sample:
    """An example text for the report: a dropped document, or a piece removed from a document.

    key: the hash of the text. The texts with the smallest keys are kept, so the choice does not depend on the
      number of workers.
    document: for duplicates, the number of the dropped document.
    duplicate_of: for duplicates, the number of the document that is kept instead.
    """

    key: int
    text: str
    document: int | None = None
    duplicate_of: int | None = None


@dataclass
class Account:
    """Counts of read and dropped documents, for one part of the input or for all parts.

    read: number of documents read; chars: number of their characters.
    dropped, dropped_chars: number of dropped documents and of their characters, by reason.
    details: other counts, {name: {reason or step: count}}, such as removed lines.
    samples: example texts of dropped documents and removed pieces, by reason.
    """

    read: int = 0
    chars: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_chars: Counter[str] = field(default_factory=Counter)
    details: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def drop(
        self, reason: str, text: str, key: int, document: int | None = None, duplicate_of: int | None = None
    ) -> None:
        """Count a dropped document under `reason`, and offer its text to `sample` as an example."""
        self.dropped[reason] += 1
        self.dropped_chars[reason] += len(text)
        self.sample(reason, text, key, document, duplicate_of)

    def sample(
        self, reason: str, text: str, key: int, document: int | None = None, duplicate_of: int | None = None
    ) -> None:
        """Keep `text` as an example of `reason` if its key is among the SAMPLES smallest."""
        retained = self.samples.setdefault(reason, [])
        if any(sample.key == key for sample in retained):
            return  # the same text again
        if len(retained) < SAMPLES or key < retained[-1].key:
            excerpt = text if len(text) <= _MAX_SAMPLE_CHARS else f"{text[:_MAX_SAMPLE_CHARS]}…"
            retained.append(Sample(key, excerpt, document, duplicate_of))
            retained.sort()
            del retained[SAMPLES:]

    def detail(self, name: str, counts: Mapping[str, int]) -> None:
        """Add `counts` to the counts in `details[name]`."""
        self.details.setdefault(name, Counter()).update({key: count for key, count in counts.items() if count})

    def add(self, account: "Account") -> None:
        """Add the counts and samples of another account to this one."""
        self.read, self.chars = self.read + account.read, self.chars + account.chars
        self.dropped.update(account.dropped)
        self.dropped_chars.update(account.dropped_chars)
        for name, counts in account.details.items():
            self.detail(name, counts)
        for reason, samples in account.samples.items():
            samples_by_key = {
                sample.key: sample for sample in sorted([*samples, *self.samples.get(reason, [])], reverse=True)
            }
            self.samples[reason] = sorted(samples_by_key.values())[:SAMPLES]

    def as_dict(self) -> dict[str, Any]:
        """Return the account as JSON values; `from_dict` makes an Account of them again."""
        samples = {reason: list(map(astuple, samples)) for reason, samples in self.samples.items()}
        return {**vars(self), "samples": samples}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Account":
        return cls(
            values["read"], values["chars"], Counter(values["dropped"]), Counter(values["dropped_chars"]),
            {name: Counter(counts) for name, counts in values["details"].items()},
            {reason: [Sample(*sample) for sample in samples] for reason, samples in values["samples"].items()},
        )  # fmt: skip
