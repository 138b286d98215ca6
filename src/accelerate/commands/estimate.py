"""`accelerate estimate-memory`: how much memory a model needs, found out without its weights."""

import argparse
import os
from typing import Any

from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch.errors import LaunchError

# How many bytes of an fp32 model one byte of it becomes.
_SHRINKS = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
_DTYPES = list(_SHRINKS)
_COLUMNS = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]


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
    if "unknown model" in text:
        return "timm"
    if "does not appear to have a file named" in text or "model type" in text:
        return "transformers"
    return "unknown"


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
        model_name: a repository on the Hub, or a folder with a transformers `config.json`.
        library_name: "transformers" or "timm"; None asks the Hub, and means transformers for a folder.
        trust_remote_code: let the repository's own code run.
        access_token: a token for the Hub.

    Returns:
        The model, on torch's meta device.

    Raises:
        LaunchError: the library is unknown or not installed, or the model cannot be found.

    Example:
        >>> create_empty_model("./bert", "transformers").device  # doctest: +SKIP
        device(type='meta')
        >>> create_empty_model("./bert", "keras")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        accelerate.launch.errors.LaunchError: Models of the library 'keras' cannot be built; ...
    """
    library = library_name or (
        "transformers" if os.path.isdir(model_name) else _library_on_hub(model_name, access_token)
    )
    if library == "transformers":
        return _transformers_model(model_name, trust_remote_code, access_token)
    if library == "timm":
        return _timm_model(model_name)
    raise LaunchError(f"Models of the library {library!r} cannot be built; --library_name takes timm or transformers.")


def _library_on_hub(model_name: str, access_token: str | None) -> str:
    info = verify_on_hub(model_name, access_token)
    if info == "gated":
        raise LaunchError(f"{model_name!r} is gated: agree to its terms on the Hub and log in with a token.")
    if info == "repo":
        raise LaunchError(f"The Hub has no model {model_name!r}, and there is no such folder.")
    if info is False:
        raise LaunchError(
            f"The Hub cannot be reached to look up {model_name!r}. Name a folder with a config.json, or --library_name."
        )
    library = getattr(info, "library_name", None)
    if library is None:
        raise LaunchError(f"The Hub does not say which library {model_name!r} is for; give --library_name.")
    return library


def _transformers_model(model_name: str, trust_remote_code: bool, access_token: str | None) -> Any:
    try:
        import transformers
    except ImportError:
        raise LaunchError("transformers is not installed, and estimating its models needs it.") from None
    from accelerate.big_modeling import init_empty_weights

    try:
        config = transformers.AutoConfig.from_pretrained(
            model_name, trust_remote_code=trust_remote_code, token=access_token
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"The configuration of {model_name!r} cannot be loaded: {error}") from error
    # The class that the checkpoint was saved from, where it says so: a bare AutoModel would lack the head.
    name = next((name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)), None)
    with init_empty_weights():
        if name is not None:
            return getattr(transformers, name)(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def _timm_model(model_name: str) -> Any:
    try:
        import timm
    except ImportError:
        raise LaunchError("timm is not installed, and estimating its models needs it.") from None
    from accelerate.big_modeling import init_empty_weights

    with init_empty_weights():
        return timm.create_model(add_timm_hub_prefix(model_name), pretrained=False)


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


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Estimate the memory of training with Adam.

    Adam keeps two numbers for each weight; mixed precision keeps gradients in half of the weights' width beside fp32 ones
    for the update.

    Args:
        bytes: the size of the weights in fp32.
        mixed_precision: the precision of the computation: "float32", "float16", "bfloat16" or "fp8".
        msamp_config: MS-AMP's level, which has no estimate.

    Returns:
        The bytes of "model", "gradients", "optimizer", and "step" for the largest sum that one step needs beyond the
        model; -1 where there is no estimate.
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
        LaunchError: as in `create_empty_model`.
    """
    from accelerate.utils.modeling import calculate_maximum_sizes

    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = calculate_maximum_sizes(model)
    return [
        [dtype, largest / _SHRINKS[dtype], total / _SHRINKS[dtype], estimate_training_usage(total, dtype)]
        for dtype in args.dtypes
    ]


def estimate_command(args: argparse.Namespace) -> None:
    """Print the sizes of a model as a table.

    Args:
        args: what `estimate_command_parser` parsed.

    Raises:
        LaunchError: as in `create_empty_model`.
    """
    from accelerate.utils.other import convert_bytes

    rows = [
        [dtype, convert_bytes(largest), convert_bytes(total), _training(usage, convert_bytes)]
        for dtype, largest, total, usage in gather_data(args)
    ]
    print(create_ascii_table(_COLUMNS, rows, f"Memory Usage for loading `{args.model_name}`"))


def _training(usage: dict[str, int], convert: Any) -> str:
    most = max(usage.values())
    return "N/A" if most < 0 else convert(most)


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "estimate-memory",
        "Estimate how much memory a model needs, from its configuration alone.",
        subparsers,
        estimate_command,
    )
    parser.add_argument("model_name", help="A model on the Hugging Face Hub, or a folder with a config.json.")
    parser.add_argument("--library_name", choices=["timm", "transformers"], help="The library that the model is for.")
    parser.add_argument("--dtypes", nargs="+", default=_DTYPES, choices=_DTYPES, help="The element types to show.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Let the model's own code run.")
    return parser


def main() -> None:
    """Run the console script `accelerate-estimate-memory`.

    Raises:
        SystemExit: with status 2 if the model cannot be found.
    """
    or_exit("accelerate estimate-memory", estimate_command, estimate_command_parser().parse_args())


if __name__ == "__main__":
    main()
