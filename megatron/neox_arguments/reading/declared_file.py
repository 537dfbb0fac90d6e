"""Reads a YAML file that is not a run's configuration, such as a site or a pipeline, with the line of each
key.

Checks of the values name these lines."""

from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments.errors import ConfigError, ErrorCollector
from megatron.neox_arguments.reading.yaml_loader import ConfigLoader
from megatron.neox_arguments.values.local_paths import with_home


def read_declared(file: str | Path, origins: dict[str, str], problems: ErrorCollector) -> dict[str, Any]:
    """Returns the mapping in a YAML file, and writes the place `FILE:LINE` of each dotted key into `origins`.

    Dashes in names are kept. Items of lists count from 0 (`stages.data.sources.0.url`). A key that is set
    twice is added to `problems`. Raises ConfigError for a file that cannot be read as a mapping.
    """
    try:
        loader = ConfigLoader(with_home(file).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([f"{file}: expected `key: value` lines"])
        _note_lines(root, str(file), "", origins, problems)
        return dict(loader.construct_document(root))
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file"]) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError([f"{file}: cannot be read: {problem}"]) from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        raise ConfigError([f"{file}:{mark.line + 1 if mark else '?'}: not valid YAML: {problem.problem}"]) from None
    except yaml.YAMLError as problem:
        raise ConfigError([f"{file}: not valid YAML: {' '.join(str(problem).split())}"]) from None


def _note_lines(node: yaml.Node, file: str, prefix: str, origins: dict[str, str], problems: ErrorCollector) -> None:
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            origins[f"{prefix}{i}"] = f"{file}:{item.start_mark.line + 1}"
            _note_lines(item, file, f"{prefix}{i}.", origins, problems)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path, origin = f"{prefix}{key.value}", f"{file}:{key.start_mark.line + 1}"
            if path in origins:
                problems.lines.append(f"{origin}: {path}: already set at {origins[path]}; keep one of them")
            origins[path] = origin
            _note_lines(value, file, f"{path}.", origins, problems)
