"""Write docs/reference.md: every public name at the path that users import, with its purpose; the site adds the docstrings.

    python tools/api_reference.py [--check] [--out FILE]

`--check` writes nothing and ends with status 1 if the file is not what would be written.
"""

import argparse
import functools
import importlib
import inspect
import pathlib
import re
import sys
from typing import Any

from accelerate import extension

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"

# Section -> the module that users import from -> names. Those of `accelerate` itself are all here: a test compares.
SECTIONS: dict[str, dict[str, str]] = {
    "Training": {"accelerate": "Accelerator PartialState", "accelerate.state": "AcceleratorState GradientState"},
    "What prepare returns": {
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate": "skip_first_batches",
        "accelerate.extensions.ema.averages": "Ema",
        "accelerate.data_loader": "TokenBudgetSampler PackingCollator",
    },
    "Strategies": {
        "accelerate": "FullyShardedDataParallelPlugin DeepSpeedPlugin ParallelismConfig DistributedType",
        "accelerate.utils": "TorchTensorParallelConfig TorchContextParallelConfig DeepSpeedSequenceParallelConfig TorchDynamoPlugin",
        "accelerate.local_sgd": "LocalSGD",
    },
    "Settings": {
        "accelerate": "DataLoaderConfiguration AutocastKwargs DistributedDataParallelKwargs DDPCommunicationHookType "
        "GradScalerKwargs InitProcessGroupKwargs ProfileKwargs",
        "accelerate.utils": "ProjectConfiguration GradientAccumulationPlugin AORecipeKwargs TERecipeKwargs",
        "accelerate.extensions.replicas.settings": "FaultToleranceKwargs",
        "accelerate.extensions.replicas.replicas": "Replicas",
    },
    "Collectives and tensors": {
        "accelerate.utils": "gather gather_object reduce broadcast broadcast_object_list pad_across_processes send_to_device "
        "concatenate find_batch_size wait_for_everyone",
    },
    "Randomness": {"accelerate": "synchronize_rng_states", "accelerate.utils": "set_seed"},
    "Memory": {
        "accelerate": "find_executable_batch_size",
        "accelerate.utils": "release_memory",
    },
    "Checkpoints": {
        "accelerate.checkpointing": "save_accelerator_state load_accelerator_state save_custom_state load_custom_state",
        "accelerate.utils": "merge_fsdp_weights save load",
        "accelerate.checkpoint.manifest": "DamagedCheckpoint",
        "accelerate.checkpoint.ranks": "CollectiveMisuse",
        "accelerate.extensions.preemption.watch": "Preempted",
        "accelerate.extensions.checks.replicas": "ReplicasDiffer",
    },
    "Big models": {
        "accelerate": "init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model dispatch_model "
        "infer_auto_device_map cpu_offload cpu_offload_with_hook disk_offload",
        "accelerate.utils": "get_balanced_memory load_and_quantize_model BnbQuantizationConfig",
        "accelerate.hooks": "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules",
    },
    "Inference": {"accelerate": "prepare_pippy"},
    "Launching from Python": {
        "accelerate": "notebook_launcher debug_launcher",
        "accelerate.commands.launch": "launch_command launch_command_parser",
        "accelerate.utils": "write_basic_config",
    },
    "Trackers and logs": {
        "accelerate.tracking": "GeneralTracker",
        "accelerate.logging": "get_logger",
        "accelerate": "is_rich_available",
    },
    "A strategy of your own": {
        "accelerate.config.strategies": "StrategySpec register",
        "accelerate.strategies.base": "Strategy",
        "accelerate.strategies.state_io": "StateIO",
    },
    "An extension of your own": {"accelerate.extension": "Extension Spec Extensions"},
    "A device of your own": {"accelerate.devices": "Device register"},
}
HEAD = """\
# Reference

<!-- Written by tools/api_reference.py: change that, or the docstrings, then run it again. -->

Public names at the paths that programs import, by subject. On the site each has its signature, arguments, errors and an example below
the table; on GitHub the tables stand alone, and the docstrings are in
[src/accelerate](https://github.com/{address}/tree/main/src/accelerate). `accelerate.__version__` is the version.
"""


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of each module of the package."""
    files = sorted((ROOT / "src" / "accelerate").rglob("*.py"))
    return {".".join(file.relative_to(ROOT / "src").with_suffix("").parts): file.read_text("utf-8") for file in files}


def home(value: Any, name: str) -> str:
    """Return the path at which a name is defined, which is where the site reads its docstring.

    Classes name the module that users import them from as their own, so the definition is looked for in the sources.

    Raises:
        ValueError: There are several definitions, and the value does not say which is its own.
    """
    defined = re.compile(rf"^(?:class|def) {re.escape(name)}\b", re.M)
    modules = [module for module, text in sources().items() if defined.search(text)]
    if len(modules) > 1:
        modules = [module for module in modules if getattr(importlib.import_module(module), name, None) is value]
    if len(modules) != 1:
        raise ValueError(f"{name} is defined in {len(modules)} places; give it one name, or leave it off the page.")
    return f"{modules[0]}.{name}"


def page() -> str:
    """Return the text of the page."""
    sys.path.insert(0, str(ROOT / "tools"))
    set_owner = importlib.import_module("set_owner")
    parts = [HEAD.format(address=set_owner.current(ROOT))]
    for section, modules in SECTIONS.items():
        rows, blocks = ["| name | import from | purpose |", "|---|---|---|"], []
        for module, names in modules.items():
            for name in names.split():
                value = getattr(importlib.import_module(module), name)
                rows.append(f"| `{name}` | `{module}` | {purpose_of(value, f'{module}.{name}')} |")
                options = f"    options:\n      heading: {module}.{name}\n"
                blocks.append(f"::: {home(value, name)}\n{options}")
        parts.append(f"## {section}\n\n" + "\n".join(rows) + "\n\n" + "\n".join(blocks))
    return "\n".join([*parts, methods()])


def methods() -> str:
    """Return the section of the public methods and attributes that extensions add to the Accelerator."""
    rows, blocks = ["| name | extension | purpose |", "|---|---|---|"], []
    for spec in extension.specs():
        for name, address in (*spec.methods.items(), *spec.attributes.items()):
            if name.startswith("_"):
                continue
            rows.append(f"| `Accelerator.{name}` | {spec.name} | {purpose_of(extension.imported(address), address)} |")
            options = f"    options:\n      heading: Accelerator.{name}\n"
            blocks.append(f"::: {address.replace(':', '.')}\n{options}")
    text = "Each is a method of the Accelerator, whose first argument is `self`."
    return f"## Methods of extensions\n\n{text}\n\n" + "\n".join(rows) + "\n\n" + "\n".join(blocks)


def purpose_of(value: Any, address: str) -> str:
    """Return the first paragraph of a docstring, without its contract, as a cell of a table; ValueError without one."""
    purpose = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    if not purpose:
        raise ValueError(f"{address} has no docstring; its first sentence belongs on the page.")
    return purpose.removesuffix(" Not a collective.").replace("``", "`")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page is not up to date")
    parser.add_argument("--out", type=pathlib.Path, default=PAGE, help="the file; docs/reference.md by default")
    args = parser.parse_args()
    text = page()
    if args.check:
        if args.out.read_text("utf-8") == text:
            return 0
        print("docs/reference.md is not up to date: run python tools/api_reference.py", file=sys.stderr)
        return 1
    args.out.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
