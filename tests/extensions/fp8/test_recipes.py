"""The recipes for 8-bit training, with the libraries they ask for faked, and the configuration of bitsandbytes."""

import sys
import types
from dataclasses import dataclass

import pytest
import torch

from accelerate.extensions.fp8 import recipes as low_bit
from accelerate.extensions.fp8.recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.extensions.quantize.config import BnbQuantizationConfig
from cases import cases

FOUR = {"load_in_4bit": True}
LIBRARIES = ("is_torchao_available", "is_transformer_engine_available")


@dataclass(frozen=True)
class Float8LinearConfig:
    """Stands in for torchao's."""

    pad_inner_dim: bool = False
    enable_fsdp_float8_all_gather: bool = False
    other: int = 0


@pytest.fixture
def no_libraries(monkeypatch):
    for name in LIBRARIES:
        monkeypatch.setattr(low_bit, name, lambda: False)


@pytest.fixture
def libraries(monkeypatch):
    float8 = types.ModuleType("torchao.float8")
    float8.Float8LinearConfig = Float8LinearConfig
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    for name in LIBRARIES:
        monkeypatch.setattr(low_bit, name, lambda: True)


def test_missing_libraries_are_named(no_libraries):
    with pytest.raises(ImportError, match="pip install torchao"):
        AORecipeKwargs()
    with pytest.raises(ImportError, match="pip install transformer-engine"):
        TERecipeKwargs()
    with pytest.warns(FutureWarning), pytest.raises(ImportError, match="FP8RecipeKwargs needs Transformer Engine"):
        FP8RecipeKwargs(backend="TE")
    assert MSAMPRecipeKwargs().opt_level == "O2"


def test_torchao_builds_its_config_or_takes_one(libraries, monkeypatch):
    recipe = AORecipeKwargs()
    assert recipe.config == Float8LinearConfig(True, True)
    assert recipe.to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "0")
    assert AORecipeKwargs().config == Float8LinearConfig(False, False)
    recipe = AORecipeKwargs(pad_inner_dim=True)
    assert recipe.config == Float8LinearConfig(True, False)
    assert recipe.to_kwargs() == {"config": recipe.config, "enable_fsdp_float8_all_gather": False}
    config = Float8LinearConfig(other=3)
    recipe = AORecipeKwargs(config=config)
    assert recipe.config is config and recipe.pad_inner_dim is recipe.enable_fsdp_float8_all_gather is None
    with pytest.warns(UserWarning, match="no effect with config"):
        AORecipeKwargs(config=config, pad_inner_dim=False)


def test_transformer_engine_reads_variables(libraries, monkeypatch):
    assert TERecipeKwargs() == TERecipeKwargs(False, 0, 1, "HYBRID", 1024, "most_recent", (False, False, False), False)
    variables = {"USE_AUTOCAST_DURING_EVAL": "1", "MARGIN": "2", "INTERVAL": "3", "FORMAT": "e4m3"}
    variables |= {"AMAX_HISTORY_LEN": "9", "AMAX_COMPUTE_ALGO": "max", "OVERRIDE_DGRAD": "true"}
    variables["USE_MXFP8_BLOCK_SCALING"] = "yes"
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    recipe = TERecipeKwargs(interval=5)
    assert recipe == TERecipeKwargs(True, 2, 5, "E4M3", 9, "max", (False, True, False), True)
    assert recipe.to_kwargs() == recipe.to_dict()


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated")
def test_the_old_recipe_chooses_a_backend(libraries, monkeypatch):
    with pytest.warns(FutureWarning, match="use TERecipeKwargs") as caught:
        FP8RecipeKwargs(backend="MSAMP").to_kwargs()
    assert len(caught) == 1 and FP8RecipeKwargs().backend == "TE"
    assert FP8RecipeKwargs(backend="te", margin=3).to_kwargs() == {"margin": 3}
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    assert FP8RecipeKwargs().backend == "TE"
    with pytest.raises(ValueError, match="backend is 'AO'.*MSAMP, TE"):
        FP8RecipeKwargs(backend="AO")


@cases(
    "kind, kwargs, message",
    (BnbQuantizationConfig, {}, "both False"),
    (BnbQuantizationConfig, {"load_in_8bit": True, "load_in_4bit": True}, "both True"),
    (BnbQuantizationConfig, {"load_in_8bit": 1}, "load_in_8bit is 1"),
    (BnbQuantizationConfig, {"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold is '6'"),
    (BnbQuantizationConfig, {**FOUR, "bnb_4bit_compute_dtype": "fp8"}, "dtype is 'fp8'.*fp32, fp16, bf16"),
    (BnbQuantizationConfig, {**FOUR, "skip_modules": "lm_head"}, "skip_modules is 'lm_head'"),
    (TERecipeKwargs, {"fp8_format": "e3m4"}, "fp8_format is 'E3M4'.*HYBRID, E4M3, E5M2"),
    (TERecipeKwargs, {"amax_compute_algo": "median"}, "amax_compute_algo is 'median'"),
    (TERecipeKwargs, {}, "ACCELERATE_FP8_MARGIN is 'wide'"),
)
def test_wrong_values_are_named(libraries, monkeypatch, kind, kwargs, message):
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "wide" if "MARGIN" in message else "0")
    with pytest.raises(ValueError, match=message):
        kind(**kwargs)


def test_bitsandbytes_defaults():
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype is torch.float16
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert config.bnb_4bit_compute_dtype is config.torch_dtype is torch.bfloat16
