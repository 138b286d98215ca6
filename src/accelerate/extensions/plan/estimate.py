"""`accelerate estimate-memory`: how much memory a model needs, without loading its weights.

The tensors come from the headers of weights on a disk, or from a model on the meta device. `docs/guides/estimate-memory.md` derives
the arithmetic.
"""

import argparse
import importlib
import json
import math
import os
import re
from typing import Any

from accelerate.base.table import table
from accelerate.commands import estimate as public
from accelerate.commands.utils import brief, make_parser, or_exit
from accelerate.extensions.reports.estimator import Layout, resting
from accelerate.extensions.reports.inventory import CONFIG, Inventory, inventory_of_model, inventory_of_path
from accelerate.launch.errors import LaunchError, MissingPackageError

_STRATEGIES = ("ddp", "fsdp", "shard_grad_op", "zero1", "zero2", "zero3")
# Element types that a model can be trained in; half-precision types stand for mixed precision.
_PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}
# How many bytes of an fp32 model one byte of it becomes.
_SHRINKS = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
# Besides its weights, inference needs room for activations, the cache of keys and values, and the library's workspace.
_INFERENCE_FACTOR = 1.2
# The columns of the two tables: keys of the JSON, and headings.
_SIZES = {
    "dtype": "dtype",
    "largest_layer": "Largest Layer",
    "total_size": "Total Size",
    "inference": "Inference",
    "training": "Training using Adam",
}
# A row of the table -> the field of `Memory`.
_PARTS = {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer", "working": "gathered"}
_PARTS["total"] = "total"
_TRAINING = {"strategy": "strategy", "dtype": "dtype", **{part: part.capitalize() for part in _PARTS}}
_LIBRARIES = ("timm", "transformers")


# -- models of the Hub, and configurations -----------------------------------------------------------------------------


class HubError(LaunchError, OSError):
    """A model cannot be had from the Hub."""


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Ask the Hugging Face Hub about a model.

    Args:
        repo: the name of the repository.
        token: an access token.

    Returns:
        The Hub's record of the model; "gated" if its owner must agree first, "repo" if there is none of this name,
        False if the Hub cannot be reached.
    """
    from huggingface_hub import model_info
    from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError

    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return "repo"
    except Exception:  # every failure of the network has its own type
        return False


def check_has_model(error: BaseException) -> str:
    """Return which part of a timm or transformers model could not be loaded.

    Args:
        error: what loading it raised.

    Returns:
        "timm" or "transformers" if the library does not know the model, else "unknown".
    """
    text = str(error).lower()
    if isinstance(error, RuntimeError) and "unknown model" in text:
        return "timm"
    absent = "does not appear to have a file named" in text or "model type" in text
    return "transformers" if isinstance(error, (OSError, ValueError)) and absent else "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name under which timm loads a model from the Hub.

    Args:
        model_name: such as "timm/resnet50" or "resnet50"; only names with an owner live on the Hub.
    """
    return f"hf-hub:{model_name}" if "/" in model_name and not model_name.startswith("hf-hub:") else model_name


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Build a model without memory for its weights.

    Args:
        model_name: a repository on the Hub, a folder with a `config.json`, or such a file.
        library_name: "transformers" or "timm"; None asks the Hub, or the configuration.
        trust_remote_code: let the repository's own code run.
        access_token: a token for the Hub.

    Returns:
        The model, in fp32, on torch's meta device.

    Raises:
        LaunchError: the library is unknown or not installed (also an ImportError), or the model cannot be had (from the Hub, also
            an OSError) or built.

    Example:
        >>> create_empty_model("./bert", "transformers").device  # doctest: +SKIP
        device(type='meta')
        >>> create_empty_model("./bert", "keras")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        accelerate.launch.errors.LaunchError: Models of the library 'keras' cannot be built; ...
    """
    from accelerate.big_modeling import init_empty_weights

    library, content = library_name, {}
    if os.path.exists(model_name):
        content = _configuration(model_name)
        named = "transformers" if content.keys() & {"model_type", "auto_map"} else "timm"
        library = named if library is None else library
    elif library is None:
        library = _library_on_hub(model_name, access_token)
    if library not in _LIBRARIES:
        supported = " or ".join(_LIBRARIES)
        raise LaunchError(f"Models of the library {library!r} cannot be built; --library_name takes {supported}.")
    try:
        package = importlib.import_module(library)
    except Exception as error:  # such as compiled parts for another version of torch
        hint = "Install it, or name a .safetensors file or its index."
        raise MissingPackageError(f"{library} cannot be imported: {brief(error)}. {hint}") from error
    try:
        with init_empty_weights():
            if library == "timm":
                return _timm_model(package, model_name, content)
            return _transformers_model(package, model_name, trust_remote_code, access_token).float()
    except OSError as error:  # of the network, the repository and the cache, as the libraries report them
        raise HubError(f"The configuration of {model_name!r} cannot be loaded: {brief(error)}") from error
    except Exception as error:  # the model's own checks raise anything
        raise LaunchError(f"{model_name!r} cannot be built from its configuration: {brief(error)}") from error


def _configuration(path: str) -> dict[str, Any]:
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    with open(file, "rb") as opened:
        try:
            content = json.load(opened)
        except ValueError as error:
            raise LaunchError(f"{file!r} is no JSON: {error}") from error
    if not isinstance(content, dict) or not content.keys() & {"model_type", "auto_map", "architecture"}:
        entry = "neither model_type (transformers) nor architecture (timm)"
        raise LaunchError(f"{file!r} has {entry}. Name the model's .safetensors file, or add the entry.")
    return content


def _library_on_hub(model_name: str, access_token: str | None) -> str:
    name = model_name.removeprefix("hf-hub:")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise LaunchError(f"There is no file or folder {model_name!r}; a model of the Hub is named owner/name.")
    info = public.verify_on_hub(name, access_token)
    if not info or isinstance(info, str):
        reasons = {
            False: "The Hub cannot be reached: name a local file or folder, or the --library_name of a model in its cache",
            "gated": "It is gated: agree to its terms there, or log in with `hf auth login`",
            "repo": "It is not there, or private: correct the name, or log in with `hf auth login`",
        }
        raise HubError(f"{model_name!r} cannot be had from the Hub. {reasons[info]}.")
    library = getattr(info, "library_name", None)
    if library is None:
        raise LaunchError(f"The Hub does not say which library {model_name!r} is for; give --library_name.")
    return library


def _transformers_model(transformers: Any, name: str, trust_remote_code: bool, token: str | None) -> Any:
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, token=token)
    # The class that the checkpoint was saved from, if it is named: a bare AutoModel would lack the head.
    named = (getattr(transformers, str(name), None) for name in getattr(config, "architectures", None) or ())
    base = transformers.PreTrainedModel  # a configuration may name anything of transformers, and that is called
    classes = [cls for cls in named if isinstance(cls, type) and issubclass(cls, base) and cls is not base]
    if classes:
        return classes[0](config)
    # A repository with its own code may have no bare model.
    autos = [key for key in getattr(config, "auto_map", None) or () if key.startswith("AutoModel")]
    auto = "AutoModel" if "AutoModel" in autos or not autos else autos[0]
    return getattr(transformers, auto).from_config(config, trust_remote_code=trust_remote_code)


def _timm_model(timm: Any, name: str, content: dict[str, Any]) -> Any:
    if not content:
        return timm.create_model(add_timm_hub_prefix(name), pretrained=False)
    options = {"num_classes": content["num_classes"]} if "num_classes" in content else {}
    architecture = content["architecture"]
    if not re.fullmatch(r"[\w.]+", str(architecture)) or not isinstance(architecture, str):
        raise ValueError(f"its architecture is {architecture!r}, and no name of a model of timm, such as 'resnet50'")
    return timm.create_model(architecture, pretrained=False, **options)


def _inventory(args: argparse.Namespace) -> Inventory:
    """Count a model by its weights if they are on this machine, or else by its configuration."""
    name = os.path.expanduser(args.model_name)
    try:
        stored = inventory_of_path(name) if args.library_name is None and os.path.lexists(name) else None
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if stored is not None:
        return stored
    model = create_empty_model(name, args.library_name, args.trust_remote_code)
    return inventory_of_model(model, f"the configuration ({type(model).__name__})")


# -- sizes -------------------------------------------------------------------------------------------------------------


def layout_of(strategy: str, dtype: str, processes: int) -> Layout:
    """Return the layout that a name of `--strategy` stands for."""
    options: dict[str, Any] = {"dp_replicate": processes}
    if strategy in ("fsdp", "shard_grad_op"):
        options = {"dp_shard": processes, "fsdp": True, "reshard": strategy == "fsdp"}
    elif strategy != "ddp":
        options["zero"] = int(strategy.removeprefix("zero"))
    return Layout(precision=_PRECISIONS[dtype], **options)


def training(model: Inventory, dtype: str, strategy: str = "ddp", processes: int = 1) -> dict[str, Any]:
    """Return the bytes that training with Adam needs on the rank with the highest need, without activations.

    "optimizer" has Adam's two moments, and ZeRO's additional fp32 weights. "working" has temporary data of a step:
    half-precision copies, gathered weights, buckets.
    """
    rest = resting(model, layout_of(strategy, dtype, processes))
    sizes = {part: getattr(rest, kind) for part, kind in _PARTS.items()}
    return {"strategy": strategy, "dtype": dtype, "processes": processes, **sizes}


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the four sizes that the recorded interface has for training with Adam.

    Its sum for mixed precision leaves weights and gradients in fp32 out, so `accelerate estimate-memory` does not show it; see
    `training`.

    Args:
        bytes: the size of the weights in fp32.
        mixed_precision: the precision of the computation: "float32", "float16", "bfloat16" or "fp8".
        msamp_config: MS-AMP's level, which has no estimate.

    Returns:
        The bytes of "model", "gradients", "optimizer", and "step"; -1 where there is no estimate.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in ("float16", "bfloat16") or (mixed_precision == "fp8" and msamp_config is None):
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return the sizes of a model in several element types, for what `estimate_command_parser` parsed.

    Returns:
        For each type: its name, the bytes of the largest layer, of the model, and the estimate for training (a mapping as
        of `estimate_training_usage`).

    Raises:
        LaunchError: as in `create_empty_model` and `inventory_of_path`.
    """
    model = _inventory(args)
    return [[dtype, *_loaded(model, dtype), estimate_training_usage(model.size, dtype)] for dtype in args.dtypes]


def _loaded(model: Inventory, dtype: str) -> list[float]:
    """Bytes of the largest layer and of the full model in an element type."""
    return [size if dtype == "float32" else size / _SHRINKS[dtype] for size in (model.largest, model.size)]


def _facts(inventory: Inventory, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is reported of a model, in bytes."""
    dtypes = list(dict.fromkeys(args.dtypes))
    trainable = [dtype for dtype in dtypes if dtype in _PRECISIONS]
    rows = []
    for dtype in dtypes:
        largest, total = _loaded(inventory, dtype)
        needed = training(inventory, dtype)["total"] if dtype in trainable else None
        sizes = map(math.ceil, (largest, total, _INFERENCE_FACTOR * total))
        rows.append(dict(zip(_SIZES, [dtype, *sizes, needed], strict=True)))
    strategies = dict.fromkeys(args.strategy or (["ddp"] if args.num_processes == 1 else _STRATEGIES))
    ranks = args.num_processes
    return {
        "model": args.model_name,
        "source": inventory.source,
        "parameters": sum(item.elements for item in inventory.parameters),
        "sizes": rows,
        "training": [training(inventory, dtype, strategy, ranks) for strategy in strategies for dtype in trainable],
    }


# -- output ------------------------------------------------------------------------------------------------------------


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """Draw a table with box characters, for callers of the recorded interface.

    Args:
        headers: the headings of the columns.
        rows: the rows, as long as `headers`.
        title: the heading of the table.

    Returns:
        The lines, without a final line break.
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # A long title widens the last column.
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
    bars = ["─" * width for width in widths]
    lines = [
        "│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│" for row in cells
    ]
    top = [f"┌{'─'.join(bars)}┐", f"│{title.center(sum(widths) + len(widths) - 1)}│", f"├{'┬'.join(bars)}┤"]
    return "\n".join([*top, lines[0], f"├{'┼'.join(bars)}┤", *lines[1:], f"└{'┴'.join(bars)}┘"])


def estimate_command(args: argparse.Namespace) -> None:
    """Print the sizes of a model as tables, or as JSON, for what `estimate_command_parser` parsed.

    Raises:
        LaunchError: as in `create_empty_model`, or the number of processes is not positive.
    """
    args = argparse.Namespace(**{"num_processes": 1, "strategy": None, "json": False, **vars(args)})
    ranks = args.num_processes
    if ranks < 1:
        raise LaunchError(f"--num_processes is {ranks}; it is the number of ranks, at least 1.")
    facts = _facts(_inventory(args), args)
    if args.json:
        print(json.dumps(facts, indent=1))
        return
    _print(f"Memory Usage for loading `{args.model_name}`", _SIZES, facts["sizes"])
    if facts["training"]:
        where = "one process" if ranks == 1 else f"each of {ranks} processes"
        _print(f"Training with Adam, {where}, without activations", _TRAINING, facts["training"])
    print(f"{facts['parameters']:,} parameters, counted by {facts['source']}.")


def _print(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    from accelerate.base.text import convert_bytes

    cells = []
    for row in rows:
        values = ["N/A" if row[key] is None else row[key] for key in columns]
        cells.append([convert_bytes(value) if isinstance(value, int) else value for value in values])
    right = [heading for heading in columns.values() if heading not in ("strategy", "dtype")]
    print(f"{title}\n{table(list(columns.values()), cells, right, rule=True)}\n")


# -- the command line --------------------------------------------------------------------------------------------------


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`, or add it to what `add_subparsers` returned."""
    description = "Estimate how much memory a model needs, without loading its weights."
    parser = make_parser("estimate-memory", description, subparsers, estimate_command)
    add = parser.add_argument
    add(
        "model_name",
        help="A model on the Hugging Face Hub, a config.json, a .safetensors file, an index of several, or a folder with one of "
        "them. Weights on this machine are counted exactly, by their headers.",
    )
    library = "Build the model with this library; by default the one that the Hub or the configuration names."
    add("--library_name", choices=list(_LIBRARIES), help=library)
    dtypes = ["float32", "float16", "int8", "int4"]
    add("--dtypes", nargs="+", default=dtypes, choices=list(_SHRINKS), help="The element types to show.")
    add("--trust_remote_code", action="store_true", help="Let the model's own code run.")
    ranks = "How many ranks share the training; shows what each of them needs."
    add("--num_processes", type=int, default=1, help=ranks)
    add("--strategy", nargs="+", choices=_STRATEGIES, help="How they share it; all strategies by default.")
    add("--json", action="store_true", help="Print JSON, with all sizes in bytes.")
    return parser


def main() -> None:
    """Run the console script `accelerate-estimate-memory`; status 2 for a request that cannot be answered."""
    or_exit("accelerate estimate-memory", estimate_command, estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
