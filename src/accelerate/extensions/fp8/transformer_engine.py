"""Training in 8-bit floating point with NVIDIA Transformer Engine."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.base.imports import is_installed, is_transformer_engine_available
from accelerate.devices.table import DEVICES


def _is_gaudi() -> bool:
    return "hpu" in DEVICES and DEVICES["hpu"].available()


@functools.cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Tell whether Transformer Engine is installed and the GPU has MXFP8 block scaling."""
    if not is_installed("transformer_engine"):
        return False
    return bool(importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def _transformer_engine() -> Any:
    """Return the module with Transformer Engine's layers for this machine; an ImportError where there is none."""
    if not is_transformer_engine_available():
        raise ImportError(
            "Transformer Engine is not installed. Install it with `pip install transformer-engine[pytorch]`, or choose another "
            "backend for fp8."
        )
    return importlib.import_module("intel_transformer_engine" if _is_gaudi() else "transformer_engine.pytorch")


def _convert_layer(module: nn.Module, to_engine: bool, linear: bool, norm: bool, engine: Any) -> nn.Module | None:
    """Return the other library's layer for a linear or layer-norm layer; None where a module stays as it is."""
    source, target, dtype = (nn, engine, "params_dtype") if to_engine else (engine, nn, "dtype")
    if (
        linear
        and isinstance(module, source.Linear)
        and (not to_engine or not (module.in_features % 16 or module.out_features % 16))
    ):
        bias = module.bias is not None if to_engine else module.use_bias
        build = partial(target.Linear, module.in_features, module.out_features, bias=bias)
    elif norm and isinstance(module, source.LayerNorm) and (not to_engine or module.bias is not None):
        build = partial(target.LayerNorm, module.weight.shape[0], eps=module.eps)
    else:
        return None
    layer = build(device=module.weight.device, **{dtype: module.weight.dtype})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(getattr(module, name))
    return layer.train(module.training)


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear and layer-norm layers by Transformer Engine's, or back, in place.

    Linear layers with a side that is no multiple of 16 stay, because the 8-bit kernels do not take them. Call it before
    the optimizer is made: the parameters are new ones.

    Args:
        model: the model.
        to_transformer_engine: the direction.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.

    Raises:
        ImportError: Transformer Engine is not installed.

    Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
    """
    engine = _transformer_engine()
    for name, child in model.named_children():
        layer = _convert_layer(child, to_transformer_engine, _convert_linear, _convert_ln, engine)
        if layer is None:
            convert_model(child, to_transformer_engine, _convert_linear, _convert_ln)
        else:
            setattr(model, name, layer)


def layer_types() -> tuple[type, ...]:
    """Return the types of Transformer Engine's layers; an ImportError where it is not installed."""
    engine = _transformer_engine()
    return tuple(
        getattr(engine, name) for name in ("Linear", "LayerNorm", "TransformerLayer") if hasattr(engine, name)
    )


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether the model has a layer of Transformer Engine; an ImportError where that is not installed."""
    kinds = layer_types()
    return any(isinstance(module, kinds) for module in model.modules())


class _Fp8Forward:
    """A model's forward in Transformer Engine's 8-bit context; a class, so that the prepared model pickles."""

    def __init__(self, forward: Callable, recipe: Any, during_eval: bool) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward
        self.recipe = recipe
        self.during_eval = during_eval
        self.context = _transformer_engine().fp8_autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self.forward, "__self__", None)
        training = module.training if isinstance(module, nn.Module) else torch.is_grad_enabled()
        with self.context(enabled=self.during_eval or training, fp8_recipe=self.recipe):
            return self.forward(*args, **kwargs)


def contextual_fp8_autocast(model_forward: Callable, fp8_recipe: Any, use_during_eval: bool = False) -> Callable:
    """Return a forward that computes in 8 bits while training, and if wanted while evaluating.

    Args:
        model_forward: the bound forward of a model; whether it trains is asked of the model at each call.
        fp8_recipe: Transformer Engine's recipe.
        use_during_eval: whether evaluation is in 8 bits too.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    return _Fp8Forward(model_forward, fp8_recipe, use_during_eval)


def runs_in_fp8(model: nn.Module) -> bool:
    """Whether `apply_fp8_autowrap` replaced the model's forward."""
    return isinstance(model.__dict__.get("forward"), _Fp8Forward)


def engine_recipe(handler: Any) -> Any:
    """Return Transformer Engine's recipe for a `TERecipeKwargs` or `FP8RecipeKwargs`; None takes its defaults.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: block scaling was requested where it cannot run.
    """
    _transformer_engine()
    package = "intel_transformer_engine" if _is_gaudi() else "transformer_engine.common"
    recipe = importlib.import_module(f"{package}.recipe")
    # All fields are passed: a default of ours, such as amax_compute_algo, is not always theirs.
    options = dict(handler.to_dict()) if handler is not None else {}
    for ours in ("backend", "opt_level", "use_autocast_during_eval"):
        options.pop(ours, None)
    blocks = options.pop("use_mxfp8_block_scaling", False)
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipe.Format, options["fp8_format"])
    if blocks and not is_transformer_engine_mxfp8_available():
        raise ValueError(
            "use_mxfp8_block_scaling=True needs a newer Transformer Engine and a Blackwell GPU. Update it, or leave the option "
            "out."
        )
    kind = recipe.MXFP8BlockScaling if blocks else recipe.DelayedScaling
    parameters = inspect.signature(kind).parameters
    asked = handler.to_kwargs() if handler is not None else {}
    ignored = sorted(set(options) & set(asked) - set(parameters))
    if ignored:
        warnings.warn(f"{', '.join(ignored)}: not an option of this Transformer Engine's {kind.__name__}; ignored.")
    return kind(**{name: value for name, value in options.items() if name in parameters})


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Let a model's forward run in 8 bits, and return the model.

    Args:
        model: a model with Transformer Engine's layers.
        fp8_recipe_handler: a `TERecipeKwargs` or `FP8RecipeKwargs`; None takes Transformer Engine's defaults.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: block scaling was requested where it cannot run.
    """
    during_eval = bool(getattr(fp8_recipe_handler, "use_autocast_during_eval", False))
    model.forward = contextual_fp8_autocast(model.forward, engine_recipe(fp8_recipe_handler), during_eval)
    return model
