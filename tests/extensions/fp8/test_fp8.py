"""Which fp8 library a run uses, and what is refused when the Accelerator is built."""

import types

import pytest
import torch

from accelerate.config.enums import FP8BackendType
from accelerate.extensions.fp8 import fp8
from accelerate.extensions.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from cases import cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NO, TE, AO, MSAMP = FP8BackendType.NO, FP8BackendType.TE, FP8BackendType.AO, FP8BackendType.MSAMP
ATTRIBUTES = ("fp8_recipe_handler", "te_recipe_handler", "ao_recipe_handler", "msamp_recipe_handler")


@pytest.fixture
def installed(monkeypatch):
    """Return which libraries are installed; nothing of them is imported."""

    def say(*kinds):
        for kind, engine in fp8.ENGINES.items():
            monkeypatch.setattr(type(engine), "available", lambda self, there=kind in kinds: there)
            monkeypatch.setattr(type(engine), "recipe", lambda self: f"recipe of {self.title}")

    monkeypatch.delenv("ACCELERATE_FP8_BACKEND", raising=False)
    say()
    return say


@pytest.fixture
def capability(monkeypatch):
    """Return which GPU there is."""

    def say(major, minor, name="A GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.version, "hip", None)

    say(9, 0)
    return say


def bare(kind, **fields):
    """A recipe whose library need not be installed."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def accelerator(device=CPU, enabled=True):
    return types.SimpleNamespace(
        device=device, fp8_enabled=enabled, mixed_precision="fp8" if enabled else "bf16", **dict.fromkeys(ATTRIBUTES)
    )


def handlers(**given):
    return {**dict.fromkeys(ATTRIBUTES), **given}


@pytest.mark.parametrize(("there", "device", "kind"), [((AO,), CPU, AO), ((TE, AO), CPU, AO), ((TE, AO), CUDA, TE)])
def test_without_a_recipe_the_first_library_that_can_serves(installed, capability, there, device, kind):
    installed(*there)
    built = accelerator(device)
    assert fp8.setup(built, handlers()) is kind
    assert getattr(built, fp8.ENGINES[kind].attribute) == f"recipe of {fp8.ENGINES[kind].title}"


def test_the_environment_chooses(installed, capability, monkeypatch):
    installed(TE, AO)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    assert fp8.setup(accelerator(CUDA), handlers()) is AO
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    installed(AO)
    with pytest.raises(
        ImportError, match=r"ACCELERATE_FP8_BACKEND.*Transformer Engine.*`transformer_engine` is not installed"
    ):
        fp8.setup(accelerator(CUDA), handlers())
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    assert fp8.setup(accelerator(enabled=False), handlers()) is MSAMP  # nothing computes in it
    with pytest.raises(
        NotImplementedError, match=r"ACCELERATE_FP8_BACKEND is set.*MS-AMP is not supported.*AORecipeKwargs"
    ):
        fp8.setup(accelerator(CUDA), handlers())
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"'FAST'; choose one of TE, AO, or"):
        fp8.setup(accelerator(CUDA), handlers())


def test_the_general_recipe_names_its_library(installed, capability):
    installed(TE, AO)
    assert fp8.setup(accelerator(CUDA), handlers(fp8_recipe_handler=bare(FP8RecipeKwargs, backend="TE"))) is TE
    with pytest.raises(NotImplementedError, match="FP8RecipeKwargs.*MS-AMP is not supported"):
        fp8.setup(accelerator(CUDA), handlers(fp8_recipe_handler=bare(FP8RecipeKwargs, backend="MSAMP")))


@cases(
    "there, device, given, error, said",
    ((), CPU, {}, ImportError, "neither is installed"),
    ((AO,), CUDA, {"msamp": MSAMPRecipeKwargs()}, NotImplementedError, "MSAMPRecipeKwargs.*Use AORecipeKwargs"),
    (
        (AO,),
        CPU,
        {"ao": bare(AORecipeKwargs), "msamp": MSAMPRecipeKwargs()},
        ValueError,
        "AORecipeKwargs and MSAMPRecipeKwargs",
    ),
    ((TE,), CPU, {}, ValueError, r"Transformer Engine.*'cpu'.*pip install torchao"),
    ((TE,), CPU, {"te": bare(TERecipeKwargs)}, ValueError, "Transformer Engine does not compute in 8 bits on 'cpu'"),
    ((TE, AO), torch.device("mps"), {}, ValueError, "'mps'"),
)
def test_refusals(installed, there, device, given, error, said):
    installed(*there)
    with pytest.raises(error, match=said):
        fp8.setup(accelerator(device), handlers(**{f"{name}_recipe_handler": one for name, one in given.items()}))


def test_a_recipe_without_fp8(installed):
    assert fp8.setup(accelerator(enabled=False), handlers()) is NO
    with pytest.raises(ValueError, match=r"MSAMPRecipeKwargs with mixed_precision='bf16'.*mixed_precision='fp8'"):
        fp8.setup(accelerator(enabled=False), handlers(msamp_recipe_handler=MSAMPRecipeKwargs()))


def test_old_gpus_are_refused_with_what_they_are(installed, capability):
    installed(TE, AO)
    capability(8, 0, "NVIDIA A100")
    with pytest.raises(ValueError, match=r"8\.9 or higher.*NVIDIA A100 has 8\.0.*Use 'bf16'"):
        fp8.setup(accelerator(CUDA), handlers())
    emulating = bare(AORecipeKwargs, config=types.SimpleNamespace(emulate=True))
    assert fp8.setup(accelerator(CUDA), handlers(ao_recipe_handler=emulating)) is AO
    capability(8, 9)
    assert fp8.setup(accelerator(CUDA), handlers()) is TE
