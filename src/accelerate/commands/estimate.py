"""`accelerate estimate-memory`: how much memory a model needs, found out without its weights."""

import argparse
import json
import math
import os
import re
import sys
from typing import Any

from accelerate.commands.estimation import arithmetic, libraries, weights
from accelerate.commands.estimation.inventory import Inventory, of_model
from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch.errors import LaunchError

# How many bytes of an fp32 model one byte of it becomes.
_SHRINKS = {"float32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "int4": 8}
_DTYPES = ["float32", "float16", "int8", "int4"]
_COLUMNS = ["dtype", "Largest Layer", "Total Size", "Inference", "Training using Adam"]
_TRAINING_COLUMNS = ["strategy", "dtype", "Weights", "Gradients", "Optimizer", "Working", "Total"]


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
    if isinstance(error, (OSError, ValueError)) and (
        "does not appear to have a file named" in text or "model type" in text
    ):
        return "transformers"
    return "unknown"


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
    if library_name not in (None, "transformers", "timm"):
        raise _unknown(library_name)
    if os.path.exists(model_name):
        if (library_name or libraries.library_of_config(model_name)) == "timm":
            return libraries.timm_model(model_name)
        return libraries.transformers_model(model_name, trust_remote_code, access_token, local=True)
    if library_name == "timm" and "/" not in model_name:
        return libraries.timm_model(model_name)  # of timm itself, which needs no Hub
    library, local = _on_hub(model_name, library_name, access_token)
    if library == "timm":
        return libraries.timm_model(add_timm_hub_prefix(model_name))
    if library != "transformers":
        raise _unknown(library)
    try:
        return libraries.transformers_model(model_name, trust_remote_code, access_token, local)
    except libraries.HubError:
        if local:
            raise libraries.UnreachableError(
                f"The Hub cannot be reached to look up {model_name!r}, and its configuration is not in the cache. Name a local "
                "config.json, a folder or a .safetensors file instead."
            ) from None
        raise


def _unknown(library: str | None) -> LaunchError:
    return LaunchError(
        f"Models of the library {library!r} cannot be built; --library_name takes timm or transformers."
    )


def _on_hub(model_name: str, library: str | None, access_token: str | None) -> tuple[str, bool]:
    """The library of a model on the Hub, and whether only what is cached can be had."""
    name = model_name.removeprefix("hf-hub:")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise LaunchError(
            f"There is no file or folder {model_name!r}. Name one that exists, or a model of the Hub as in owner/name."
        )
    info = verify_on_hub(name, access_token)
    if info == "gated":
        raise libraries.UnreachableError(
            f"{model_name!r} is gated: agree to its terms on the Hub, and log in with `hf auth login` or HF_TOKEN."
        )
    if info == "repo":
        raise libraries.HubError(
            f"The Hub has no model {model_name!r}, or only for those who may see it, and there is no such file or folder. "
            "Correct the name, or log in with `hf auth login`."
        )
    library = library or ("transformers" if info is False else getattr(info, "library_name", None))
    if library is None:
        raise LaunchError(f"The Hub does not say which library {model_name!r} is for; give --library_name.")
    return library, info is False


def _inventory(args: argparse.Namespace) -> Inventory:
    """What the model consists of: by its weights, where they lie here, or else by its configuration."""
    name = os.path.expanduser(args.model_name)
    if not args.model_name:
        raise LaunchError("model_name is empty; name a model on the Hub, a file or a folder.")
    if os.path.lexists(name) and args.library_name is None and (found := weights.of_path(name)) is not None:
        return found
    model = create_empty_model(name, args.library_name, args.trust_remote_code)
    return of_model(model, f"the configuration ({type(model).__name__})")


# -- sizes -------------------------------------------------------------------------------------------------------------


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the four sizes that the recorded interface has for training with Adam.

    Its sum for mixed precision leaves weights and gradients in fp32 out, so `accelerate estimate-memory` does not show it; see
    `accelerate.commands.estimation.arithmetic.training`.

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
    return _sizes(inventory, args.dtypes)


def _sizes(inventory: Inventory, dtypes: list[str]) -> list[list[Any]]:
    def shrunk(size: int, dtype: str) -> int | float:
        return size if _SHRINKS[dtype] == 1 else size / _SHRINKS[dtype]

    largest, total = inventory.largest, inventory.size()
    return [
        [dtype, shrunk(largest, dtype), shrunk(total, dtype), estimate_training_usage(total, dtype)]
        for dtype in dtypes
    ]


# -- what is shown -----------------------------------------------------------------------------------------------------


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """Draw a table with box characters.

    Args:
        headers: the headings of the columns.
        rows: the rows, as long as `headers`.
        title: the heading of the table.

    Returns:
        The lines, without a final line break.
    """
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    # A long title widens the last column.
    widths[-1] += max(0, len(title) - sum(widths) - len(widths) + 1)
    bars = ["─" * width for width in widths]

    def line(row: list[str]) -> str:
        return "│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│"

    return "\n".join(
        [
            f"┌{'─'.join(bars)}┐",
            f"│{title.center(sum(widths) + len(widths) - 1)}│",
            f"├{'┬'.join(bars)}┤",
            line(cells[0]),
            f"├{'┼'.join(bars)}┤",
            *map(line, cells[1:]),
            f"└{'┴'.join(bars)}┘",
        ]
    )


def _facts(inventory: Inventory, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is told of a model, in bytes."""
    rows = []
    if inventory.stored:
        size = inventory.size_stored
        rows.append(
            {
                "dtype": f"as stored ({inventory.stored})",
                "largest_layer": inventory.largest_stored,
                "total_size": size,
                "inference": math.ceil(arithmetic.INFERENCE_FACTOR * size),
                "training": None,
            }
        )
    dtypes = [] if inventory.packed else list(dict.fromkeys(args.dtypes))
    for dtype, largest, total, _ in _sizes(inventory, dtypes):
        trains = dtype in arithmetic.COMPUTE_BYTES
        rows.append(
            {
                "dtype": dtype,
                "largest_layer": math.ceil(largest),
                "total_size": math.ceil(total),
                "inference": arithmetic.inference(inventory, dtype),
                "training": arithmetic.training(inventory, dtype).total if trains else None,
            }
        )
    strategies = args.strategy or (["ddp"] if args.num_processes == 1 else arithmetic.STRATEGIES)
    each = arithmetic.table_of_training(inventory, dtypes, list(dict.fromkeys(strategies)), args.num_processes)
    return {
        "model": args.model_name,
        "source": inventory.source,
        "parameters": None if inventory.packed else sum(item.elements for item in inventory.parameters),
        "sizes": rows,
        "training": [one.to_json() for one in each],
    }


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
    print(json.dumps(facts, indent=1) if args.json else _for_terminal(_text(facts), sys.stdout.encoding))
    if inventory.packed:
        print(
            f"The weights are packed ({inventory.stored}), so nobody can tell their size in other types. "
            "With --library_name transformers they are counted by config.json.",
            file=sys.stderr,
        )


def _text(facts: dict[str, Any]) -> str:
    from accelerate.utils.other import convert_bytes

    def size(count: int | None) -> str:
        return "N/A" if count is None else convert_bytes(count)

    keys = ("largest_layer", "total_size", "inference", "training")
    rows = [[row["dtype"], *(size(row[key]) for key in keys)] for row in facts["sizes"]]
    parts = [create_ascii_table(_COLUMNS, rows, f"Memory Usage for loading `{facts['model']}`")]
    if facts["training"]:
        ranks = facts["training"][0]["processes"]
        keys = ("weights", "gradients", "optimizer", "working", "total")
        rows = [
            [one["strategy"] if ranks > 1 else "-", one["dtype"], *(size(one[key]) for key in keys)]
            for one in facts["training"]
        ]
        where = "one process" if ranks == 1 else f"each of {ranks} processes"
        parts.append(create_ascii_table(_TRAINING_COLUMNS, rows, f"Training with Adam, {where}, without activations"))
    count = "" if facts["parameters"] is None else f"{facts['parameters']:,} parameters, "
    return "\n".join([*parts, f"{count}counted by {facts['source']}."])


def _for_terminal(text: str, encoding: str | None) -> str:
    """The text with plain lines, where those of the table cannot be written, as on pipes of Windows."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate({ord("─"): "-", ord("│"): "|", **dict.fromkeys(map(ord, "┌┐└┘├┤┬┴┼"), "+")})
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    return text


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
        choices=["timm", "transformers"],
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
        "--strategy",
        nargs="+",
        choices=arithmetic.STRATEGIES,
        help="How they share it; all strategies by default.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, with all sizes in bytes.")
    return parser


def console(args: argparse.Namespace) -> None:
    """Run the command for the console.

    Args:
        args: what `estimate_command_parser` parsed.

    Raises:
        SystemExit: with status 1 if a library is not installed, or the Hub does not answer or wants a token: the request is fine,
            and may succeed later, or elsewhere.
    """
    try:
        estimate_command(args)
    except (libraries.MissingLibraryError, libraries.UnreachableError) as error:
        print(f"accelerate estimate-memory: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def main() -> None:
    """Run the console script `accelerate-estimate-memory`.

    Raises:
        SystemExit: with status 2 if the model cannot be found, or as in `console`.
    """
    or_exit("accelerate estimate-memory", console, estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
