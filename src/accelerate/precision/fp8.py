"""Low precision by engine: which fp8 library a run uses, settled when the Accelerator is built, and what it prepares."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accelerate.config.enums import FP8BackendType
from accelerate.precision.engines import ao, msamp, te
from accelerate.precision.engines.base import Engine
from accelerate.utils.environment import parse_choice_from_env

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

# In the order in which they are taken where nothing says which.
ENGINES: dict[FP8BackendType, Engine] = {
    engine.kind: engine for engine in (te.TransformerEngine(), ao.TorchAO(), msamp.MSAMP())
}
# The superseded recipe names its library in a field.
GENERAL = "fp8_recipe_handler"


def setup(accelerator: "Accelerator", handlers: Mapping[str, Any]) -> FP8BackendType:
    """Settle which library computes in fp8, and give the Accelerator the recipe of the environment where none was passed.

    All ranks, when the Accelerator is built; its ``device`` and ``fp8_enabled`` must be known.

    Args:
        accelerator: The Accelerator under construction.
        handlers: What was passed as ``kwargs_handlers``, each under the attribute it becomes; None where there is none.

    Returns:
        The library. Without fp8 it is the one that ACCELERATE_FP8_BACKEND names, which computes nothing then, else
        ``FP8BackendType.NO``.

    Raises:
        ImportError: No library is installed, or not the one that was asked for.
        ValueError: A recipe was passed without fp8, or two were; the device cannot compute in 8 bits; or the variable names no
            library.
    """
    given = _recipes(handlers)
    if not accelerator.fp8_enabled:
        if given:
            names = ", ".join(type(recipe).__name__ for recipe in given.values())
            raise ValueError(
                f"kwargs_handlers got {names} with mixed_precision={accelerator.mixed_precision!r}, where no fp8 recipe has an "
                "effect. Set mixed_precision='fp8', or leave the recipe out."
            )
        return next(iter(_from_environment()), FP8BackendType.NO)
    kind = choose_engine(given, accelerator.device)
    engine = ENGINES[kind]
    if kind not in given:
        setattr(accelerator, engine.attribute, engine.recipe())
    return kind


def _recipes(handlers: Mapping[str, Any]) -> dict[FP8BackendType, Any]:
    """Return the recipe that was passed, under its library."""
    found = [(kind, handlers[engine.attribute]) for kind, engine in ENGINES.items() if handlers.get(engine.attribute)]
    general = handlers.get(GENERAL)
    if general is not None:
        found.append((FP8BackendType[general.backend], general))
    if len(found) > 1:
        names = " and ".join(sorted(type(recipe).__name__ for _, recipe in found))
        raise ValueError(f"kwargs_handlers got {names}; a run computes in fp8 with one library, so pass one recipe.")
    return dict(found)


def choose_engine(recipes: Mapping[FP8BackendType, Any], device: torch.device | None = None) -> FP8BackendType:
    """Return the fp8 library to use.

    That is the one whose recipe was passed; else the one that ACCELERATE_FP8_BACKEND names; else the first of Transformer
    Engine, torchao and MS-AMP that is installed and can serve the device.

    Args:
        recipes: The recipe passed for each library; None counts as none.
        device: Where this rank computes; None leaves hardware out of it.

    Raises:
        ImportError: No library is installed, or not the one that was asked for.
        ValueError: The variable names none of them, or the device cannot compute in 8 bits.
    """
    asked = [kind for kind, recipe in recipes.items() if recipe is not None]
    source = f"kwargs_handlers has {type(recipes[asked[0]]).__name__}" if asked else "ACCELERATE_FP8_BACKEND is set"
    if not asked:
        asked = _from_environment()
    refusals = []
    for kind in asked or ENGINES:
        engine = ENGINES[kind]
        if not engine.available():
            if asked:
                raise ImportError(
                    f"{source}, which asks for fp8 with {engine.title} ({kind.value}), but `{engine.package}` is not installed. "
                    "Install it, or choose another recipe."
                )
            continue
        reason = engine.refusal(device, recipes.get(kind)) if device is not None else None
        if reason is None:
            return kind
        refusals.append(reason)
    if refusals:
        torchao = (
            "" if ENGINES[FP8BackendType.AO].available() else " torchao (pip install torchao) emulates it on a CPU."
        )
        raise ValueError(f"mixed_precision='fp8' cannot run here: {'; '.join(refusals)}. Use 'bf16'.{torchao}")
    raise ImportError(
        "mixed_precision='fp8' needs one of the packages transformer_engine, torchao or msamp, and none is installed. "
        "Install one (`pip install torchao` runs on the most devices), or use mixed_precision='bf16'."
    )


def _from_environment() -> list[FP8BackendType]:
    name = parse_choice_from_env("ACCELERATE_FP8_BACKEND", "no").upper()
    if name == "NO":
        return []
    if name not in FP8BackendType.__members__:
        raise ValueError(
            f"ACCELERATE_FP8_BACKEND is {name!r}; choose one of {', '.join(kind.value for kind in ENGINES)}, or unset it."
        )
    return [FP8BackendType[name]]


def prepare_ao(accelerator: "Accelerator", objects: Sequence[Any], converter: Callable) -> tuple[Any, ...]:
    """Convert models to torchao's float8, as ``engines.ao.prepare``. All ranks."""
    return ao.prepare(accelerator, objects, converter)


def prepare_te(accelerator: "Accelerator", objects: Sequence[Any]) -> tuple[Any, ...]:
    """Convert models to Transformer Engine, as ``engines.te.prepare``. All ranks."""
    return te.prepare(accelerator, objects)


def prepare_msamp(accelerator: "Accelerator", objects: Sequence[Any], device_placement: Any) -> tuple[Any, ...]:
    """Hand model and optimizer to MS-AMP, as ``engines.msamp.prepare``. All ranks."""
    return msamp.prepare(accelerator, objects, device_placement)
