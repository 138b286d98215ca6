"""Compare the importable `accelerate` with the recorded interface of accelerate 1.15.0.

    python tests/architecture/check_api.py [--missing] [--module accelerate.state ...] [--json]

Every recorded fact is one point: a module that imports, a name in it, each parameter list, enum member with its value,
dataclass field with its value in an instance, `__module__` and bases of a class, class member, command line option, and each
import that a downstream library makes. `--missing` lists the facts that do not hold. Exit status 0 when all do. A front's
re-export counts as a name; its shape is compared once, at the recorded home.
"""

import argparse
import collections
import dataclasses
import enum
import importlib
import inspect
import json
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

RECORD = pathlib.Path(__file__).resolve().parent / "record"
# Names that a downstream package adds itself, or imports under a guard although 1.15.0 never had them.
NOT_OURS = {("accelerate", "prepare_data_loader"), ("accelerate.utils.fsdp_utils", "_AXOLOTL_EP_PATCHED")}
# Values that differ and are meant to; docs/differences.md says why.
MEANT = {"accelerate.utils.dataclasses.MegatronLMPlugin.context_parallel_size value"}
OPAQUE = "<object>"


@dataclasses.dataclass(frozen=True)
class Fact:
    """One recorded fact and what is wrong with it; `gap` is empty when it holds."""

    scope: str
    subject: str
    gap: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.gap}"


def load(name: str) -> dict[str, Any]:
    """Return one file of the record."""
    return json.loads((RECORD / name).read_text("utf-8"))


def spell(value: object) -> str:
    """Write a default the way the record does: no addresses, no machine."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    text = repr(value)
    if " at 0x" in text or "factory" in text.lower():
        return OPAQUE
    return text.replace(str(pathlib.Path.home()), "~")


def compare_parameters(obj: object, recorded: list[dict[str, str]] | None) -> str:
    """Return the first difference between a callable's parameters and the recorded ones, or an empty string.

    Additional parameters of ours are allowed behind the recorded ones; `self` is recorded only where upstream shows it.
    """
    if recorded is None:
        return ""
    try:
        ours = inspect.signature(obj).parameters
    except (TypeError, ValueError):
        return "has no readable signature"
    position = {name: index for index, name in enumerate(ours)}
    for index, want in enumerate(recorded):
        have = ours.get(want["name"])
        if have is None:
            return f"parameter {want['name']} is missing"
        if want["kind"] == "POSITIONAL_OR_KEYWORD" and (have.kind.name, position[have.name]) != (want["kind"], index):
            return f"parameter {want['name']} cannot be given at position {index + 1}"
        has_default = have.default is not inspect.Parameter.empty
        if has_default != ("default" in want):
            return f"parameter {want['name']} {'has a' if has_default else 'lacks its'} default"
        if has_default and want["default"] not in (OPAQUE, spell(have.default)):
            return f"parameter {want['name']} defaults to {spell(have.default)}, recorded {want['default']}"
    return ""


def enum_facts(scope: str, name: str, cls: type, recorded: dict[str, Any]) -> Iterator[Fact]:
    """One fact a member."""
    ours = {member.name: spell(member.value) for member in cls} if issubclass(cls, enum.Enum) else {}
    for member, value in recorded["members"].items():
        gap = "" if ours.get(member) == value else f"is {ours.get(member, 'missing')}, recorded {value}"
        yield Fact(scope, f"{name}.{member}", gap)


def field_facts(scope: str, name: str, cls: type, recorded: dict[str, Any]) -> Iterator[Fact]:
    """One fact a dataclass field."""
    ours = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    for field, value in recorded["fields"].items():
        gap = ""
        if field not in ours:
            gap = "field is missing"
        elif ours[field].default is not dataclasses.MISSING and not value.startswith("<"):
            default = spell(ours[field].default)
            gap = "" if default == value else f"field defaults to {default}, recorded {value}"
        yield Fact(scope, f"{name}.{field}", gap)


def values_of(obj: Any) -> dict[str, Any]:
    """Return what a definition's signature does not say: where a pickle looks for it, its bases, its members and the values of its fields."""
    found: dict[str, Any] = {"module": obj.__module__}
    if not inspect.isclass(obj):
        return found
    found["bases"] = [base.__name__ for base in obj.__mro__[1:-1]]
    if issubclass(obj, enum.Enum):
        found["members"] = {member.name: [spell(member.value), str(member), repr(member)] for member in obj}
    elif dataclasses.is_dataclass(obj):
        try:
            made = obj()
        except Exception as error:
            found["fields"] = type(error).__name__
        else:
            found["fields"] = {f.name: spell(getattr(made, f.name, "<absent>")) for f in dataclasses.fields(obj)}
    return found


def value_facts(scope: str, name: str, ours: dict[str, Any], recorded: dict[str, Any]) -> Iterator[Fact]:
    """One fact each: the module that a class names, its bases in their order, each member, each field of an instance."""
    if "bases" in recorded:
        gap = "" if ours["module"] == recorded["module"] else f"is of {ours['module']}, recorded {recorded['module']}"
        yield Fact(scope, f"{name}.__module__", gap)
        rest = iter(ours.get("bases", ()))
        missing = [base for base in recorded["bases"] if base not in rest]  # ours may have more between them
        yield Fact(scope, f"{name}.__bases__", f"lacks {missing} in this order" if missing else "")
    for part in ("members", "fields"):
        have, want = ours.get(part), recorded.get(part, {})
        if isinstance(want, str) or isinstance(have, str):
            yield Fact(scope, f"{name}()", "" if have == want else f"without arguments: {have}, recorded {want}")
            continue
        for key, value in want.items():
            found = (have or {}).get(key)
            yield Fact(scope, f"{name}.{key} value", "" if found == value else f"is {found}, recorded {value}")


def class_facts(scope: str, name: str, cls: Any, recorded: dict[str, Any]) -> Iterator[Fact]:
    """The constructor, the fields and the members of a class."""
    if not inspect.isclass(cls):
        yield Fact(scope, name, "is not a class")
        return
    if recorded["kind"] == "enum":
        yield from enum_facts(scope, name, cls, recorded)
        return
    if recorded["kind"] == "dataclass":
        yield from field_facts(scope, name, cls, recorded)
    else:
        gap = compare_parameters(cls, recorded.get("init"))
        yield Fact(scope, f"{name}()", gap)
    for member, shape in recorded.get("members", {}).items():
        try:
            ours = inspect.getattr_static(cls, member)
        except AttributeError:
            yield Fact(scope, f"{name}.{member}", f"{shape['kind']} is missing")
            continue
        function = ours.__func__ if isinstance(ours, (staticmethod, classmethod)) else ours
        gap = compare_parameters(function, shape.get("signature")) if inspect.isfunction(function) else ""
        yield Fact(scope, f"{name}.{member}", gap)


def module_facts(
    path: str, names: dict[str, Any], definitions: dict[str, Any], values: dict[str, Any]
) -> Iterator[Fact]:
    """The module itself, each name in it, and the shape of what it defines."""
    try:
        module = importlib.import_module(path)
    except Exception as error:  # whatever an import raises is the gap to report
        yield Fact(path, path, f"{type(error).__name__}: {error}")
        for name in names:
            yield Fact(path, f"{path}.{name}", "its module does not import")
        return
    yield Fact(path, path)
    for name, home in names.items():
        subject = f"{path}.{name}"
        try:
            ours = getattr(module, name)
        except Exception as error:  # a lazy front imports here, so this may be any error of an import
            yield Fact(path, subject, "is missing" if isinstance(error, AttributeError) else f"raises {error!r}")
            continue
        yield Fact(path, subject)
        if not isinstance(home, str) or not home.startswith(f"{path}:") or home not in definitions:
            continue
        recorded = definitions[home]
        if home in values:
            yield from value_facts(path, subject, values_of(ours), values[home])
        if recorded["kind"] in ("class", "enum", "dataclass"):
            yield from class_facts(path, subject, ours, recorded)
        elif callable(ours):
            yield Fact(path, f"{subject}()", compare_parameters(ours, recorded.get("signature")))


def downstream_facts() -> Iterator[Fact]:
    """Each `from module import name` that a downstream library makes."""
    for entry in load("downstream-usage.json")["imports"]:
        module, name = entry["module"], entry["name"]
        if (module, name) in NOT_OURS or name == "_AXOLOTL_EP_PATCHED":
            continue
        gap = ""
        try:
            found = importlib.import_module(module)
            if name != "<module>" and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except Exception as error:
            gap = f"{type(error).__name__}: {error}"
        yield Fact("downstream", f"{module}.{name} (for {', '.join(entry['used_by'])})", gap)


def option_facts() -> Iterator[Fact]:
    """Each spelling of each option of `accelerate launch`."""
    try:
        from accelerate.commands.launch import launch_command_parser

        ours = {spelling for action in launch_command_parser()._actions for spelling in action.option_strings}
    except Exception:
        ours = set()
    for argument in load("cli-1.15.0.json")["commands"]["launch"]["arguments"]:
        for spelling in argument["options"]:
            yield Fact("launch", f"accelerate launch {spelling}", "" if spelling in ours else "is missing")


def collect(only: list[str] | None = None) -> list[Fact]:
    """Compare everything, or the modules in `only`.

    Args:
        only: module paths; None for the whole record with downstream imports and options.
    """
    record, values = load("accelerate-1.15.0.json"), load("values-1.15.0.json")
    facts: list[Fact] = []
    for path, names in record["modules"].items():
        if only is None or path in only:
            facts += module_facts(path, names, record["definitions"], values)
    if only is None:
        facts += [*downstream_facts(), *option_facts()]
    return [fact for fact in facts if fact.subject not in MEANT]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missing", action="store_true", help="list every fact that does not hold")
    parser.add_argument("--module", nargs="+", metavar="PATH", help="only these modules")
    parser.add_argument("--json", action="store_true", help="counts and gaps a scope, for a program")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    facts = collect(options.module)
    gaps = [fact for fact in facts if fact.gap]
    if options.json:
        scopes: dict[str, dict[str, Any]] = collections.defaultdict(lambda: {"facts": 0, "gaps": []})
        for fact in facts:
            scopes[fact.scope]["facts"] += 1
            scopes[fact.scope]["gaps"] += [str(fact)] if fact.gap else []
        print(json.dumps(scopes))
        return 0
    if options.missing:
        print("\n".join(map(str, gaps)))
    held = len(facts) - len(gaps)
    print(f"interface: {held} of {len(facts)} ({100 * held / max(len(facts), 1):.1f}%), {len(gaps)} gaps")
    return bool(gaps)


if __name__ == "__main__":
    sys.exit(main())
