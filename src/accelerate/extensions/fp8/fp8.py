"""fp8: the libraries that compute in 8 bits, the choice among them, and their conversion of models."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.base._warn import warn_user
from accelerate.base.environment import parse_choice_from_env
from accelerate.base.imports import is_torchao_available, is_transformer_engine_available
from accelerate.config.enums import FP8BackendType
from accelerate.extension import Extension
from accelerate.extensions.fp8 import SPEC, transformer_engine
from accelerate.extensions.fp8.recipes import AORecipeKwargs, TERecipeKwargs
from accelerate.modules.optimizer_remap import remapping
from accelerate.runtime import storage
from accelerate.runtime.run import Run

# Ada (8.9) and Hopper (9.0) are the first with 8-bit tensor cores: https://docs.nvidia.com/cuda/cuda-c-programming-guide
CAPABILITY = (8, 9)
# The superseded recipe names its library in a field.
GENERAL = "fp8_recipe_handler"
NO_MSAMP = "MS-AMP is not supported, because it is unmaintained. Use AORecipeKwargs (torchao) or TERecipeKwargs (Transformer Engine)."
_EMULATED = (
    "fp8 on a CPU is emulated: matrix products see the values that 8 bits can hold, and are computed in higher precision. "
    "Use it to try the numerics; it saves neither time nor memory. Set AORecipeKwargs(config=Float8LinearConfig(emulate=True)) "
    "to say that this is meant."
)


class Engine:
    """A library that computes in 8 bits. Stateless: recipes live on the Accelerator, marks on the models.

    `attribute` is the Accelerator's attribute for its `recipe`, a class that reads the environment without arguments; `title`
    is for messages.
    """

    kind: ClassVar[FP8BackendType]
    title: ClassVar[str]
    package: ClassVar[str]
    attribute: ClassVar[str]
    recipe: ClassVar[type]
    available: ClassVar[Callable[[], bool]]

    def refusal(self, device: torch.device, recipe: Any | None) -> str | None:
        """Return why the library cannot compute in 8 bits on a device, or None; without recipe, the usual one."""
        if device.type == "cuda" and torch.version.hip is None:
            seen = torch.cuda.get_device_capability(device)
            if seen >= CAPABILITY:
                return None
            return (
                f"{self.title} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or higher (NVIDIA Ada, Hopper "
                f"or later), and {torch.cuda.get_device_name(device)} has {seen[0]}.{seen[1]}"
            )
        return None if device.type == "cuda" else f"{self.title} does not compute in 8 bits on {device.type!r}"

    def converted(self, model: nn.Module) -> int:
        """Return how many layers of a model the library computes."""
        return sum(self.computes(module) for module in model.modules())

    def computes(self, module: nn.Module) -> bool:
        """Whether a module is a layer of the library."""
        raise NotImplementedError


class TransformerEngine(Engine):
    """NVIDIA Transformer Engine: linear and layer-norm layers become its own, scaled as its ``DelayedScaling`` recipe says."""

    kind = FP8BackendType.TE
    title = "Transformer Engine"
    package = "transformer_engine"
    attribute = "te_recipe_handler"
    recipe = TERecipeKwargs
    available = staticmethod(is_transformer_engine_available)

    def refusal(self, device: torch.device, recipe: Any | None) -> str | None:
        """Return why Transformer Engine cannot run on a device; Intel's serves its Gaudi."""
        return None if device.type == "hpu" else super().refusal(device, recipe)

    def computes(self, module: nn.Module) -> bool:
        """Whether a module is a layer of Transformer Engine."""
        return isinstance(module, transformer_engine.layer_types())


class TorchAO(Engine):
    """torchao's ``convert_to_float8_training``: linear layers whose matrix products run on 8-bit operands."""

    kind = FP8BackendType.AO
    title = "torchao"
    package = "torchao"
    attribute = "ao_recipe_handler"
    recipe = AORecipeKwargs
    available = staticmethod(is_torchao_available)

    def refusal(self, device: torch.device, recipe: AORecipeKwargs | None) -> str | None:
        """Return why float8 cannot run on a device; emulation runs on each, and on a CPU it is what runs."""
        if device.type in ("cpu", "xpu") or (recipe is not None and recipe.config.emulate):
            return None
        reason = super().refusal(device, recipe)
        return reason and f"{reason} (AORecipeKwargs(config=Float8LinearConfig(emulate=True)) runs anywhere, slowly)"

    def computes(self, module: nn.Module) -> bool:
        """Whether a module is a layer of torchao."""
        from torchao.float8.float8_linear import Float8Linear

        return isinstance(module, Float8Linear)


# In the order in which they are taken where nothing says which.
ENGINES: dict[FP8BackendType, Engine] = {engine.kind: engine for engine in (TransformerEngine(), TorchAO())}


class Fp8(Extension):
    """Converts the layers of models that train to those of the library of the run's recipe."""

    order = 40

    @property
    def serves(self) -> tuple[str, ...]:
        """The precision."""
        return ("mixed_precision='fp8'",)

    @classmethod
    def attach(cls, run: Any) -> "Fp8":
        """Choose the library; refuse recipes that have no effect, and devices without fp8."""
        setup(run, _handlers(run))
        return cls(run)

    def arrives(self, models: list[Any], evaluation: bool) -> None:
        """Refuse layers that ranks share."""
        layout = self.run.parallelism_config
        if layout is not None and layout.tp_enabled and not evaluation:
            raise ValueError(
                f"mixed_precision='fp8' with tp_size={layout.tp_size}: fp8 replaces the linear layers that tensor parallelism shards. "
                "Use mixed_precision='bf16', or set tp_size=1."
            )

    def convert(self, model: Any, evaluation: bool) -> Any:
        """Convert a model that trains, by a method that libraries replace."""
        if not evaluation:
            convert = {FP8BackendType.TE: self.run._prepare_te, FP8BackendType.AO: self.run._prepare_ao}
            (model,) = convert[self.run.fp8_backend](model)
        return model


def _handlers(run: Any) -> dict[str, Any]:
    return {name: getattr(run, name, None) for name in SPEC.handlers}


def fp8_backend(accelerator: Any) -> FP8BackendType:
    """The library that computes in fp8, or would: ``FP8BackendType.NO`` where nothing asks for one."""
    return setup(accelerator, _handlers(accelerator))


def setup(accelerator: Any, handlers: Mapping[str, Any]) -> FP8BackendType:
    """Choose which library computes in fp8, and give the Accelerator the environment's recipe where none was passed.

    All ranks, when the Accelerator is built; its ``device`` and ``fp8_enabled`` must be known. `handlers` are those passed, each
    under the attribute it becomes. Without fp8 the library that ACCELERATE_FP8_BACKEND names computes nothing. Raises as
    `choose_engine`, or a ValueError for a recipe without fp8, or two.
    """
    recipes = _recipes(handlers)
    if not accelerator.fp8_enabled:
        if recipes:
            names = ", ".join(type(recipe).__name__ for recipe in recipes.values())
            raise ValueError(
                f"kwargs_handlers got {names} with mixed_precision={accelerator.mixed_precision!r}, where no fp8 recipe has an "
                "effect. Set mixed_precision='fp8', or leave the recipe out."
            )
        return next(iter(_from_environment()), FP8BackendType.NO)
    kind = choose_engine(recipes, accelerator.device)
    engine = ENGINES[kind]
    if kind not in recipes:
        setattr(accelerator, engine.attribute, engine.recipe())
    return kind


def _recipes(handlers: Mapping[str, Any]) -> dict[FP8BackendType, Any]:
    """Return the recipe that was passed, under its library."""
    attributes = {kind: f"{kind.value.lower()}_recipe_handler" for kind in FP8BackendType}
    recipes = [(kind, handlers[name]) for kind, name in attributes.items() if handlers.get(name)]
    general = handlers.get(GENERAL)
    if general is not None:
        recipes.append((FP8BackendType[general.backend], general))
    if len(recipes) > 1:
        names = " and ".join(sorted(type(recipe).__name__ for _, recipe in recipes))
        raise ValueError(f"kwargs_handlers got {names}; a run computes in fp8 with one library, so pass one recipe.")
    return dict(recipes)


def choose_engine(recipes: Mapping[FP8BackendType, Any], device: torch.device | None = None) -> FP8BackendType:
    """Return the fp8 library: that of a recipe, else of ACCELERATE_FP8_BACKEND, else the first to serve the device.

    NotImplementedError: MS-AMP. ImportError: not installed. ValueError: an unknown name, or a device that cannot compute in
    8 bits; None leaves hardware out.
    """
    asked = [kind for kind, recipe in recipes.items() if recipe is not None]
    source = f"kwargs_handlers has {type(recipes[asked[0]]).__name__}" if asked else "ACCELERATE_FP8_BACKEND is set"
    if not asked:
        asked = _from_environment()
    if FP8BackendType.MSAMP in asked:
        raise NotImplementedError(f"{source}, which asks for fp8 with MS-AMP. {NO_MSAMP}")
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
        "mixed_precision='fp8' needs transformer_engine or torchao, and neither is installed. "
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


def _new_models(accelerator: Run, objects: Sequence[Any]) -> Iterator[nn.Module]:
    """Yield the models among some objects that this Accelerator has not prepared and no engine has converted."""
    for item in objects:
        if isinstance(item, nn.Module) and accelerator.prepared.find(item) is None:
            yield item


def _convert(
    accelerator: Run, objects: Sequence[Any], engine: Engine, convert: Callable, rule: str
) -> list[nn.Module]:
    """Convert the new models among some objects, let their optimizers follow, and return those with layers of the library."""
    new_models = list(_new_models(accelerator, objects))
    for model in new_models:
        if not engine.converted(model):  # else by its own library, or by the user
            with remapping(accelerator, model):
                convert(model)
        if not engine.converted(model):
            layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
            odd = sum(1 for layer in layers if layer.in_features % 16 or layer.out_features % 16)
            warn_user(
                f"mixed_precision='fp8' converted no layer of {type(model).__name__}, which computes in bfloat16 then: it has "
                f"{len(layers)} linear layers, {odd} of them with a side that is no multiple of 16, and {rule}, or use "
                "mixed_precision='bf16'."
            )
    return [model for model in new_models if engine.converted(model)]


def _prepare_ao(accelerator: Any, *objects: Any) -> tuple[Any, ...]:
    """Convert the models among the objects to torchao's float8, with the function that libraries replace in `accelerate.accelerator`.

    Collective: call on every rank.
    """
    from accelerate import accelerator as facade

    return prepare_ao(accelerator, objects, facade.convert_model_to_fp8_ao)


def prepare_ao(accelerator: Any, objects: Sequence[Any], converter: Callable) -> tuple[Any, ...]:
    """Convert models to float8 with `converter`, and let their optimizers follow. Collective: call on every rank."""
    engine, recipe = ENGINES[FP8BackendType.AO], accelerator.ao_recipe_handler
    config = ao_config(recipe.config, accelerator.device, accelerator.is_fsdp2)
    rule = "module_filter_func took none of them" if recipe.module_filter_func else "the first and the last stay"

    def convert(model: nn.Module) -> None:
        converter(model, config=config, module_filter_func=recipe.module_filter_func)

    _convert(
        accelerator, objects, engine, convert, f"{rule}. Pass AORecipeKwargs(module_filter_func=...) to choose others"
    )
    return tuple(objects)


def ao_config(config: Any, device: torch.device, sharded: bool) -> Any:
    """Return torchao's settings; only FSDP2 (`sharded`) gathers weights of torchao's own type in 8 bits."""
    if config.enable_fsdp_float8_all_gather and not sharded:
        # Without FSDP2 the type gathers nothing, and neither safetensors nor DDP's buckets know it.
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    if device.type == "cpu" and not config.emulate:
        config = dataclasses.replace(config, emulate=True)
        if not storage.process.current.get("process_index", 0):
            warn_user(_EMULATED)
    return config


def _prepare_msamp(accelerator: Any, *objects: Any, device_placement: Any) -> tuple[Any, ...]:
    """Raise NotImplementedError: MS-AMP is not supported. Not a collective."""
    raise NotImplementedError(NO_MSAMP)


def _prepare_te(accelerator: Any, *objects: Any) -> tuple[Any, ...]:
    """Convert the models among the objects to Transformer Engine.

    Collective: call on every rank.
    """
    return prepare_te(accelerator, objects)


def prepare_te(accelerator: Any, objects: Sequence[Any]) -> tuple[Any, ...]:
    """Convert the models among some objects to Transformer Engine, and let their optimizers follow.

    Collective: call on every rank.
    """
    engine = ENGINES[FP8BackendType.TE]
    recipe = accelerator.te_recipe_handler or accelerator.fp8_recipe_handler
    rule = "no layer norm has weight and bias. Widen the layers"
    for model in _convert(accelerator, objects, engine, transformer_engine.convert_model, rule):
        if not transformer_engine.runs_in_fp8(model):
            transformer_engine.apply_fp8_autowrap(model, recipe)
    return tuple(objects)
