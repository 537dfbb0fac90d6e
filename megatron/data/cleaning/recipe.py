"""What is done to each document by itself, in this order: repairs, language, rules, personal data,
contamination."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from megatron.data.cleaning.c4 import C4, FineWeb
from megatron.data.cleaning.decontamination import Contamination
from megatron.data.cleaning.gopher import GopherQuality, GopherRepetition
from megatron.data.cleaning.language import Language, LanguageIdentifier
from megatron.data.cleaning.normalization import NORMALIZATIONS, mask_personal
from megatron.data.cleaning.words import Document, Splitter
from megatron.data.errors import DataError

Rule = GopherQuality | GopherRepetition | C4 | FineWeb
RULES: dict[str, type[Rule]] = {
    "gopher-repetition": GopherRepetition,
    "gopher-quality": GopherQuality,
    "c4": C4,
    "fineweb": FineWeb,
}
"""By the words of --recipe; gopher stands for both of its two, in this order."""
_SEVERAL = {"gopher": ("gopher-repetition", "gopher-quality")}


@dataclass(frozen=True)
class Recipe:
    """normalize: of NORMALIZATIONS. rules: by name, in the order in which they are asked. word_language:
    whose rules of spaCy split words. decontaminate: words of a run that evaluation sets share with no
    document."""

    normalize: tuple[str, ...] = tuple(NORMALIZATIONS)
    language: Language | None = None
    rules: tuple[tuple[str, Rule], ...] = ()
    word_language: str = "en"
    mask_personal: bool = False
    decontaminate: int | None = None


@dataclass
class Edits:
    """What was changed in documents that stay or go, counted. documents: by what changed them; lines: taken
    out, by reason; languages: found; personal: addresses replaced."""

    documents: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    personal: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The counts by their names."""
        return {
            "documents_changed": dict(self.documents), "lines_removed": dict(self.lines),
            "languages": dict(self.languages), "addresses_replaced": self.personal,
        }  # fmt: skip


class Cleaner:
    """A recipe in a process, with all that it needs in memory. evaluation: the folder of the runs of
    evaluation sets; sets: their names. Raises DataError for a package that is missing."""

    def __init__(self, recipe: Recipe, evaluation: Path | None = None, sets: Sequence[str] = ()) -> None:
        self._recipe, self._sets = recipe, sets
        self._repairs = [(name, NORMALIZATIONS[name]) for name in NORMALIZATIONS if name in recipe.normalize]
        self._splitter = Splitter(recipe.word_language) if recipe.rules else None
        self._language = LanguageIdentifier(recipe.language) if recipe.language is not None else None
        self._contamination = None
        if recipe.decontaminate is not None and evaluation is not None:
            self._contamination = Contamination(evaluation, recipe.decontaminate)

    def clean(self, text: str, edits: Edits) -> tuple[str, str | None]:
        """The text as it is to be kept, and the reason to drop it, as `c4/too_few_sentences`; None to keep
        it."""
        for name, repair in self._repairs:
            before, text = text, repair(text)
            edits.documents[name] += before != text
        if self._language is not None and (reason := self._language.check(text, edits.languages)) is not None:
            return text, f"language/{reason}"
        if self._splitter is not None:
            document = Document(text, self._splitter)
            for name, rule in self._recipe.rules:
                if isinstance(rule, C4):
                    reason, text = rule.check(document, edits.lines)
                    if text != document.text:
                        edits.documents[name] += 1
                        document = Document(text, self._splitter)
                else:
                    reason = rule.check(document)
                if reason is not None:
                    return text, f"{name}/{reason}"
        if not text.strip():
            return text, "empty/empty"
        if self._recipe.mask_personal:
            text, count = mask_personal(text)
            edits.personal += count
            edits.documents["personal"] += count > 0
        if self._contamination is not None and (number := self._contamination.set_of(text)) is not None:
            return text, f"contamination/{self._sets[number]}"
        return text, None


def rules_of(names: Sequence[str], settings: Sequence[str] = ()) -> tuple[tuple[str, Rule], ...]:
    """The rules that `--recipe` and `--set` name. settings: RULE.KEY=VALUE, as c4.min_num_sentences=3.

    Raises DataError for a name that is not known, and a value that does not fit.
    """
    wanted = [rule for name in names for rule in _SEVERAL.get(name, (name,))]
    for name in wanted:
        if name not in RULES:
            near = get_close_matches(name, [*RULES, *_SEVERAL], 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join([*_SEVERAL, *RULES])}"
            raise DataError(f"--recipe: no rules {name!r}{hint}")
    if len(set(wanted)) < len(wanted):
        raise DataError(f"--recipe: {', '.join(names)}: the same rules twice")
    changes: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, _, key = path.partition(".")
        if not equals or name not in changes:
            raise DataError(f"--set {setting}: expected RULE.KEY=VALUE, where RULE is one of {', '.join(changes)}")
        changes[name][key] = _value(setting, RULES[name], key, text)
    return tuple((name, RULES[name](**changes[name])) for name in wanted)


def _value(setting: str, rule: type[Rule], key: str, text: str) -> Any:
    defaults = {item.name: item.default for item in dataclasses.fields(rule)}
    if key not in defaults:
        near = get_close_matches(key, defaults, 1)
        raise DataError(f"--set {setting}: no key {key!r}; {near[0] if near else ', '.join(defaults)}?")
    default = defaults[key]
    try:
        value = _tuples(yaml.safe_load(text))
    except yaml.YAMLError:
        raise DataError(f"--set {setting}: {text!r} is no YAML") from None
    fits = type(value) is type(default) or isinstance(default, float) and type(value) is int
    if isinstance(default, int) and not isinstance(default, bool) and type(value) is float:
        fits = key.endswith("length")  # mean lengths have decimals
    if isinstance(default, tuple) and fits:
        fits = all(type(item) is type(default[0]) and (not isinstance(item, tuple) or len(item) == 2) for item in value)
    if not fits:
        raise DataError(f"--set {setting}: expected a value as {default!r}")
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
