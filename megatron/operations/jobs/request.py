"""The run to submit, and the changes that remedies add at later tries."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.operations.jobs.remedies import Remedy


@dataclass(frozen=True)
class Request:
    """A run to submit.

    configs: configuration files.
    pairs: `key=value` that override them.
    nodes: None for the site's number.
    watch: number of iterations to wait for.
    retries: maximum number of further tries.
    interval_s: seconds between two checks.
    local: start it on this machine, without a scheduler.
    """

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
    """One submission of a run, with the changes of all remedies so far."""

    pairs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    unset_variables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # nodes

    def with_remedy(self, remedy: Remedy) -> "Attempt":
        """The next submission, with this remedy's changes added."""
        return Attempt(
            (*self.pairs, *remedy.pairs), {**self.environment, **remedy.environment},
            (*self.unset_variables, *remedy.unset_variables), (*self.exclude, *remedy.exclude),
        )  # fmt: skip
