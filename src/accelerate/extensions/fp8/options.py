"""Options of a run in FP8."""

from functools import partial

from accelerate.config.options.schema import BIT, Chapter, Feature, at_least, rows

_fp8 = rows(
    "FP8 Arguments",
    "fp8_",
    section="fp8_config",
    feature="fp8",
    env="ACCELERATE_FP8_*",
    key="*",
    before="compute_environment",
)
_AO = {"fp8_backend": ("ao",)}
_ao = partial(_fp8, default=True, style=BIT, when=_AO)
_te = partial(_fp8, when={"fp8_backend": ("te",)})

OPTIONS = (
    _fp8("backend", "Library: torchao or Transformer Engine.", choices="ao te msamp", words="ao te"),
    _te("use_autocast_during_eval", "Evaluate in FP8 too (te).", default=False, switch=True),
    _te("margin", "Margin of the scaling factor, as a power of two (te).", default=0, check=at_least(0)),
    _te("interval", "Steps between two computations of the scaling factor (te).", default=1, check=at_least(1)),
    _te("format", "Number format of FP8 (te).", choices="HYBRID E4M3 E5M2", default="HYBRID", key="fp8_format"),
    _te("amax_history_len", "How many past maxima the scaling looks at (te).", default=1024, check=at_least(1)),
    _te("amax_compute_algo", "Which past maximum counts (te).", choices="max most_recent", default="most_recent"),
    _te(
        "override_linear_precision",
        "Use higher precision in the forward pass, the input gradient, the weight gradient (te).",
        type="bools",
        default=(False, False, False),
        env=None,
        env_names=("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
    ),
    _fp8(
        "opt_level",
        "Level of MS-AMP, which is not supported (msamp).",
        choices="O1 O2",
        default="O2",
        when={"fp8_backend": ("msamp",)},
    ),
    _ao(
        "enable_fsdp_float8_all_gather",
        "Let FSDP2 gather the weights in FP8 (ao).",
        when={**_AO, "fsdp_version": ("2",)},
    ),
    _ao("pad_inner_dim", "Pad matrices to sizes FP8 can do (ao)."),
)
FEATURES = {"fp8": Feature("FP8 training", "mixed_precision", wanted="fp8", section="fp8_config")}
CHAPTERS = (Chapter("fp8", when={"mixed_precision": ("fp8",)}, before="other"),)
