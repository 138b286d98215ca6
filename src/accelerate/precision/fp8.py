"""Low precision by engine: which fp8 backend a run asked for, and whether it can be had."""

from typing import Any

from accelerate.config.enums import FP8BackendType
from accelerate.utils.imports import is_msamp_available, is_torchao_available, is_transformer_engine_available

_ENGINES = {
    FP8BackendType.TE: ("transformer_engine", is_transformer_engine_available),
    FP8BackendType.AO: ("torchao", is_torchao_available),
    FP8BackendType.MSAMP: ("msamp", is_msamp_available),
}


def choose_engine(handlers: dict[FP8BackendType, Any]) -> FP8BackendType:
    """Return the fp8 backend to use: the one whose recipe was given, else the first that is installed.

    Args:
        handlers: The recipe given for each backend, or None.

    Raises:
        ImportError: No fp8 library is installed, or not the one whose recipe was given.
    """
    asked = [kind for kind, handler in handlers.items() if handler is not None]
    for kind in asked or _ENGINES:
        package, available = _ENGINES[kind]
        if available():
            return kind
        if asked:
            raise ImportError(f"A recipe for fp8 with {kind.value} was given, but `{package}` is not installed.")
    raise ImportError(
        "mixed_precision='fp8' needs one of the packages transformer_engine, torchao or msamp, and none is installed. "
        "Install one, or use mixed_precision='bf16'."
    )
