"""Recipes for 8-bit training, one per library.

Each field of a recipe that is None is read from the environment variable `ACCELERATE_FP8_` and its name, which the launcher sets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from accelerate.base._warn import warn_user
from accelerate.base.imports import is_torchao_available, is_transformer_engine_available
from accelerate.config import env
from accelerate.config.enums import at_public_path
from accelerate.config.handlers import KwargsHandler
from accelerate.config.options import of_feature
from accelerate.config.options.schema import one_of, to_bool

# Fields of `TERecipeKwargs`, the options that stand for them, and their defaults.
_TE_FIELDS = {
    option.file_key: (option.name, option.default)
    for option in of_feature("fp8")
    if "te" in option.when.get("fp8_backend", ())
}


@at_public_path
@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao turns linear layers into 8-bit ones.

    Args:
        config: a `torchao.float8.Float8LinearConfig`; None builds one from the last two fields.
        module_filter_func: called with a module and its name, says whether to convert it. None converts all linear
            layers but the first and the last.
        pad_inner_dim: pad matrices to the multiple of 16 that the hardware needs; True by default
            (ACCELERATE_FP8_PAD_INNER_DIM).
        enable_fsdp_float8_all_gather: gather the sharded weights of FSDP2 in 8 bits; True by default
            (ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER).

    Raises:
        ImportError: torchao is not installed.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])  # doctest: +SKIP

    Source: https://github.com/pytorch/ao/tree/main/torchao/float8
    """

    config: Any = None
    module_filter_func: Callable | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        if not is_torchao_available():
            raise ImportError("AORecipeKwargs needs torchao 0.6.1 or later. Install it with `pip install torchao`.")
        if self.config is not None:
            if self.pad_inner_dim is not None or self.enable_fsdp_float8_all_gather is not None:
                warn_user("pad_inner_dim and enable_fsdp_float8_all_gather have no effect with config.")
            return
        names = ("pad_inner_dim", "enable_fsdp_float8_all_gather")
        env.fill(self, {name: (f"fp8_{name}", True) for name in names})

        from torchao.float8 import Float8LinearConfig

        self.config = Float8LinearConfig(**{name: getattr(self, name) for name in names})


@at_public_path
@dataclass
class TERecipeKwargs(KwargsHandler):
    """Scaling of Transformer Engine's 8-bit computation: the arguments of its `DelayedScaling` recipe.

    Args:
        use_autocast_during_eval: compute in 8 bits during evaluation too; False by default.
        margin: powers of two to leave between the largest value and the largest that fits; 0 by default.
        interval: steps between updates of the scale; 1 by default.
        fp8_format: "HYBRID" (E4M3 forward, E5M2 backward; the default), "E4M3" or "E5M2" (evaluation only).
        amax_history_len: how many steps of largest values are kept; 1024 by default.
        amax_compute_algo: "most_recent" (the default) or "max", to choose one of them.
        override_linear_precision: whether forward, input gradient and weight gradient of linear layers stay in higher
            precision (ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD, _WGRAD).
        use_mxfp8_block_scaling: scale blocks of 32 values instead (needs a Blackwell GPU); False by default.

    Raises:
        ImportError: Transformer Engine is not installed.
        ValueError: `fp8_format` or `amax_compute_algo` is unknown.

    Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        if not is_transformer_engine_available():
            install = "`pip install transformer-engine[pytorch]`"
            raise ImportError(f"{type(self).__name__} needs Transformer Engine: {install}, or use AORecipeKwargs.")
        self._fill_scaling_fields()

    def _fill_scaling_fields(self) -> None:
        env.fill(self, _TE_FIELDS)
        if self.use_mxfp8_block_scaling is None:  # no option of the launcher
            variable = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
            self.use_mxfp8_block_scaling = to_bool(env.environment().get(variable, "").strip() or "false", variable)
        self.fp8_format = one_of("fp8_format", str(self.fp8_format).upper(), ("HYBRID", "E4M3", "E5M2"))
        one_of("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))


@at_public_path
@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Name the level of MS-AMP, which is not supported: an Accelerator that gets it raises NotImplementedError.

    Args:
        opt_level: "O1" or "O2" (the default) (ACCELERATE_FP8_OPT_LEVEL).

    Raises:
        ValueError: `opt_level` is unknown.
    """

    opt_level: Literal["O1", "O2"] | None = None

    def __post_init__(self) -> None:
        env.fill(self, {"opt_level": ("fp8_opt_level", "O2")})
        one_of("opt_level", self.opt_level, ("O1", "O2"))


@at_public_path
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The fields of `TERecipeKwargs` and `MSAMPRecipeKwargs` in one; deprecated, use `TERecipeKwargs`.

    Args:
        backend: "TE" (the default) or "MSAMP", which an Accelerator refuses, in any case (ACCELERATE_FP8_BACKEND).

    Raises:
        ImportError: the backend is "TE" and Transformer Engine is not installed.
        ValueError: a field has an unknown value.
    """

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        if env.environment():  # empty for the recipe that `to_kwargs` compares with
            warn_user("FP8RecipeKwargs is deprecated; use TERecipeKwargs or AORecipeKwargs.", FutureWarning)
        env.fill(self, {"backend": ("fp8_backend", "TE")})
        self.backend = one_of("backend", str(self.backend).upper(), ("MSAMP", "TE"))
        if self.backend == "TE":
            TERecipeKwargs.__post_init__(self)
        else:
            self._fill_scaling_fields()
        MSAMPRecipeKwargs.__post_init__(self)
