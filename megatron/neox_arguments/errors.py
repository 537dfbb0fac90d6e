"""The one exception of this room, and the collector that lets all problems be told together."""

from collections.abc import Mapping, Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used; one line for each problem, each naming its place and key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self):
        return ConfigError, (self.problems,)


class Problems:
    """Collects problems as lines `a.yml:12: num_layers: expected int, got "twelve"`."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self.origins = origins
        self.lines: list[str] = []
        self.complete = True  # false when a file could not be read: a missing key may stand there

    def origin(self, path: str) -> str | None:
        """Where `path` (dotted) or the nearest section around it was set; None when it is nowhere set."""
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path)

    def add(self, path: str, text: str) -> None:
        """Note a problem of one key."""
        origin = self.origin(path)
        self.lines.append(f"{origin}: {path}: {text}" if origin else f"{path}: {text}")

    def say(self, line: str) -> None:
        """Note a problem that brings its own place."""
        self.lines.append(line)

    def raise_if_any(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)
