"""YAML that others have written: read within bounds, with one error for whatever is wrong in it."""

from collections.abc import Hashable
from typing import Any

import yaml

from tigon.utils.json import escape

LONGEST_NUMBER = 100  # characters, as in JSON
MAX_ITEMS, MAX_DEPTH = 100_000, 50  # of all values; an alias counts as what it stands for
TAG = "tag:yaml.org,2002:"
NUMBERS = {f"{TAG}int", f"{TAG}float"}


def parse_yaml(text: str | bytes, where: object) -> Any:
    """Parses YAML into plain values; raises a ValueError of one line that begins with `where`.

    Its cause may be no YAML, a value that its tag does not fit, a number of too many characters, a
    key that is given twice, or aliases that stand for more values than anybody would write.
    """
    try:
        content = yaml.load(text, _Loader)
        _check_size(content)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        fault = f"is not valid YAML: {line}{escape(error.problem or error.context)}"
        raise ValueError(f"{escape(where)} {fault}") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else escape(reason)
        raise ValueError(f"{escape(where)} is not valid YAML: {reason}") from None
    except _Refused as error:
        raise ValueError(f"{escape(where)}: {error}") from None
    except Exception as error:  # whatever the conversion of a text raises
        raise ValueError(f"{escape(where)} is not valid YAML: {escape(error)}") from None
    return content


class _Refused(ValueError):
    """Says what YAML allows and Tigon does not read."""


class _Loader(yaml.SafeLoader):
    """Loads YAML within limits; merges and keys that stand twice are errors, dates stay text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Constructs a value; _Refused for a number of over LONGEST_NUMBER characters."""
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
            line = node.start_mark.line + 1
            raise _Refused(f"line {line}: a number of {len(node.value)} characters")
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Constructs a dictionary; _Refused for a merge (<<) and a key given twice."""
        lines: dict[Any, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else []:
            line = key.start_mark.line + 1
            if key.tag == f"{TAG}merge":  # a few lines of it could merge millions of keys
                raise _Refused(f"line {line}: << is not read: write out what it would merge")
            name = self.construct_object(key)
            if not isinstance(name, Hashable):  # which is an error below
                continue
            if name in lines:
                raise _Refused(f"line {line}: {escape(name)} is also set in line {lines[name]}")
            lines[name] = line
        return super().construct_mapping(node, deep=deep)


# No setting is a date, and a chat template's variable is to be the text that was written
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != f"{TAG}timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _check_size(content: Any) -> None:
    """Raises _Refused for more than MAX_ITEMS values, or values more than MAX_DEPTH deep."""
    left, count = [(content, 0)], 0
    while left:
        value, depth = left.pop()
        count += 1
        if count > MAX_ITEMS or depth > MAX_DEPTH:
            raise _Refused("its values are too many, or too deep inside each other")
        inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        if isinstance(inside, list | tuple | set):
            left += [(item, depth + 1) for item in inside]
