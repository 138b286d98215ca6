"""Options of a run with DeepSpeed."""

from dataclasses import replace
from functools import partial

from accelerate.base.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.config.options.general import paradigm
from accelerate.config.options.schema import (
    LOWER,
    NOT_GIVEN,
    SEVERAL,
    TRUE_OR_FALSE,
    Chapter,
    existing_file,
    json_file,
    rows,
)

_OFFLOAD = "none cpu nvme"
_ZERO, _ZERO_3 = {"zero_stage": (1, 2, 3)}, {"zero_stage": (3,)}
_NVME, _NVME_3 = {"offload_optimizer_device": ("nvme",)}, {"offload_param_device": ("nvme",)}
_LOGS_IN = {"deepspeed_multinode_launcher": [word for word in DEEPSPEED_MULTINODE_LAUNCHERS if word != "standard"]}


_deepspeed = rows(
    "DeepSpeed Arguments",
    section="deepspeed_config",
    feature="deepspeed",
    env="ACCELERATE_DEEPSPEED_*",
    style=LOWER,
    before="gradient_accumulation_steps",
)
_deepspeed_truth = partial(_deepspeed, words=TRUE_OR_FALSE)
_without_file = partial(_deepspeed, when={"deepspeed_config_file": NOT_GIVEN})
_nvme = partial(_deepspeed, offer="/nvme")
_of_launcher = partial(_deepspeed, env=None, when=_LOGS_IN, optional=True)

# The core's gradient_accumulation_steps is between these and the following ones.
_BEFORE_STEPS = (
    _deepspeed(
        "deepspeed_config_file",
        "DeepSpeed's own configuration file (JSON).",
        env="ACCELERATE_*",
        chapter="deepspeed file",
        check=json_file,
    ),
    _without_file("zero_stage", "ZeRO stage.", words="0 1 2 3", offer=2),
    _deepspeed("offload_optimizer_device", "Where optimizer state is kept.", words=_OFFLOAD, when=_ZERO),
    _deepspeed("offload_param_device", "Where parameters are kept.", words=_OFFLOAD, when=_ZERO_3),
    _nvme("offload_optimizer_nvme_path", "Directory on the NVMe disk for optimizer state.", when=_NVME),
    _nvme("offload_param_nvme_path", "Directory on the NVMe disk for parameters.", when=_NVME_3),
)
_AFTER_STEPS = (
    # The plugin reads the variable in every run.
    _without_file(
        "gradient_clipping",
        "Largest norm of the gradients.",
        env="ACCELERATE_*",
        unset=("auto",),
        type="float",
        optional=True,
        check=lambda value: None if value > 0 else "it must be above 0",
    ),
    _deepspeed_truth(
        "zero3_init_flag",
        "With ZeRO 3, build the model in shards.",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        when={"zero_stage": (3, None)},
    ),
    _deepspeed_truth("zero3_save_16bit_model", "With ZeRO 3, save the gathered 16-bit weights.", when=_ZERO_3),
    _without_file(
        "deepspeed_moe_layer_cls_names",
        "Classes of mixture-of-experts layers, separated by commas.",
        env="ACCELERATE_*",
        optional=True,
    ),
    _deepspeed(
        "deepspeed_multinode_launcher",
        "How DeepSpeed starts other machines.",
        env=None,
        words=DEEPSPEED_MULTINODE_LAUNCHERS,
        when={"num_machines": SEVERAL},
    ),
    _of_launcher("deepspeed_hostfile", "Host file of DeepSpeed's launcher.", check=existing_file),
    _of_launcher("deepspeed_exclusion_filter", "Hosts and GPUs of that file to omit."),
    _of_launcher(
        "deepspeed_inclusion_filter",
        "Hosts and GPUs of that file to use.",
        when={**_LOGS_IN, "deepspeed_exclusion_filter": NOT_GIVEN},
    ),
)
OPTIONS = (
    paradigm("deepspeed", "Train with DeepSpeed.", env="ACCELERATE_USE_DEEPSPEED", before="use_fsdp"),
    *_BEFORE_STEPS,
    *(replace(option, before="fsdp_version") for option in _AFTER_STEPS),
)
_WITH_DEEPSPEED = {"distributed_type": ("DEEPSPEED",)}
CHAPTERS = (
    Chapter(
        "deepspeed file",
        "Do you have a configuration file of DeepSpeed?",
        _WITH_DEEPSPEED,
        was="deepspeed_config_file",
        before="fsdp",
    ),
    Chapter("deepspeed", when=_WITH_DEEPSPEED, before="fsdp"),
)

# Options that are fields of `DeepSpeedPlugin`: where they are in a file of DeepSpeed's, which may say "auto", and the plugin's defaults.
FIELDS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "auto"),
    "gradient_clipping": ("gradient_clipping", "auto"),
    "zero_stage": ("zero_optimization.stage", 2),
    "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("zero_optimization.offload_param.device", "none"),
    "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "none"),
    "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "none"),
    "zero3_save_16bit_model": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", False),
}
