"""Identifies the language of a text with the model in the py3langid package."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.data.errors import DataError
from megatron.neox_arguments.optional_packages import import_optional

_READ = 2000  # characters of a text that are read; more would seldom change the result


@dataclass(frozen=True)
class Language:
    """Settings of the rule that drops documents in other languages, or of uncertain language.

    languages: ISO 639-1 codes of the languages that are kept, such as en.
    threshold: a document is dropped if the model gives its language a lower probability.
    """

    languages: Sequence[str] = ("en",)
    threshold: float = 0.2


class LanguageIdentifier:
    """Identifies languages with py3langid's model, and says which documents to drop.

    Raises DataError if the package is missing or does not support a language of `rule`.
    """

    def __init__(self, rule: Language) -> None:
        missing = DataError("--language needs the py3langid package: pip install 'neox[clean]'")
        langid: Any = import_optional("py3langid.langid", missing)
        self._rule = rule
        self._model = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        supported = set(self._model.labels)
        unknown = [name for name in rule.languages if name not in supported]
        if unknown:
            raise DataError(
                f"--language {', '.join(unknown)}: py3langid does not support this; use some of "
                f"{', '.join(sorted(supported))}"
            )

    def check(self, text: str, counts: Counter[str]) -> str | None:
        """Return the reason to drop a text, None to keep it; add its language to `counts`."""
        language, probability = self._model.classify(text[:_READ])
        counts[language] += 1
        if language not in self._rule.languages:
            return "other_language"
        return "unsure_language" if probability < self._rule.threshold else None
