"""Cleans each document by itself, in this order: repairs, language, rules, personal data, contamination."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
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
"""Cleaning rules by their names in --recipe. The name gopher stands for both gopher rules in this order."""
_SEVERAL = {"gopher": ("gopher-repetition", "gopher-quality")}


@dataclass(frozen=True)
class Recipe:
    """Settings of the steps that clean single documents.

    normalize: names of the repairs to apply, from NORMALIZATIONS.
    language: which languages are kept; None: all.
    rules: (name, rule) in the order in which they are applied.
    word_language: the language whose spaCy rules split texts into words.
    mask_personal: replace e-mail addresses and public IP addresses.
    decontaminate: words per n-gram; a document that shares an n-gram with an evaluation set is dropped; None:
      off.
    """

    normalize: tuple[str, ...] = tuple(NORMALIZATIONS)
    language: Language | None = None
    rules: tuple[tuple[str, Rule], ...] = ()
    word_language: str = "en"
    mask_personal: bool = False
    decontaminate: int | None = None


@dataclass
class Edits:
    """Counts of the changes that cleaning made to texts, of kept and dropped documents alike.

    documents: documents changed, by step.
    lines: lines removed, by reason.
    languages: documents by identified language.
    personal: e-mail and IP addresses replaced.
    """

    documents: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    personal: int = 0

    def named_counts(self) -> dict[str, Mapping[str, int]]:
        """Return the counts under the names that they have in metadata.json."""
        return {
            "documents_changed": self.documents, "lines_removed": self.lines, "languages": self.languages,
            "addresses_replaced": {"addresses_replaced": self.personal},
        }  # fmt: skip


class Cleaner:
    """Cleans single documents by a recipe; it loads the models and tables that the recipe needs.

    evaluation: the folder with the n-grams of the evaluation sets. sets: the names of these sets.
    Raises DataError for a missing package.
    """

    def __init__(self, recipe: Recipe, evaluation: Path | None = None, sets: Sequence[str] = ()) -> None:
        self._recipe, self._sets = recipe, sets
        self._repairs = [(name, NORMALIZATIONS[name]) for name in NORMALIZATIONS if name in recipe.normalize]
        self._splitter = Splitter(recipe.word_language) if recipe.rules else None
        self._language = LanguageIdentifier(recipe.language) if recipe.language is not None else None
        self._contamination = None
        if recipe.decontaminate is not None and evaluation is not None:
            self._contamination = Contamination(evaluation, recipe.decontaminate)

    def clean(self, text: str, edits: Edits) -> tuple[str, str | None]:
        """Return (cleaned text, reason to drop it, such as `c4/too_few_sentences`, or None to keep it).

        edits: changes to the text are added to these counts.
        """
        for name, repair in self._repairs:
            original, text = text, repair(text)
            edits.documents[name] += original != text
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
    """Return (name, rule) for each rule in `names`, with thresholds changed as `settings` say.

    names: from --recipe, such as gopher. settings: from --set, RULE.KEY=VALUE such as c4.min_num_sentences=3.
    Raises DataError for an unknown name or an invalid value.
    """
    rule_names = [rule for name in names for rule in _SEVERAL.get(name, (name,))]
    for name in rule_names:
        if name not in RULES:
            suggestions = get_close_matches(name, [*RULES, *_SEVERAL], 1)
            hint = (
                f"; did you mean {suggestions[0]}?"
                if suggestions
                else f"; the rules are {', '.join([*_SEVERAL, *RULES])}"
            )
            raise DataError(f"--recipe: there is no rule {name!r}{hint}")
    if len(set(rule_names)) < len(rule_names):
        raise DataError(
            f"--recipe: {', '.join(names)}: a rule is named twice; name each once (gopher is gopher-repetition and "
            "gopher-quality)"
        )
    changes: dict[str, dict[str, Any]] = {name: {} for name in rule_names}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, _, key = path.partition(".")
        if not equals or name not in changes:
            raise DataError(f"--set {setting}: expected RULE.KEY=VALUE, where RULE is one of {', '.join(changes)}")
        changes[name][key] = _value(setting, RULES[name], key, text)
    return tuple((name, RULES[name](**changes[name])) for name in rule_names)


def _value(setting: str, rule: type[Rule], key: str, text: str) -> Any:
    defaults = {item.name: item.default for item in dataclasses.fields(rule)}
    if key not in defaults:
        suggestions = get_close_matches(key, defaults, 1)
        raise DataError(
            f"--set {setting}: the rule has no key {key!r}; did you mean {' or '.join(suggestions or defaults)}?"
        )
    default = defaults[key]
    try:
        value = _tuples(yaml.safe_load(text))
    except yaml.YAMLError:
        raise DataError(f"--set {setting}: {text!r} is not valid YAML") from None
    is_valid = type(value) is type(default) or isinstance(default, float) and type(value) is int
    if isinstance(default, int) and not isinstance(default, bool) and type(value) is float:
        is_valid = key.endswith("length")  # mean lengths have decimals
    if isinstance(default, tuple) and is_valid:
        is_valid = all(
            type(item) is type(default[0]) and (not isinstance(item, tuple) or len(item) == 2) for item in value
        )
    if not is_valid:
        raise DataError(f"--set {setting}: expected a value of the same type as the default, {default!r}")
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
