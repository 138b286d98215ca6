"""`accelerate estimate-memory`: how much memory a model needs, without loading its weights."""

import argparse
import importlib
import json
import math
import os
import re
import sys
from typing import Any

from accelerate.commands import model_memory
from accelerate.commands.model_memory import COMPUTE_BYTES, CONFIG, INFERENCE_FACTOR, STRATEGIES, Inventory
from accelerate.commands.utils import brief, make_parser, or_exit
from accelerate.diagnostics.table import table
from accelerate.launch.errors import LaunchError, MissingPackageError

# How many bytes of an fp32 model one byte of it becomes.
_SHRINKS = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
_DTYPES = ["float32", "float16", "int8", "int4"]
# The columns of the two tables: keys of the JSON, and headings.
_SIZES = {
    "dtype": "dtype",
    "largest_layer": "Largest Layer",
    "total_size": "Total Size",
    "inference": "Inference",
    "training": "Training using Adam",
}
_PARTS = ("weights", "gradients", "optimizer", "working", "total")
_TRAINING = {"strategy": "strategy", "dtype": "dtype", **{part: part.capitalize() for part in _PARTS}}
_LIBRARIES = ("timm", "transformers")


class MissingLibraryError(MissingPackageError):
    """A library is needed that is not installed: the same request succeeds elsewhere."""

    status = 1


class HubError(LaunchError, OSError):
    """The Hub does not have what is needed."""


class UnreachableError(HubError):
    """The Hub has it, or may have it, and does not answer, or not without a token: the same request may succeed later."""

    status = 1


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Ask the Hugging Face Hub about a model.

    Args:
        repo: the name of the repository.
        token: an access token.

    Returns:
        What the Hub knows about the model; "gated" if its owner must agree first, "repo" if there is none of this name,
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
    except Exception:  # every failure of the network has a type of its own
        return False


def check_has_model(error: BaseException) -> str:
    """Say which part of a timm or transformers model could not be loaded.

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


# -- models ------------------------------------------------------------------------------------------------------------


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
    library, offline = library_name, False
    if os.path.exists(model_name):
        library = library or _library_of(model_name)
    elif library in (None, "transformers") or (library == "timm" and "/" in model_name):  # timm has models of its own
        library, offline = _on_hub(model_name, library, access_token)
    if library not in _LIBRARIES:
        raise LaunchError(
            f"Models of the library {library!r} cannot be built; --library_name takes {' or '.join(_LIBRARIES)}."
        )
    try:
        package = importlib.import_module(library)
    except Exception as error:  # such as compiled parts for another version of torch
        absent = isinstance(error, ModuleNotFoundError) and error.name == library
        why = "is not installed" if absent else f"cannot be imported ({brief(error)})"
        raise MissingLibraryError(
            f"{library} {why}, and its models cannot be built without it. Install it, or name a .safetensors file or its index."
        ) from error
    if library == "timm":
        return _timm_model(package, model_name)
    return _transformers_model(package, model_name, trust_remote_code, access_token, offline)


def _library_of(path: str) -> str:
    content = _configuration(path)
    if "model_type" in content or "auto_map" in content:
        return "transformers"
    if isinstance(content.get("architecture"), str):
        return "timm"
    raise LaunchError(
        f"{path!r} does not say which model it is for: it has neither model_type (transformers) nor architecture (timm). "
        "Name the model's .safetensors file, or add the entry."
    )


def _configuration(path: str) -> dict[str, Any]:
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    try:
        content = json.loads(model_memory.read_file(file))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LaunchError(f"{file!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise LaunchError(f"{file!r} holds {type(content).__name__}; a configuration holds keys and values.")
    return content


def _on_hub(model_name: str, library: str | None, access_token: str | None) -> tuple[str, bool]:
    """The library of a model on the Hub, and whether the Hub is out of reach, so that only what is cached can be had."""
    name = model_name.removeprefix("hf-hub:")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise LaunchError(
            f"There is no file or folder {model_name!r}. Name one that exists, or a model of the Hub as in owner/name."
        )
    info = verify_on_hub(name, access_token)
    if info == "gated":
        raise UnreachableError(
            f"{model_name!r} is gated: agree to its terms on the Hub, and log in with `hf auth login` or HF_TOKEN."
        )
    if info == "repo":
        raise HubError(
            f"The Hub has no model {model_name!r}, or only for those who may see it, and there is no such file or folder. "
            "Correct the name, or log in with `hf auth login`."
        )
    library = library or ("transformers" if info is False else getattr(info, "library_name", None))
    if library is None:
        raise LaunchError(f"The Hub does not say which library {model_name!r} is for; give --library_name.")
    return library, info is False


def _transformers_model(
    transformers: Any, name: str, trust_remote_code: bool, token: str | None, offline: bool
) -> Any:
    from accelerate.big_modeling import init_empty_weights

    local = offline or os.path.exists(name)
    try:
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, token=token, local_files_only=local
        )
    except Exception as error:  # of the network, the file system, the JSON, the model's own checks
        if not offline:
            raise HubError(f"The configuration of {name!r} cannot be loaded: {brief(error)}") from error
        raise UnreachableError(
            f"The Hub cannot be reached to look up {name!r}, and its configuration is not in the cache. Name a local "
            "config.json, a folder or a .safetensors file instead."
        ) from error
    # The class that the checkpoint was saved from, where it says so: a bare AutoModel would lack the head.
    classes = [name for name in getattr(config, "architectures", None) or () if hasattr(transformers, str(name))]
    # A repository with code of its own may have no bare model.
    autos = [key for key in getattr(config, "auto_map", None) or () if key.startswith("AutoModel")]
    auto = next((key for key in autos if key != "AutoModel" and hasattr(transformers, key)), "AutoModel")
    try:
        with init_empty_weights():
            if classes:
                return getattr(transformers, classes[0])(config).float()
            return getattr(transformers, auto).from_config(config, trust_remote_code=trust_remote_code).float()
    except Exception as error:
        raise LaunchError(f"{name!r} cannot be built from its configuration: {brief(error)}") from error


def _timm_model(timm: Any, name: str) -> Any:
    from accelerate.big_modeling import init_empty_weights

    model, options = add_timm_hub_prefix(name), {}
    if os.path.exists(name):
        content = _configuration(name)
        model, options = content.get("architecture"), dict(content.get("model_args") or {})
        if isinstance(content.get("num_classes"), int):
            options.setdefault("num_classes", content["num_classes"])
    try:
        with init_empty_weights():
            return timm.create_model(model, pretrained=False, **options)
    except Exception as error:
        raise LaunchError(f"timm cannot build {name!r}: {brief(error)}") from error


def _inventory(args: argparse.Namespace) -> Inventory:
    """What the model consists of: by its weights, where they lie here, or else by its configuration."""
    name = os.path.expanduser(args.model_name)
    if not name:
        raise LaunchError("model_name is empty; name a model on the Hub, a file or a folder.")
    if os.path.lexists(name) and args.library_name is None:
        found = model_memory.of_path(name)
        if found is not None:
            return found
    model = create_empty_model(name, args.library_name, args.trust_remote_code)
    return model_memory.of_model(model, f"the configuration ({type(model).__name__})")


# -- sizes -------------------------------------------------------------------------------------------------------------


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the four sizes that the recorded interface has for training with Adam.

    Its sum for mixed precision leaves weights and gradients in fp32 out, so `accelerate estimate-memory` does not show it; see
    `accelerate.commands.model_memory.training`.

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
    """Return the sizes of a model in several element types.

    Args:
        args: what `estimate_command_parser` parsed.

    Returns:
        For each type: its name, the bytes of the largest layer, of the model, and the estimate for training (a mapping as
        of `estimate_training_usage`).

    Raises:
        LaunchError: as in `create_empty_model`; the weights are packed, so that only their size as it is is known.
    """
    inventory = _inventory(args)
    if inventory.packed:
        raise LaunchError(
            f"{args.model_name!r} has packed weights ({inventory.stored}), of which only the size in their files is known."
        )
    return [_row(inventory, dtype) for dtype in args.dtypes]


def _row(inventory: Inventory, dtype: str) -> list[Any]:
    sizes = [inventory.largest(), inventory.size()]
    shrunk = sizes if dtype == "float32" else [size / _SHRINKS[dtype] for size in sizes]
    return [dtype, *shrunk, estimate_training_usage(inventory.size(), dtype)]


def _facts(inventory: Inventory, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is reported of a model, in bytes."""
    dtypes = [] if inventory.packed else list(dict.fromkeys(args.dtypes))
    trainable = [dtype for dtype in dtypes if dtype in COMPUTE_BYTES]
    rows = []
    if inventory.stored:
        size = inventory.size(None)
        running = math.ceil(INFERENCE_FACTOR * size)
        rows.append([f"as stored ({inventory.stored})", inventory.largest(None), size, running, None])
    for dtype in dtypes:
        _, largest, total, _ = _row(inventory, dtype)
        running = model_memory.inference(inventory, dtype)
        needed = model_memory.training(inventory, dtype)["total"] if dtype in trainable else None
        rows.append([dtype, math.ceil(largest), math.ceil(total), running, needed])
    strategies = args.strategy or (["ddp"] if args.num_processes == 1 else STRATEGIES)
    return {
        "model": args.model_name,
        "source": inventory.source,
        "parameters": None if inventory.packed else sum(item.elements for item in inventory.parameters),
        "sizes": [dict(zip(_SIZES, row, strict=True)) for row in rows],
        "training": [
            model_memory.training(inventory, dtype, strategy, args.num_processes)
            for strategy in dict.fromkeys(strategies)
            for dtype in trainable
        ],
    }


# -- what is shown -----------------------------------------------------------------------------------------------------


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
    """Print the sizes of a model as tables, or as JSON.

    Args:
        args: what `estimate_command_parser` parsed.

    Raises:
        LaunchError: as in `create_empty_model`, or the number of processes is not positive.
    """
    args = argparse.Namespace(**{"num_processes": 1, "strategy": None, "json": False, **vars(args)})
    if args.num_processes < 1:
        raise LaunchError(f"--num_processes is {args.num_processes}; it is the number of ranks, at least 1.")
    inventory = _inventory(args)
    facts = _facts(inventory, args)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts, args.num_processes)
    if inventory.packed:
        print(
            f"The weights are packed ({inventory.stored}), so their size in other types is unknown. "
            "With --library_name transformers they are counted by config.json.",
            file=sys.stderr,
        )


def _print(facts: dict[str, Any], ranks: int) -> None:
    print(_table(f"Memory Usage for loading `{facts['model']}`", _SIZES, facts["sizes"]))
    if facts["training"]:
        where = "one process" if ranks == 1 else f"each of {ranks} processes"
        print(_table(f"Training with Adam, {where}, without activations", _TRAINING, facts["training"]))
    count = "" if facts["parameters"] is None else f"{facts['parameters']:,} parameters, "
    print(f"{count}counted by {facts['source']}.")


def _table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    from accelerate.utils.other import convert_bytes

    cells = []
    for row in rows:
        sizes = ["N/A" if value is None else value for value in map(row.get, columns)]
        cells.append([convert_bytes(size) if isinstance(size, int) else size for size in sizes])
    headings = list(columns.values())
    right = [heading for heading in headings if heading not in ("strategy", "dtype")]
    return f"{title}\n{table(headings, cells, right, rule=True)}\n"


# -- the command line --------------------------------------------------------------------------------------------------


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "estimate-memory",
        "Estimate how much memory a model needs, without loading its weights.",
        subparsers,
        estimate_command,
    )
    parser.add_argument(
        "model_name",
        help="A model on the Hugging Face Hub, a config.json, a .safetensors file, an index of several, or a folder with one of "
        "them. Weights on this machine are counted exactly, by their headers.",
    )
    parser.add_argument(
        "--library_name",
        choices=list(_LIBRARIES),
        help="Build the model with this library; by default the one that the Hub or the configuration names.",
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=_DTYPES, choices=list(_SHRINKS), help="The element types to show."
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="Let the model's own code run.")
    parser.add_argument(
        "--num_processes",
        type=int,
        default=1,
        help="How many ranks share the training; shows what each of them needs.",
    )
    parser.add_argument(
        "--strategy", nargs="+", choices=STRATEGIES, help="How they share it; all strategies by default."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, with all sizes in bytes.")
    return parser


def main() -> None:
    """Run the console script `accelerate-estimate-memory`.

    Raises:
        SystemExit: with status 2 for a request that cannot be answered; 1 if a library is not installed, or the Hub does not
            answer or wants a token: the request is fine, and may succeed later, or elsewhere.
    """
    or_exit("accelerate estimate-memory", estimate_command, estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
