"""Which policy holds for which module, as patterns of names say; and how a plugin reads patterns."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.extensions.four_bit import rules
from accelerate.launch import config_file
from cases import cases

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def block():
    return nn.ModuleDict({"norm": nn.LayerNorm(2), "inner": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))})


def found(given, model=None):
    model = model or nn.Sequential(nn.Linear(2, 2), nn.ModuleList([block(), block()]))
    names = {module: name for name, module in model.named_modules()}
    ruled = rules.resolve(model, Plugin(fsdp_version=2, module_precision=given).module_precision, LOW)
    return {names[module]: rule.pattern for module, rule in ruled.items() if module in rule.modules}, ruled


@cases(
    "given, expected",
    ({}, {}),
    ({"*norm": "fp32"}, {"1.0.norm": "*norm", "1.1.norm": "*norm"}),
    # What is in a module that matches follows it, through containers too; what matches inside has its own.
    ({"1.0": "fp32"}, {"1.0.norm": "1.0", "1.0.inner": "1.0"}),
    ({"1.0.inner.1": "fp16", "1.*": "fp32"}, dict.fromkeys(("1.0.norm", "1.0.inner", "1.1.norm", "1.1.inner"), "1.*") | {"1.0.inner.1": "1.0.inner.1"}),
    ({"*": "fp32"}, {"": "*"}),
    ({"0": "fp16", "*": "fp32"}, {"": "*", "0": "0"}),
)  # fmt: skip
def test_the_first_pattern_that_matches_holds(given, expected):
    assert found(given)[0] == expected


def test_a_word_keeps_the_dtype_of_what_is_around_and_a_policy_is_taken_as_it_is():
    mine = MixedPrecisionPolicy(output_dtype=torch.float16)
    ruled = found({"0": "fp32", "*norm": mine, "*.inner": {"reduce_dtype": "fp32"}})[1]
    by_pattern = {rule.pattern: rule for rule in ruled.values()}
    assert by_pattern["0"].policy == MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
    assert by_pattern["*norm"].policy is mine and by_pattern["*norm"].in_words() == "outputs float16"
    assert by_pattern["*.inner"].policy == MixedPrecisionPolicy(reduce_dtype=torch.float32)


@cases(
    "given, words",
    ({"*nrom": "fp32"}, "'\\*nrom', which holds for no module of Sequential.*near names: 1.0.norm"),
    ({"1.*": "fp32", "*norm": "fp16"}, "'\\*norm', which holds for no module of Sequential.*or an earlier pattern"),
)
def test_a_pattern_without_effect_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        found(given)


@cases(
    "options, words",
    ({"module_precision": {"*": "fp32"}}, "fsdp_version=1 has one policy"),
    ({"fsdp_version": 2, "module_precision": {"*": "fp31"}}, "module_precision\\['\\*'\\] is 'fp31'"),
    ({"fsdp_version": 2, "module_precision": {"*": None}}, "module_precision\\['\\*'\\] is 'None'"),
    ({"fsdp_version": 2, "module_precision": {"*": {"dtype": "fp32"}}}, "module_precision\\['\\*'\\] has 'dtype'"),
    ({"fsdp_version": 2, "module_precision": "*norm*"}, "module_precision is '\\*norm\\*'; it must be a mapping"),
    ({"fsdp_version": 2, "module_precision": ["*"]}, "must be a mapping"),
)
def test_what_is_no_precision_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Plugin(**options)


def test_a_configuration_file_has_patterns(tmp_path, monkeypatch):
    path = tmp_path / "fsdp.yaml"
    section = "fsdp_config:\n  fsdp_version: 2\n  fsdp_module_precision:\n"
    path.write_text(f'distributed_type: FSDP\n{section}    "*norm*": fp32\n    head: {{param_dtype: fp32}}\n', "utf-8")
    text = config_file.read(path).values["fsdp_module_precision"]
    assert json.loads(text) == {"*norm*": "fp32", "head": {"param_dtype": "fp32"}}
    monkeypatch.setenv("FSDP_MODULE_PRECISION", text)
    precision = Plugin(fsdp_version=2).module_precision
    assert precision == {"*norm*": torch.float32, "head": MixedPrecisionPolicy(param_dtype=torch.float32)}
