"""Imports run downward: the layers of docs/architecture.md, read from the import statements."""

import ast
import functools
import re
from graphlib import TopologicalSorter

import pytest

from accelerate.runtime.run import Run
from architecture import source

# All files are parsed once.
pytestmark = pytest.mark.xdist_group("syntax trees")

# Nothing inside imports from utils, which is on top: only utils.fsdp_utils has a layer, because libraries replace names there.
# A unit is a module or a package with everything below it. A unit imports from lower layers, from itself, and from units
# of its own layer as long as those do not lead back to it. Imports inside functions and for annotations count.
LAYERS: list[str] = [
    "base extension runtime.torch_private",
    "config parallelism_config",
    "runtime.storage runtime.durable runtime.exit devices",
    "comm",
    "runtime.failure runtime.generators runtime.ranks runtime.random runtime.rendezvous "
    "runtime.run runtime.call_site runtime.peers runtime.permutation process state",
    "logging modules precision optimizer scheduler",
    "strategies.mesh strategies.shard strategies.fsdp",
    "data",
    "checkpoint checkpointing utils.fsdp_utils",
    "strategies",
    "training accelerator",
    "local_sgd launch launchers",
    "commands",
    "extensions",
    "test_utils",
    "utils memory_utils",
]
LAYER_OF = {f"accelerate.{unit}": number for number, units in enumerate(LAYERS) for unit in units.split()}
# Re-exports for users: they hold no code, and nothing below layer 10 may import them.
FRONTS = {f"accelerate{front}" for front in ("", ".big_modeling", ".data_loader", ".hooks", ".inference", ".tracking")}
FRONT_LIMIT = 10


def unit_of(module: str) -> str | None:
    """Return the unit a module belongs to: the longest known name that it starts with."""
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        if ".".join(parts[:length]) in LAYER_OF:
            return ".".join(parts[:length])
    return None


@functools.cache
def all_imports() -> list[source.Import]:
    """Return every import of one of our modules by another."""
    return [found for name in source.modules() for found in source.imports(name)]


def test_every_module_has_a_layer():
    packages = {name.rpartition(".")[0] for name in source.modules()}
    homeless = [name for name in source.modules() if unit_of(name) is None and name not in FRONTS]
    # A package that only holds units of different layers (`runtime`) has no code of its own to place.
    homeless = [n for n in homeless if not (n in packages and not source.imports(n))]
    assert not homeless, f"give them a place in LAYERS and in docs/architecture.md: {homeless}"


def test_imports_run_downward():
    upward = []
    for found in all_imports():
        source_unit, target_unit = unit_of(found.source), unit_of(found.target)
        if source_unit is None or target_unit is None or source_unit == target_unit:
            continue
        if LAYER_OF[target_unit] > LAYER_OF[source_unit]:
            upward.append(f"{found.source}:{found.line} (layer {LAYER_OF[source_unit]}) imports {found.target}")
    assert not upward, "\n" + "\n".join(upward)


def test_only_the_outside_imports_fronts():
    # `import accelerate.x` runs `accelerate/__init__`, which is lazy and imports nothing; only naming a front counts.
    wrong = []
    for found in all_imports():
        if found.target not in FRONTS or found.source in FRONTS:
            continue
        unit = unit_of(found.source)
        if unit and LAYER_OF[unit] < FRONT_LIMIT:
            wrong.append(f"{found.source}:{found.line} imports the front {found.target}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_fronts_import_only_below_the_launch_layer():
    wrong = [
        f"{found.source}:{found.line} imports {found.target}"
        for found in all_imports()
        if found.source in FRONTS and (unit := unit_of(found.target)) and LAYER_OF[unit] >= FRONT_LIMIT
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_what_a_step_needs_imports_no_checkpoint():
    loaded, waiting = set(), ["accelerate.strategies.base", "accelerate.strategies.ddp"]
    while waiting:
        name = waiting.pop()
        if name not in loaded:
            loaded.add(name)
            waiting += [found.target for found in source.imports(name) if not found.lazy]
    assert not sorted(name for name in loaded if name.startswith("accelerate.checkpoint"))


def test_private_attributes_of_the_accelerator_are_used_by_the_facade_and_training_alone():
    wrong = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, path in source.modules().items()
        if not name.startswith(("accelerate.accelerator", "accelerate.training", "accelerate.extensions"))
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if ast.unparse(node.value).rpartition(".")[2] == "accelerator" and node.attr not in Run.__annotations__
    ]
    assert not wrong, "what rooms below need is in runtime.run.Run:\n" + "\n".join(wrong)


@pytest.mark.parametrize("of", [str, unit_of], ids=["modules", "units"])
def test_no_import_ring(of):
    # Imports inside functions and for annotations count as well: a ring is a ring, however late it closes.
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        start, goal = of(found.source), of(found.target)
        if start and goal and start != goal:
            graph.setdefault(start, set()).add(goal)
    TopologicalSorter(graph).prepare()  # a CycleError names the ring


def test_the_core_imports_no_extension_by_a_name_that_it_writes_down():
    core = [path for name, path in source.modules().items() if not name.startswith("accelerate.extensions.")]
    named = [
        path
        for path in core
        if re.search(r"import_module\(\s*f?[\"']accelerate\.extensions\.\w", path.read_text("utf-8"))
    ]
    assert len(core) > 150 and not named, (
        "look the extension up in its spec, or in a table of accelerate/extensions/__init__.py"
    )


# Paths of transformers, and of upstream where this package has no file.
_ELSEWHERE = {"commands/menu/", "trainer.py", "trainer_utils.py", "training_args.py"}


def test_the_page_of_the_architecture_names_files_that_exist():
    """A move leaves a page behind that sends readers nowhere."""
    page = (source.SRC.parent / "docs/architecture.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*(?:\.py)?|[a-z_0-9]+\.py)`", page)) - _ELSEWHERE
    below = [path for path in source.SRC.rglob("*") if "__pycache__" not in path.parts]
    paths = {f"/{path.relative_to(source.SRC).as_posix()}" for path in below}
    repository = source.SRC.parent
    lost = [
        name
        for name in sorted(named)
        if not (repository / name).exists() and not any(path.endswith(f"/{name.rstrip('/')}") for path in paths)
    ]
    assert len(named) > 60 and lost == []
