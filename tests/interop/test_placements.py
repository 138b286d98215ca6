"""Device maps, budgets and sizes of random models, beside those of 1.15.0. What differs is a fault there, and is told apart."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import placement_samples as samples
from accelerate.offload.tied import device_of
from interop.programs import PEER, figures

pytestmark = [pytest.mark.slow, pytest.mark.interop]

CASES = 600
# How 1.15.0 fails: where a tied module has a device already, where a budget for an empty device is a float, where indices
# of accelerators are not positions, and where budgets name the disk.
FAULTS = {
    "map": ("IndexError: list index out of range", "AttributeError: 'float' object has no attribute 'upper'"),
    "balanced": ("KeyError: 0", "RuntimeError: Expected one of cpu"),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Return each seed with what this package and 1.15.0 make of it."""
    if not PEER.exists():
        pytest.skip("the peer's environment is not there; `make bench-peer` makes it")
    found = []
    for python, ours in ((sys.executable, True), (str(PEER), False)):
        folder = tmp_path_factory.mktemp("ours" if ours else "peer")
        figures(python, "placements.py", folder, 1, ours, "0", str(CASES))
        found.append(json.loads(Path(folder, "placements.json").read_text("utf-8")))
    return [(int(seed), found[0][seed], found[1][seed]) for seed in found[0]]


def is_fault(kind: str, theirs: Any) -> bool:
    """Say whether 1.15.0 failed, in a way that is known."""
    return isinstance(theirs, dict) and theirs["error"].startswith(FAULTS[kind])


def test_sizes_layers_and_ties(both):
    for seed, ours, theirs in both:
        for what in ("sizes", "buffers", "largest", "tied", "leaves"):
            assert ours[what] == theirs[what], (seed, what)


def test_device_maps(both):
    same = 0
    for seed, ours, theirs in both:
        # A module tied by two weights counts twice there, and ties of tied modules break.
        if is_fault("map", theirs["map"]) or theirs["doubled"] or breaks(theirs):
            continue
        # Buffers of modules that are split, and second names of shared modules, have no device there.
        forgotten = [name for name, _ in ours["map"] if any(is_in(tensor, name) for tensor in theirs["uncovered"])]
        assert [entry for entry in ours["map"] if entry[0] not in forgotten] == theirs["map"], seed
        if not forgotten:
            assert dict(ours["clean"]) == dict(theirs["clean"]), seed
            same += 1
    assert same > CASES / 2


def test_every_tensor_has_one_device_here(both):
    for seed, ours, _ in both:
        assert not ours["uncovered"] and not breaks(ours), seed


def breaks(found: dict[str, Any]) -> bool:
    """Say whether a map gives several devices to one parameter."""
    device_map = {"": None, **dict(found["map"])}
    return any(len({device_of(name, device_map) for name in group}) > 1 for group in found["tied"])


def is_in(tensor: str, name: str) -> bool:
    """Say whether a tensor is, or lies in, what has a name."""
    return tensor == name or tensor.startswith(f"{name}.")


def test_balanced_budgets(both):
    same = 0
    for seed, ours, theirs in both:
        budgets = samples.arguments(seed, samples.model(seed))["max_memory"]
        accelerators = sorted(device for device in budgets if isinstance(device, int))
        holes = accelerators != list(range(len(accelerators))) or not all(budgets[device] for device in accelerators)
        # `low_zero` takes positions for indices there.
        if is_fault("balanced", theirs["balanced"]) or (holes and seed % 3 == 0):
            continue
        assert ours["balanced"] == theirs["balanced"], seed
        same += 1
    assert same > CASES / 2
