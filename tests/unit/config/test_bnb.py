"""The configuration of bitsandbytes."""

import pytest
import torch

from accelerate.config.bnb import BnbQuantizationConfig
from accelerate.config.enums import CustomDtype


def test_defaults():
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert (config.target_dtype, config.torch_dtype, config.llm_int8_threshold) == (torch.int8, torch.float16, 6.0)
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert config.target_dtype is CustomDtype.INT4
    assert config.bnb_4bit_compute_dtype == config.torch_dtype == torch.bfloat16
    assert config.skip_modules is config.keep_in_fp32_modules is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both True"),
        ({"load_in_8bit": 1}, "load_in_8bit is 1"),
        ({"load_in_8bit": True, "llm_int8_threshold": "6"}, "llm_int8_threshold is '6'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp8"}, "bnb_4bit_quant_type is 'fp8'.*fp4, nf4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "bnb_4bit_compute_dtype is 'fp8'.*fp32, fp16, bf16"),
        ({"load_in_4bit": True, "torch_dtype": 16}, "torch_dtype is 16"),
        ({"load_in_4bit": True, "skip_modules": "lm_head"}, "skip_modules is 'lm_head'"),
    ],
)
def test_wrong_values_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        BnbQuantizationConfig(**kwargs)
