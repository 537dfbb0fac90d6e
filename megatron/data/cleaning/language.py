"""The language of a text by py3langid's model, which comes with the package."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

_READ = 2000  # characters of a text; more seldom changes what is found


@dataclass(frozen=True)
class Language:
    """Documents in other languages, or in none that is sure. languages: of ISO 639-1, as en; threshold: least
    probability by the model."""

    languages: Sequence[str] = ("en",)
    threshold: float = 0.2


class LanguageIdentifier:
    """py3langid's model. Raises DataError where the package is missing or a language is not known to it."""

    def __init__(self, rule: Language) -> None:
        missing = DataError("--language needs the py3langid package: pip install 'neox[clean]'")
        langid: Any = import_optional("py3langid.langid", missing)
        self._rule = rule
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        known = set(self._model.labels)
        unknown = [name for name in rule.languages if name not in known]
        if unknown:
            raise DataError(f"--language {', '.join(unknown)}: py3langid knows {', '.join(sorted(known))}")

    def check(self, text: str, found: Counter[str]) -> str | None:
        """The reason to drop a text; None to keep it. found: counts languages."""
        language, probability = self._model.classify(text[:_READ])
        found[language] += 1
        if language not in self._rule.languages:
            return "other_language"
        return "unsure_language" if probability < self._rule.threshold else None
