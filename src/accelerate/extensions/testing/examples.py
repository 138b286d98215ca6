"""Compare example scripts with each other: a feature's example must contain the base example."""

import difflib
import pathlib
from collections.abc import Sequence

_PARSED = ("main", "training_function")


def get_function_contents_by_name(lines: Sequence[str], name: str) -> list[str]:
    """Return the lines of "main" or "training_function" of an example script, up to the next one at the left margin.

    Raises:
        ValueError: another name was given.
    """
    if name not in _PARSED:
        raise ValueError(f"name is {name!r}; choose one of {', '.join(_PARSED)}.")
    starts = [number for number, line in enumerate(lines) if line.startswith(f"def {name}")]
    if not starts:
        return []
    body = [lines[starts[0]]]
    for line in lines[starts[0] + 1 :]:
        if line.strip() and not line[0].isspace() and not line.startswith(")"):
            break
        body.append(line)
    return body


def clean_lines(lines: Sequence[str]) -> list[str]:
    """Return lines without comments and empty ones."""
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Return the lines of a feature's example that are neither in the base example nor in a complete example.

    Args:
        base_filename: the base example.
        feature_filename: the example of the feature.
        parser_only: look at `main`, which parses arguments, instead of `training_function`.
        secondary_filename: the complete example, which should hold every feature.

    Returns:
        The lines of the feature that the complete example lacks; without one, all lines of the feature.
    """
    name = "main" if parser_only else "training_function"
    base, feature = (_read(path, name) for path in (base_filename, feature_filename))
    added = _added(base, feature)
    if secondary_filename is None:
        return added
    complete = {line.strip() for line in _added(base, _read(secondary_filename, name))}
    return [line for line in added if line.strip() not in complete]


def _read(filename: str, name: str) -> list[str]:
    lines = pathlib.Path(filename).read_text(encoding="utf-8").splitlines(keepends=True)
    return clean_lines(get_function_contents_by_name(lines, name))


def _added(base: Sequence[str], feature: Sequence[str]) -> list[str]:
    changes = difflib.ndiff([line.strip() for line in base], [line.strip() for line in feature])
    return [change[2:] for change in changes if change.startswith("+ ")]
