"""Models built by their libraries from a configuration alone, without memory for their weights."""

import importlib
import json
import os
from typing import Any

from accelerate.launch.errors import LaunchError


class MissingLibraryError(LaunchError, ImportError):
    """A library is needed that is not installed."""


class HubError(LaunchError, OSError):
    """The Hub does not give what is needed."""


class UnreachableError(HubError):
    """The Hub has it, or may have it, and does not answer, or not without a token."""


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        why = "is not installed" if missing == name else f"cannot be imported, for {missing} is missing"
    except Exception as error:  # compiled parts for another version of torch
        why = f"cannot be imported ({brief(error)})"
    raise MissingLibraryError(
        f"{name} {why}, and its models cannot be built without it. Install it, or name a .safetensors file or its index."
    )


def library_of_config(path: str) -> str:
    """Return the library that a local configuration is for.

    Args:
        path: the JSON file, or its folder.

    Raises:
        LaunchError: it is no configuration of a library that is known here.
    """
    content = _content(path)
    if "model_type" in content or "auto_map" in content:
        return "transformers"
    if isinstance(content.get("architecture"), str):
        return "timm"
    if "_class_name" in content:
        raise LaunchError(
            f"{path!r} is a configuration of diffusers, whose models are not built here. Name its .safetensors file instead."
        )
    raise LaunchError(
        f"{path!r} does not say which model it is for: it has neither model_type (transformers) nor architecture (timm). "
        "Name the model's .safetensors file, or add the entry."
    )


def _content(path: str) -> dict[str, Any]:
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    try:
        with open(file, encoding="utf-8") as stream:
            content = json.load(stream)
    except OSError as error:
        raise LaunchError(f"{file!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{file!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise LaunchError(f"{file!r} holds {type(content).__name__}; a configuration holds keys and values.")
    return content


def transformers_model(name: str, trust_remote_code: bool, token: str | None, local: bool = False) -> Any:
    """Build a model of transformers on torch's meta device.

    Args:
        name: a repository on the Hub, a folder with a `config.json`, or such a file.
        trust_remote_code: let the repository's own code run.
        token: a token for the Hub.
        local: use what lies on this machine, and do not ask the Hub.

    Raises:
        LaunchError: transformers is not installed, or cannot build it.
    """
    transformers = _imported("transformers")
    from accelerate.big_modeling import init_empty_weights

    try:
        config = transformers.AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, token=token, local_files_only=local
        )
    except Exception as error:  # of the network, the file system, the JSON, the model's own checks
        raise HubError(f"The configuration of {name!r} cannot be loaded: {brief(error)}") from error
    try:
        with init_empty_weights():
            return _class_of(transformers, config, trust_remote_code).float()
    except Exception as error:
        raise LaunchError(f"{name!r} cannot be built from its configuration: {brief(error)}") from error


def _class_of(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    # The class that the checkpoint was saved from, where it says so: a bare AutoModel would lack the head.
    names = getattr(config, "architectures", None) or ()
    own = next((name for name in names if isinstance(name, str) and hasattr(transformers, name)), None)
    if own is not None:
        return getattr(transformers, own)(config)
    autos = [key for key in getattr(config, "auto_map", None) or () if key.startswith("AutoModel")]
    # A repository with code of its own may have no bare model.
    auto = next((key for key in autos if key != "AutoModel" and hasattr(transformers, key)), "AutoModel")
    return getattr(transformers, auto).from_config(config, trust_remote_code=trust_remote_code)


def timm_model(name: str) -> Any:
    """Build a model of timm on torch's meta device.

    Args:
        name: as timm takes it, a folder with timm's `config.json`, or such a file.

    Raises:
        LaunchError: timm is not installed, or cannot build it.
    """
    timm = _imported("timm")
    from accelerate.big_modeling import init_empty_weights

    options: dict[str, Any] = {}
    if os.path.exists(name):
        content = _content(name)
        model, options = content.get("architecture"), dict(content.get("model_args") or {})
        if isinstance(content.get("num_classes"), int):
            options.setdefault("num_classes", content["num_classes"])
        if not isinstance(model, str):
            raise LaunchError(f"{name!r} does not say which model of timm it is for: it has no architecture.")
    else:
        model = name
    try:
        with init_empty_weights():
            return timm.create_model(model, pretrained=False, **options)
    except Exception as error:
        raise LaunchError(f"timm cannot build {name!r}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """Return what an error says, in one line of moderate length.

    Args:
        error: as a library raised it; theirs go on for paragraphs.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
