"""How a layer is cut across processes: the settings of tensor parallelism."""

from dataclasses import dataclass
from typing import Any

from accelerate.base._warn import warn_user
from accelerate.base.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
from accelerate.base.imports import is_transformers_available
from accelerate.base.versions import compare_versions
from accelerate.config.enums import at_public_path
from accelerate.config.options.schema import to_int


@at_public_path
@dataclass
class TorchTensorParallelConfig:
    """How tensor parallelism works in detail.

    Args:
        enable_async_tp: overlap communication and computation. Not supported yet; it warns and has no effect.
        plan: how to cut a model over the ranks: patterns of module names, where `*` stands for anything between two dots, to
            torch ParallelStyle objects or to words such as "colwise" and "rowwise". None takes the model's own plan, which
            transformers' models carry. It is used for every model that is prepared and not cut yet.

    Raises:
        ValueError: the installed transformers is too old to share a model with us, or `plan` is no such dictionary.

    Example:
        >>> TorchTensorParallelConfig(plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}).plan["layers.*.up"]
        'colwise'

    Source: https://pytorch.org/docs/stable/distributed.tensor.parallel.html
    """

    enable_async_tp: bool = False
    plan: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        patterns = list(self.plan) if isinstance(self.plan, dict) else []
        if self.plan is not None and not (patterns and all(isinstance(pattern, str) for pattern in patterns)):
            expected = "a dictionary of module name patterns to styles, such as {'layers.*.up': 'colwise'}"
            raise ValueError(f"plan is {self.plan!r}; give {expected}, or None for the model's own plan.")
        needed = BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        if is_transformers_available() and compare_versions("transformers", "<", needed):
            raise ValueError(
                f"Tensor parallelism needs transformers {needed} or later, an older one is installed. Update it with "
                "`pip install -U transformers`."
            )
        if self.enable_async_tp:
            warn_user("enable_async_tp has no effect: asynchronous tensor parallelism is not supported yet.")


@at_public_path
@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by torch, as the launcher describes it; `ParallelismConfig(tp_size=...)` replaces it.

    Args:
        tp_size: how many processes share each layer.
        torch_device_mesh: the `DeviceMesh` of the processes to use; None builds one of all.

    Raises:
        ValueError: `tp_size` is below one.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        self.tp_size = to_int(self.tp_size, "tp_size")
        if self.tp_size < 1:
            raise ValueError(f"tp_size is {self.tp_size}; at least 1 process holds a layer.")
