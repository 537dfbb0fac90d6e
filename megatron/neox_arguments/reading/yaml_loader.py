"""Loads YAML of configuration files and of `key=value` overrides, with limits on depth and size."""

import re
from typing import Any

import yaml


class ConfigLoader(yaml.SafeLoader):
    """Loads YAML as people expect it: `1e-5` is a number, a date or `12:30` is text.

    Raises yaml.YAMLError with a line for invalid input: values that do not match their tag, too deep nesting,
    and documents that aliases make huge or endless.
    """

    _depth = 0

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None:
            _check_size(root)
        return root

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1  # refused early, because PyYAML's time grows with the square of the depth
        if self._depth > _MAX_DEPTH + 1:
            raise _unreadable(f"nested more than {_MAX_DEPTH} levels deep", self.get_mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            node.value = join_surrogates(node.value)
        except UnicodeDecodeError:
            raise _unreadable(f"{node.value[:40]!r} holds half of a surrogate pair", node.start_mark) from None
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (KeyError, AttributeError, ValueError, TypeError, OverflowError):  # `!!bool x`, an int of 5,000 digits
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            raise _unreadable(f"{str(node.value)[:40]} is not a valid {tag}", node.start_mark) from None


def join_surrogates(text: str) -> str:
    """Returns the text with each surrogate pair (JSON's `\\ud83d\\ude00`) replaced by its character.

    Raises UnicodeDecodeError for half of a pair, which can be neither printed nor written to a file.
    """
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")


_MAX_DEPTH = 50
_MAX_NODES = 1_000_000  # 2,000 data sets with their weights are 4,000


def _unreadable(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _check_size(root: yaml.Node) -> None:
    """Raises yaml.YAMLError if a document is nested too deeply, or is too large once its aliases are
    expanded."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if depth > _MAX_DEPTH or sizes.get(id(node)) == 0:  # 0: the node contains itself
            raise _unreadable(f"nested more than {_MAX_DEPTH} levels deep", node.start_mark)
        if id(node) not in sizes:
            sizes[id(node)] = 0
            inner = node.value
            if isinstance(node, yaml.MappingNode):
                inner = [part for pair in inner for part in pair]
            sizes[id(node)] = 1 + sum(size(part, depth + 1) for part in inner)
        if sizes[id(node)] > _MAX_NODES:
            raise _unreadable(f"with its aliases expanded it has more than {_MAX_NODES:,} values", node.start_mark)
        return sizes[id(node)]

    size(root, 0)


ConfigLoader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("float", "int", "timestamp")
    ]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9_]*)$"), list("-+0123456789")
)
ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?((\d[\d_]*\.\d*|\.\d+)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


class EnvText(str):
    """A text that contains an environment variable's value. It is converted if its key is a number, boolean
    or list."""


ConfigLoader.add_constructor("!environment", lambda loader, node: EnvText(node.value))
