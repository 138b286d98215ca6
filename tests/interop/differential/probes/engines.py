"""The plugins of the engines (DeepSpeed, Megatron-LM) and `utils.deepspeed`, `utils.megatron_lm`, `utils.ao`, `utils.transformer_engine`."""

import contextlib
import types

from accelerate.utils import dataclasses, deepspeed
from interop.differential.core import probe, record, words
from interop.differential.probes.plugins import EDGES, NUMBERS, SWITCHES, plain, register

PLUGIN = "utils.dataclasses:DeepSpeedPlugin"
CONFIGS = [
    {}, {"train_micro_batch_size_per_gpu": 1}, {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}},
    {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "gradient_clipping": 0.5},
    {"gradient_accumulation_steps": 4, "steps_per_print": 7},
    {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}},
    {"bf16": {"enabled": True}, "fp16": {"enabled": False}},
    {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, {"zero_optimization": {"offload_optimizer": None}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto", "nvme_path": "auto"}}},
    {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR"},
    },
]  # fmt: skip
DEEPSPEED = {
    "hf_ds_config": [None, "", "absent.json", "e30=", 1, [], *CONFIGS], "gradient_accumulation_steps": EDGES,
    "gradient_clipping": EDGES, "zero_stage": [*NUMBERS, 3, 4, "3", True], "is_train_batch_min": SWITCHES,
    "offload_optimizer_device": words("none cpu nvme CPU nonsense", None, "", 1),
    "offload_param_device": words("none cpu nvme CPU nonsense", None, "", 1),
    "offload_optimizer_nvme_path": [None, "none", "/nvme", "", 1],
    "offload_param_nvme_path": [None, "none", "/nvme", "", 1], "zero3_init_flag": SWITCHES,
    "zero3_save_16bit_model": SWITCHES, "transformer_moe_cls_names": [None, "", "A", "A,B", ["A"], 1],
    "enable_msamp": SWITCHES, "msamp_opt_level": words("O1 O2 O3 o1 nonsense", None, ""),
}  # fmt: skip
MEGATRON_FIELDS = record("values")["accelerate.utils.dataclasses:MegatronLMPlugin"]["fields"]
MEGATRON_FLAGS = [name for name, default in MEGATRON_FIELDS.items() if default in ("True", "False")]
MEGATRON_NUMBERS = (
    "tp_degree pp_degree num_micro_batches gradient_clipping recompute_num_layers decoder_last_pipeline_num_layers train_iters "
    "expert_model_parallel_size context_parallel_size expert_tensor_parallel_size attention_dropout hidden_dropout train_samples "
    "pipeline_model_parallel_split_rank num_layers_per_virtual_pipeline_stage start_weight_decay end_weight_decay lr_decay_iters "
    "lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr lr_mult seq_length encoder_seq_length "
    "decoder_seq_length eval_iters eval_interval"
)
MEGATRON = {
    **dict.fromkeys(MEGATRON_FLAGS, SWITCHES),
    **dict.fromkeys(MEGATRON_NUMBERS.split(" "), [None, 0, 1, 2, -1, 2.5, "2", "nonsense"]),
    "recompute_granularity": words("full selective FULL nonsense", None, ""),
    "recompute_method": words("uniform block nonsense", None, ""),
    "weight_decay_incr_style": words("constant linear cosine nonsense", None),
    "lr_decay_style": words("constant linear cosine nonsense", None),
    "consumed_samples": [None, [0, 0, 0], [1], "nonsense"], "tensorboard_dir": [None, "", "logs"],
    "other_megatron_args": [None, {}, {"a": 1}, {"seq_length": 7}, "nonsense"],
    "custom_train_step_class": [None, dict, "nonsense"], "custom_train_step_kwargs": [None, {}, {"a": 1}],
    "no_wd_decay_cond": [None, 1], "scale_lr_cond": [None, 1],
}  # fmt: skip
for field_, values_ in DEEPSPEED.items():
    for stage_ in ({}, {"zero_stage": 3}):
        if not (stage_ and field_ in ("zero_stage", "hf_ds_config")):
            register("DeepSpeedPlugin", field_, values_, stage_)
for field_, values_ in MEGATRON.items():
    register(
        "MegatronLMPlugin", field_, values_, {} if field_ == "context_parallel_size" else {"context_parallel_size": 1}
    )
FILLS = [
    {}, {"gradient_clipping": 1.0}, {"optimizer.params.lr": 0.1, "train_micro_batch_size_per_gpu": 2},
    {"zero_optimization.stage": 2},
]  # fmt: skip


@probe(PLUGIN, config=CONFIGS, values=FILLS, must_match=[True, False], prefix=["", "zero_optimization."])
def plugin_processed(config, values, must_match, prefix):
    plugin = dataclasses.DeepSpeedPlugin(hf_ds_config=config)
    plugin.deepspeed_config_process(prefix=prefix, must_match=must_match, **values)
    return plain(plugin.deepspeed_config)


@probe(PLUGIN, config=CONFIGS, precision=words("no fp16 bf16 fp8 FP16 nonsense", None, ""))
def plugin_precision(config, precision):
    plugin = dataclasses.DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision(precision)
    return plain(plugin.deepspeed_config)


@probe(PLUGIN, do=["select", "set selected", "init context", "init context on", "weakref"])
def plugin_actions(do):
    plugin = dataclasses.DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    if do == "select":
        plugin.select()
    elif do == "set selected":
        plugin.selected = True
    elif do.startswith("init context"):
        with plugin.zero3_init_context_manager(enable=do.endswith("on")):
            return plugin.is_zero3_init_enabled()
    else:
        plugin.set_deepspeed_weakref()
    return plugin.selected


PLUGINS = {
    "none": lambda: None, "empty": dict, "one": lambda: {"a": dataclasses.DeepSpeedPlugin()},
    "bare": dataclasses.DeepSpeedPlugin,
}  # fmt: skip


@probe(
    "utils.deepspeed:get_active_deepspeed_plugin", plugins=PLUGINS, distributed=words("DEEPSPEED NO FSDP", ""),
    select=[True, False],
)  # fmt: skip
def active_plugin(plugins, distributed, select):
    for plugin in plugins.values() if select and isinstance(plugins, dict) else ():
        with contextlib.suppress(ImportError):  # transformers wants DeepSpeed
            plugin.select(_from_accelerator_state=True)
    state = types.SimpleNamespace(deepspeed_plugins=plugins, distributed_type=distributed)
    found = deepspeed.get_active_deepspeed_plugin(state)
    return [type(found).__name__, getattr(found, "selected", "<absent>")]
