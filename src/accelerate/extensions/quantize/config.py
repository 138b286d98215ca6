"""How bitsandbytes quantises a model."""

from dataclasses import dataclass

import torch

from accelerate.base.imports import library
from accelerate.config.enums import CustomDtype, at_public_path
from accelerate.config.options.schema import one_of

is_8bit_bnb_available = library("8bit_bnb", package="bitsandbytes", at_least="0.37.2")
is_4bit_bnb_available = library("4bit_bnb", package="bitsandbytes", at_least="0.39.0")

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    raise ValueError(f"{name} is {value!r}. Give a torch.dtype or one of: {', '.join(_DTYPES)}.")


@at_public_path
@dataclass
class BnbQuantizationConfig:
    """The quantisation of a model with bitsandbytes by `load_and_quantize_model`. One of the two `load_in_*` must be True.

    Args:
        load_in_8bit: quantise linear layers to 8-bit integers.
        llm_int8_threshold: columns with an input beyond this stay in half precision, with 8 bits.
        load_in_4bit: quantise linear layers to 4 bits.
        bnb_4bit_quant_type: the 4-bit format: "fp4" or "nf4".
        bnb_4bit_use_double_quant: quantise the quantisation constants as well.
        bnb_4bit_compute_dtype: the dtype that 4-bit layers compute in: a `torch.dtype` or "fp32", "fp16", "bf16".
        torch_dtype: the dtype of the other layers; None takes the compute dtype with 4 bits and fp16 with 8 bits.
        skip_modules: names of modules that are not quantised; None skips the last layer.
        keep_in_fp32_modules: names of modules that stay in float32.

    Raises:
        ValueError: a field has the wrong type or an unknown value, or not exactly one of `load_in_*` is True.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").target_dtype
        <CustomDtype.INT4: 'int4'>

    Source: LLM.int8() (arXiv 2208.07339), QLoRA (arXiv 2305.14314)
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(f"load_in_8bit and load_in_4bit are both {self.load_in_8bit}; set exactly one to True.")
        if not isinstance(self.llm_int8_threshold, (int, float)):
            raise ValueError(f"llm_int8_threshold is {self.llm_int8_threshold!r}; it must be a number.")
        one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4"))
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a list of module names.")

        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        for name in ("bnb_4bit_compute_dtype", "torch_dtype"):
            setattr(self, name, _dtype(name, getattr(self, name)))
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8  # size of a weight
