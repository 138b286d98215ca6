"""Where models of one seed after the other go, by whichever accelerate is installed: placements.py FOLDER FIRST COUNT"""

import itertools
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import placement_samples as samples
from accelerate.utils import modeling


def in_order(find: Callable[..., list[list[str]]]) -> Callable[..., list[list[str]]]:
    """Return the search for tied parameters with its groups in the model's order; in 1.15.0 they come as out of a set."""

    def found(model: Any, **kwargs: Any) -> list[list[str]]:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return sorted(find(model, **kwargs), key=lambda group: min(map(names.index, group)))

    return found


def result(call: Callable[[], Any]) -> Any:
    """Return what a call returns in a form for JSON, which keeps orders, or the kind of its error."""
    try:
        found = call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return list(map(list, found.items())) if isinstance(found, dict) else found


size_with_ties = modeling.get_module_size_with_ties


class Watched:
    """A function of 1.15.0, watched for a module that it counts more than once, as it does for two ties to one module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.doubled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.function(*args, **kwargs)
        self.doubled |= len(set(found[1])) < len(found[1])
        return found


def uncovered(model: Any, device_map: Any) -> list[str]:
    """Return the tensors that a device map, in the form of `result`, has no device for."""
    if isinstance(device_map, dict):
        return []
    entries = {name for name, _ in device_map}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [name for name, _ in tensors if not entries & {"", *itertools.accumulate(name.split("."), "{}.{}".format)}]


def case(seed: int, confusing: bool) -> dict[str, Any]:
    """Return everything about the placement of one model."""
    model = samples.model(seed, confusing)
    options = samples.arguments(seed, model)
    budgets, no_split = options.pop("max_memory"), options["no_split_module_classes"]
    numerics = {name: options[name] for name in ("dtype", "special_dtypes")}
    balance = {**numerics, "no_split_module_classes": no_split, "low_zero": seed % 3 == 0}
    sizes = modeling.compute_module_sizes(model, **numerics)
    queue = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    whole = [no_split] if isinstance(no_split, str) else no_split or []
    modeling.get_module_size_with_ties = watched = Watched(size_with_ties)
    placed = result(lambda: modeling.infer_auto_device_map(model, **options, max_memory=dict(budgets)))
    return {
        "map": placed,
        "clean": result(lambda: modeling.clean_device_map(dict(placed))),
        "doubled": watched.doubled,
        "uncovered": uncovered(model, placed),
        "balanced": result(lambda: modeling.get_balanced_memory(model, dict(budgets), **balance)),
        "sizes": result(lambda: dict(sizes)),
        "buffers": result(lambda: modeling.compute_module_sizes(model, **numerics, buffers_only=True)),
        "largest": result(lambda: modeling.get_max_layer_size(queue, sizes, whole)),
        "tied": result(lambda: modeling.find_tied_parameters(model)),
        "leaves": result(lambda: modeling.get_module_leaves(modeling.compute_module_sizes(model, **numerics))),
    }


if __name__ == "__main__":
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    confusing = len(sys.argv) > 4
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    modeling.find_tied_parameters = in_order(modeling.find_tied_parameters)
    found = {seed: case(seed, confusing) for seed in range(first, first + count)}
    (folder / "placements.json").write_text(json.dumps(found), "utf-8")
    print(json.dumps({"cases": count}))
