"""Training in 8-bit floating point with torchao."""

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from accelerate.base.imports import is_torchao_available

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

T = TypeVar("T", bound=Callable[..., Any])


def torchao_required(func: T) -> T:
    """Decorate a function that needs torchao.

    Raises:
        ImportError: (when called) torchao is missing or too old.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"{func.__name__} needs torchao 0.6.1 or later. Install it with `pip install torchao`.")
        return func(*args, **kwargs)

    return wrapper


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, in the order of definition.

    Example:
        >>> find_first_last_linear_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        ('0', '2')
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Decide whether a layer may run in 8 bits, for `module_filter_func`.

    False for the layers named in full by `layers_to_filter`, and for linear layers with a side that is no multiple of 16,
    which the kernels need.
    """
    fits = not isinstance(module, nn.Linear) or not (module.in_features % 16 or module.out_features % 16)
    return fits and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Decide about a layer as `filter_linear_layers` does, except the first and last linear layer below `module`.

    It sees one module at a time. To spare the first and last layer of a full model, leave `module_filter_func` of
    `convert_model_to_fp8_ao` unset.
    """
    return filter_linear_layers(
        module, fqn, [name for name in find_first_last_linear_layers(module) if name is not None]
    )


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether torchao has converted a layer of the model to 8 bits; an ImportError where torchao is not installed."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: "Float8LinearConfig | None" = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Convert the linear layers of a model to 8-bit training, in place.

    Args:
        model: the model, before it is wrapped.
        config: torchao's settings; None takes its defaults.
        module_filter_func: from a layer and its full name to whether it is converted. None converts all linear layers
            with sides that are multiples of 16, except the first and last, whose precision matters most.

    Raises:
        ImportError: torchao is not installed.

    Source: https://github.com/pytorch/ao/tree/main/torchao/float8
    """
    from torchao.float8 import convert_to_float8_training

    if module_filter_func is None:
        spared = [name for name in find_first_last_linear_layers(model) if name]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=spared)
    options: dict[str, Any] = {"module_filter_fn": module_filter_func}
    if config is not None:
        options["config"] = config
    convert_to_float8_training(model, **options)
