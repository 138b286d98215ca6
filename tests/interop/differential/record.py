"""Writes tests/architecture/record/values-1.15.0.json from a run on the wheel: modules, bases, members, fields, returned types, words.

PYTHONPATH=tests:.cache/peer/1.15.0 python -m interop.differential.record
"""

import collections
import importlib
import json

from architecture import check_api
from interop.differential import core

FILE = check_api.RECORD / "values-1.15.0.json"


def statics():
    """Return the values of every recorded definition of the package that Python finds."""
    found = {}
    for definition in check_api.load("accelerate-1.15.0.json")["definitions"]:
        module, _, name = definition.partition(":")
        if "<" not in name:  # the record holds one lambda
            found[definition] = check_api.values_of(getattr(importlib.import_module(module), name))
    return found


def returned(result):
    if isinstance(result, dict):
        return next(iter(result))
    return (
        result.partition(" ")[0] if isinstance(result, str) and result.startswith("object ") else type(result).__name__
    )


def learnt(results):
    """Return for each probed function which types it returned, and which words each string parameter accepted."""
    found = collections.defaultdict(dict)
    for item in core.load():
        if len(item.covers) != 1:  # whose result it is depends on the case
            continue
        entry = found[item.covers[0]]
        for name, makers in item.cases():
            result = results.get(name, {"raises": []})
            if isinstance(result, dict) and "raises" in result:
                continue
            entry["returns"] = sorted({*entry.get("returns", ()), returned(result)})
            for axis, values in item.axes.items():
                if isinstance(values, core.Words):
                    words = entry.setdefault("words", {}).setdefault(axis, [])
                    words += [word] if isinstance(word := makers[axis](), str) and word not in words else []
    return {definition: entry for definition, entry in found.items() if entry}


def _with(before, now):
    """Return types, or words by parameter, of two runs."""
    if isinstance(before, dict):
        return {name: _with(before.get(name, []), now.get(name, [])) for name in before | now}
    return sorted({*before, *now})


def main():
    dynamic = learnt(core.execute(1, whole=True))
    record = {definition: {**values, **dynamic.get(definition, {})} for definition, values in statics().items()}
    for definition, entry in check_api.load(FILE.name).items():  # what earlier probes have seen stays
        for name in ("returns", "words"):
            if name in entry:
                record[definition][name] = _with(entry[name], record[definition].get(name, type(entry[name])()))
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
