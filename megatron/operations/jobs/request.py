"""What is to be submitted, and what is added to it when it is submitted again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.operations.jobs.remedies import Remedy


@dataclass(frozen=True)
class Request:
    """A run to submit: configuration files, `key=value` pairs, nodes (None: the site's), iterations to wait
    for, how often to try again, words for sbatch, seconds between two looks. local: without a scheduler."""

    configs: tuple[str, ...]
    pairs: tuple[str, ...] = ()
    nodes: int | None = None
    watch: int = 50
    local: bool = False
    retries: int = 2
    sbatch_options: tuple[str, ...] = ()
    interval_s: float = 5.0


@dataclass(frozen=True)
class Attempt:
    """One submission of a run: what a remedy has added to it."""

    pairs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # variables that are left out
    exclude: tuple[str, ...] = ()  # nodes

    def with_remedy(self, found: Remedy) -> "Attempt":
        """The next submission."""
        return Attempt(
            (*self.pairs, *found.pairs), {**self.environment, **found.environment}, (*self.without, *found.without),
            (*self.exclude, *found.exclude),
        )  # fmt: skip
