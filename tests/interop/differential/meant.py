"""The differences from 1.15.0 that are meant, each with the row of docs/differences.md that it belongs to."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Meant:
    """Cases that may differ.

    Attributes:
        row: how the row begins in docs/differences.md.
        cases: patterns of fnmatch for names of cases.
        here: the kind of exception that ours raises, "" for a value, None for whatever.
        there: the same of 1.15.0.
    """

    row: str
    cases: tuple[str, ...]
    here: str | None = None
    there: str | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.cases, tuple), f"cases={self.cases!r}: a text alone would match by its letters"


MEANT: list[Meant] = []

# -- plugins, variables, engines (enums.py, plugins.py, variables.py, engines.py, numerics.py, words.py, packages.py, parallelism.py)
_FIELDS = "Fields of plugins and sizes of `ParallelismConfig` may be given as text"
_VARIABLES = "An empty variable is as if it were not set."
_ARGUMENTS = "An argument of a wrong type, or a word that is unknown,"
_ENGINES = "Plugins, configurations and placeholders of engines"
_FLAGS = "`ACCELERATE_USE_FSDP`, `ACCELERATE_USE_DEEPSPEED` and the like take every spelling"
_ON_CPU = "An FSDP plugin is honoured on the CPU"
_SCALER = '`mixed_precision="fp16"` scales gradients on the CPU too.'
_PLUGIN = "plugins.*Plugin_*(value={})*"
_FSDP = "plugins.FullyShardedDataParallelPlugin_"
# Text for a number or a flag, a number for a flag or a member.
_TEXT = (
    "'1'",
    "'2'",
    "'3'",
    "'0.5'",
    "'true'",
    "'TRUE'",
    "'False'",
    "'FALSE'",
    "'100000000'",
    "0",
    "-1",
    "1",
    "2",
    "3",
    "4",
    "5",
    "2.0",
    "True",
    "False",
)
_NOTHING = (
    "''",
    "'nonsense'",
    "'auto'",
    "'true'",
    "'TRUE'",
    "'False'",
    "'FALSE'",
    "'0.5'",
    "None",
    "False",
    "0",
    "1",
    "-1",
    "2.5",
    "3",
    "4",
    "9",
    "10*",
    "?]",
    "?'a'?",
    "{*",
)
MEANT += [
    Meant(_FIELDS, tuple(_PLUGIN.format(v) for v in _TEXT), here="", there=""),
    Meant(_FIELDS, tuple(_PLUGIN.format(v) for v in _NOTHING), here="ValueError"),
    Meant(
        _FIELDS,
        ("plugins.*_transformer_cls_names_to_wrap_?(value=1)*", "plugins.MegatronLMPlugin_consumed_samples*"),
        here="TypeError",
        there="",
    ),
    Meant(
        _FIELDS,
        (_FSDP + "transformer_cls_names_to_wrap_?(value=*", "variables.*FSDP_TRANSFORMER_CLS_TO_WRAP(value='A, B')*"),
        here="",
        there="",
    ),
    Meant(_FIELDS, (_FSDP + "cpu_offload_?(value=*",), here="", there="ValueError"),
    Meant(_FIELDS, (_FSDP + "activation_checkpointing_offload_?(value='False')*",), here="", there="ValueError"),
    Meant(_FIELDS, (_FSDP + "state_dict_type_2(value=2)*",), here="ValueError", there=""),
    Meant(_FIELDS, ("plugins.MegatronLMPlugin_*(value='2')*",), here="", there="TypeError"),
    Meant(_FIELDS, ("plugins.InitProcessGroupKwargs_timeout(value=[-5]*",), here="", there=""),
    Meant(_FIELDS, ("plugins.ProjectConfiguration_total_limit(value=*",), there=""),
    Meant(_FIELDS, ("parallelism.one_size(*",), here="ValueError", there="TypeError"),
    Meant(_FIELDS, ("parallelism.one_size(*value=2.5)*",), here="ValueError", there=""),
    Meant(_FIELDS, ("parallelism.one_size(*value='[12]')*",), here="", there="TypeError"),
    Meant(_FIELDS, ("parallelism.one_size(*value=True)*",), here="", there=""),
    Meant(
        _FIELDS,
        tuple(f"parallelism.?p_with_?p_handler(value={v}, *" for v in ("tensor", "context", "sequence", "text")),
        "ValueError",
        "",
    ),
    Meant(
        "An unknown communication hook, a wrapper without a hook", ("plugins.DistributedDataParallelKwargs_comm_*",)
    ),
    Meant(
        "With FSDP version 2, `sharding_strategy` is translated",
        (_FSDP + "sharding_strategy_2(*", _FSDP + "mixed_precision_policy_?(*"),
        "",
        "ValueError",
    ),
    Meant(
        "A `state_dict_config` or `optim_state_dict_config` of another type",
        (_FSDP + "*state_dict_config_?(*",),
        "",
        "",
    ),
    Meant(
        _ON_CPU,
        (_FSDP + "sync_module_states_1(*", _FSDP + "cpu_ram_efficient_loading_1(*"),
        here="",
        there="RuntimeError",
    ),
    Meant(_ON_CPU, ("variables.fsdp1_FSDP_SYNC_*", "variables.fsdp1_FSDP_CPU_RAM_*"), here="", there="RuntimeError"),
    Meant(
        _ON_CPU,
        (
            "variables.*_ACCELERATE_USE_FSDP(*",
            "variables.partial_ACCELERATE_USE_DEEPSPEED(*",
            "variables.state_alone(*",
        ),
        "",
        "",
    ),
    Meant(
        _ON_CPU,
        ("variables.*_ACCELERATE_USE_DEEPSPEED(*", "variables.*_ACCELERATE_USE_MEGATRON_LM(*"),
        here="NotImplementedError",
    ),
    Meant("`reshard_after_forward` of an FSDP 1 plugin", (_FSDP + "reshard_after_forward_1(*",), here="", there=""),
    Meant(
        "`activation_checkpointing_offload` works with FSDP version 1",
        ("variables.checkpointing_*",),
        here="",
        there="ValueError",
    ),
    Meant(
        "`MegatronLMPlugin(recompute_activations=True)`",
        ("plugins.MegatronLMPlugin_recompute_*", "variables.megatron_MEGATRON_LM_RECOMPUTE_*"),
        "",
        "",
    ),
    Meant(
        "`MegatronLMPlugin.seq_length` holds",
        ("numerics.network_sizes(*'seq_length': 20*", "numerics.scheduler_settings(*'lr_warmup_fraction'*"),
        "",
        "",
    ),
    Meant(
        "`MegatronLMPlugin.context_parallel_size` is 1",
        ("plugins.MegatronLMPlugin_context_parallel_size(value=None)*",),
        "",
        "",
    ),
    Meant(_ENGINES, ("numerics.megatron_data(*", "numerics.without_megatron(*"), there="NameError"),
    Meant(
        _ENGINES,
        ("numerics.logging_settings(*", "engines.mapped_optimizer(*"),
        here="ImportError",
        there="ModuleNotFoundError",
    ),
    Meant(
        _ENGINES,
        ("engines.plugin_switches(*", "engines.active_plugin(*", "engines.plugin_actions(*"),
        there="PackageNotFoundError",
    ),
    Meant(_ARGUMENTS, ("numerics.without_transformer_engine(*model=nothing)*",), there="ImportError"),
    Meant(_ARGUMENTS, ("numerics.scheduler_settings(*",), here="ValueError", there="TypeError"),
    Meant(_ARGUMENTS, ("engines.config_refused(*",), here="ValueError"),
    Meant(_ARGUMENTS, ("engines.active_plugin(*",), here="ValueError"),
    Meant(_ARGUMENTS, ("engines.active_plugin(plugins=bare*",), here="", there="ValueError"),
    Meant(_ENGINES, ("engines.active_plugin(plugins=one*select=True)*",), here=""),
    Meant("A subclass of `AbstractTrainStep`", ("numerics.abstract_step(*",)),
    Meant(
        _VARIABLES,
        tuple(
            f"variables.*(value='{v}')*" for v in ("x", "nonsense", "auto", "2", "3", "0", "-1", "07", "2.5", "1e3")
        ),
        "ValueError",
    ),
    Meant(
        _VARIABLES,
        ("variables.*_TORCH_DEVICE(value='*", "variables.*_MIXED_PRECISION(value='fp32')*"),
        here="ValueError",
    ),
    Meant(
        _VARIABLES,
        (
            "variables.*(value='')*",
            "variables.log_level(level=''*",
            "variables.accumulation_beside_an_argument(value=''*",
        ),
        here="",
    ),
    Meant(_VARIABLES, ("variables.rich(value='',*",), here="", there="ValueError"),
    Meant(_VARIABLES, ("variables.*_ACCELERATE_MIXED_PRECISION(value='*",), here="", there=""),
    Meant(
        _VARIABLES,
        (
            "variables.*_ACCELERATE_GRADIENT_ACCUMULATION_STEPS(value='*",
            "variables.accumulation_beside_an_argument(value='0'*",
            "variables.accumulation_beside_an_argument(value='-1'*",
        ),
    ),
    Meant(_VARIABLES, ("variables.*_ACCELERATE_FP8_BACKEND(value='*",), there="ValueError"),
    Meant(_FLAGS, ("variables.*(value='1')*", "variables.*(value='yes')*", "variables.*(value='on')*"), here=""),
    Meant("`LOCAL_RANK` without `WORLD_SIZE`", ("variables.*_LOCAL_RANK(*",), here="", there="ValueError"),
    Meant(
        "`LOCAL_RANK` without `WORLD_SIZE`",
        ("variables.*_ACCELERATE_USE_SAGEMAKER(*",),
        here="",
        there="ModuleNotFoundError",
    ),
    Meant(
        "`LOCAL_RANK` without `WORLD_SIZE`",
        ("words.partial_backend(*", "variables.*_WORLD_SIZE(value='x')*"),
        "",
        "ValueError",
    ),
    Meant(
        _SCALER,
        ("words.combined(precision='fp16'*", "words.precision_of_a_second(*'fp16'*", "words.autocast(kind='fp16'*"),
        "",
        "",
    ),
    Meant(
        _SCALER,
        ("words.accelerator_mixed_precision(value='fp16')*", "words.accelerator_mixed_precision(value='FP16')*"),
        "",
        "",
    ),
    Meant(
        _ARGUMENTS,
        tuple(f"words.handlers(handlers={v}, *" for v in ("text", "texts", "number", "base", "class", "accumulation")),
        "TypeError",
    ),
    Meant(_ARGUMENTS, ("words.handlers(handlers=two recipes, precision='fp8')*",), here="ValueError", there=""),
    Meant(
        _ARGUMENTS,
        (
            "words.accelerator_*(value='nonsense')*",
            "words.accelerator_*(value=1)*",
            "words.accelerator_*(value=text)*",
        ),
        "TypeError",
    ),
    Meant(_ARGUMENTS, ("words.accelerator_*(value=number)*",), here="TypeError"),
    Meant(
        _ARGUMENTS,
        ("words.accelerator_rng_types(*", "words.accelerator_gradient_accumulation_steps(*"),
        here="ValueError",
        there="",
    ),
    Meant(
        _ARGUMENTS,
        ("words.accelerator_dynamo_backend(value=1)*", "words.state_precision(*"),
        here="ValueError",
        there="AttributeError",
    ),
    Meant(_ARGUMENTS, ("words.state_precision(*",), here="ValueError", there=""),
    Meant(_ARGUMENTS, ("words.assigned_type(*on='accelerator')*",), here="ValueError", there=""),
    Meant(_ARGUMENTS, ("words.handlers(handlers=msamp, precision='fp8')*",), here="ImportError", there=""),
    Meant(_ARGUMENTS, ("variables.fp8_ACCELERATE_FP8_BACKEND(value='MSAMP')*",), here="ImportError", there=""),
    Meant(_ARGUMENTS, ("words.accelerator_gradient_accumulation_steps(value=True)*",), here="", there="ValueError"),
    Meant(_ARGUMENTS, ("words.accelerator_deepspeed_plugins(value={})*",), here="", there="ImportError"),
    Meant(_ARGUMENTS, ("words.accelerator_torch_tp_plugin(value='nonsense')*",), here=""),
    Meant(_ARGUMENTS, ("words.assigned_type(to=DistributedType.DEEPSPEED*",), here="", there="AttributeError"),
    Meant(_ARGUMENTS, ("words.gradient_settings(name='num_steps', value=False)*",), here="ValueError"),
    Meant(
        _ENGINES, ("numerics.fp8_recipe(backend='msamp'*", "numerics.fp8_recipe(backend='MSAMP'*"), there="ImportError"
    ),
    Meant(_ARGUMENTS, ("numerics.fp8_recipe(backend=1,*",), here="ValueError", there="AttributeError"),
    Meant(_ARGUMENTS, ("packages.xla(*",), here="ValueError", there="AssertionError"),
    Meant("`Accelerator(split_batches=True)` works", ("words.accelerator_split_batches(*",), "", ""),
    Meant('`log_with="all"` without a folder', ("words.accelerator_log_with(value=*'all'*",), "", ""),
]

# -- big models, pipelines, shards (modeling.py, placing.py, offload.py, loading.py, hooks.py, dispatching.py, sharding.py, merging.py)
_BIG = "What fails by accident works with big models, too"
_MEANS_NOTHING = "Folders and indices of offloaded weights are made where they are missing"
_SETS = "`set_module_tensor_to_device` keeps a parameter a parameter"
_CASTS = "`set_module_tensor_to_device(dtype=...)` casts without"
_CHECKED = "A checkpoint is checked before it is loaded"
_NO_DATA = "A tensor that nobody has data for"
_AREA = ("modeling.*", "placing.*", "offload.*", "loading.*", "hooks.*", "dispatching.*", "sharding.*")
# How 1.15.0 fails on what means nothing: from inside.
_INSIDE = (
    "AttributeError",
    "TypeError",
    "IndexError",
    "RuntimeError",
    "ZeroDivisionError",
    "OverflowError",
)
MEANT += [
    *(Meant(_MEANS_NOTHING, _AREA, here="ValueError", there=kind) for kind in _INSIDE),
    Meant(
        _MEANS_NOTHING,
        (
            "modeling.convert_file_size_to_int(*",
            "modeling.other_dtypes(*",
            "placing.get_max_memory(*",
            "placing.get_balanced_memory(*{0: -1,*",
            "placing.balanced_for(*split_module_classes=?None?,*",
            "placing.infer_auto_device_map(*max_memory={0: -1,*",
            "placing.infer_auto_device_map(*max_memory={0: None,*",
            "placing.inferred_for(*split_module_classes=?None?,*",
            "offload.set_value(*dtype='x')*",
            "offload.save_offload_index(*before='{?x?: 1}'*",
            "offload.align_module_device(*'nothing'*",
            "dispatching.dispatch_model(device_map='*",
        ),
        here="ValueError",
        there="",
    ),
    Meant(_MEANS_NOTHING, ("offload.set_value(*dtype=5)*",), here="TypeError"),
    Meant(
        _MEANS_NOTHING,
        (
            "offload.*",
            "placing.clean_device_map(*",
            "modeling.get_module_leaves(*",
            "loading.load_state_dict(*'auto'*",
            "hooks.hooked_calls(hook=cpu, *",
        ),
        here="TypeError",
    ),
    Meant(_MEANS_NOTHING, ("modeling.get_module_leaves(*", "offload.load_offloaded_weight(*"), here="AttributeError"),
    Meant(
        _MEANS_NOTHING, ("modeling.other_dtypes(*", "modeling.convert_file_size_to_int(*"), here="", there="ValueError"
    ),
    Meant(_MEANS_NOTHING, ("offload.*", "dispatching.*", "loading.*"), here="", there="FileNotFoundError"),
    Meant(_MEANS_NOTHING, ("offload.*", "loading.quantize_and_offload_8bit(*"), "ValueError", "FileNotFoundError"),
    Meant(
        _MEANS_NOTHING, ("offload.save_offload_index(*", "loading.*'broken index'*"), "ValueError", "JSONDecodeError"
    ),
    Meant("`dtype_byte_size` of torch's dtypes", ("modeling.dtype_byte_size(*", "modeling.other_dtypes(*"), "", ""),
    Meant(
        "Classes themselves may stand",
        ("*split=?<class *", "*_classes=?<class *", "modeling.layers(*<class *"),
        "",
        "",
    ),
    Meant(
        "`remove_non_persistent` of",
        ("modeling.named_module_tensors(*recurse=True, remove_non_persistent=True)*",),
        "",
        "",
    ),
    Meant("`id_tensor_storage` tells apart", ("modeling.id_tensor_storage(*",), here="", there=""),
    Meant(_MEANS_NOTHING, ("modeling.retie_parameters(model=shared, *",), here="AttributeError", there=""),
    Meant("A module or parameter that is in one parent", ("*model=shared,*", "placing.placement(*"), "", "IndexError"),
    Meant("A module or parameter that is in one parent", ("*model=*",), here="", there="IndexError"),
    Meant(
        _BIG,
        (
            "modeling.about_ties(*",
            "modeling.layers(*no_split=None*",
            "placing.clean_device_map(*module_name=None)*",
            "placing.get_mixed_precision_context_manager(*native_amp=False*",
            "offload.odd_weights(weight=parameter, *",
            "offload.extract_submodules_state_dict(*?None?)*",
            "offload.loader_as_mapping(*",
            "loading.load_state_dict(*",
            "loading.about_quantizing(*",
            "loading.loaded_into(*broadcast_from_rank0=True*",
            "dispatching.load_checkpoint_and_dispatch(*device_map='none'*",
            "dispatching.load_checkpoint_and_dispatch(*device_map='meta'*",
            "loading.*device_map='meta'*",
            "hooks.hooked_calls(hook=cpu, *",
            "hooks.odd_hooks(*",
        ),
        here="",
    ),
    Meant(_BIG, ("dispatching.load_checkpoint_and_dispatch(*device_map='none', meta=True*",), here="RuntimeError"),
    Meant(_BIG, ("placing.check_device_map(*",), here="", there="AttributeError"),
    Meant("`fallback_allocation` takes budgets that are floats", ("placing.*",), here="", there="RuntimeError"),
    Meant(
        "`fallback_allocation` takes budgets that are floats",
        ("placing.get_balanced_memory(*low_zero=True)*",),
        "",
        "",
    ),
    Meant("`fallback_allocation` takes budgets that are floats", ("placing.*",), here="", there="AttributeError"),
    Meant("A module tied by two weights counts once.", ("placing.placement(*",), here="", there="CountedTwice"),
    Meant("A module tied by two weights counts once.", ("placing.placement(*",), here="", there="TieBroken"),
    Meant("Buffers of a module that a device map splits", ("placing.placement(*",), here="", there="NoDevice"),
    Meant("Entries of a device map that name tensors", ("placing.check_device_map(*",), here="", there=""),
    Meant(_SCALER, ("placing.get_grad_scaler(*",), here="", there=""),
    Meant(_MEANS_NOTHING, ("placing.get_grad_scaler(*XLA*",), here="ModuleNotFoundError"),
    # offloaded tensors
    Meant(_CASTS, ("offload.set_value(*value='none', *", "offload.set_statistics(*value='none')*"), here="", there=""),
    Meant(_CASTS, ("offload.set_value(*dtype='bfloat16')*",), here="", there="RuntimeError"),
    Meant(
        _SETS,
        ("offload.set_to_device(*'cpu:0'*", "offload.set_value(*value='parameter'*", "offload.set_keeps(marked=True*"),
        here="",
        there="",
    ),
    Meant(_SETS, ("offload.set_value(*", "offload.set_statistics(*"), here="", there="RuntimeError"),
    Meant("Tied parameters stay one object", ("offload.set_tied(*device='meta', *",), here="", there=""),
    Meant("`align_module_device` finds", ("offload.align_module_device(*",), here=""),
    Meant("`get_state_dict_offloaded_model` and", ("offload.state_of_root(*",), here="", there=""),
    Meant("`.dat` files appear all at once", ("offload.load_offloaded_weight(*",), here="ValueError", there=""),
    Meant(
        _NO_DATA, ("offload.odd_weights(*", "hooks.align_from(*", "dispatching.*"), "ValueError", "NotImplementedError"
    ),
    Meant(_MEANS_NOTHING, ("offload.set_value(*value='itself', dtype='x')*",), "ValueError", "NotImplementedError"),
    Meant(_CHECKED, ("offload.loader(*index='missing'*",), here="KeyError", there="SafetensorError"),
    Meant("`PrefixedDataset` finds", ("offload.PrefixedDataset(*",), here="", there="KeyError"),
    Meant(_BIG, ("offload.extract_submodules_state_dict(*",), here="", there=""),
    # checkpoints
    Meant(
        _CHECKED, ("loading.load_checkpoint_in_model(*", "dispatching.load_checkpoint_and_dispatch(*"), "ValueError"
    ),
    Meant(_CHECKED, ("loading.load_checkpoint_in_model(*",), here="FileNotFoundError"),
    Meant('`{"": "disk"}` works', ("loading.*", "dispatching.*"), here="", there="SafetensorError"),
    Meant("`strict=True` raises for missing keys", ("loading.loaded_with(*strict=True*",), here="RuntimeError"),
    Meant("A folder with both", ("loading.load_checkpoint_in_model(kind='both', *",), here="", there=""),
    Meant(
        "Buffers of modules on disk are loaded",
        ("loading.*device_map='parts'*", "loading.*device_map='disk'*"),
        here="",
        there="",
    ),
    Meant("`dtype` and `keep_in_fp32_modules` hold", ("loading.loaded_*", "dispatching.load_*kind='half'*"), "", ""),
    Meant(
        "`dtype` and `keep_in_fp32_modules` hold", ("dispatching.load_*kind='half'*",), here="", there="RuntimeError"
    ),
    Meant("The longest entry of a device map", ("loading.*", "dispatching.*device_map='nested'*"), "", "ValueError"),
    Meant('`{"": "disk"}` works', ("dispatching.loaded_with(*'disk'*",), here="", there="RuntimeError"),
    Meant(
        "`load_and_quantize_model` runs on the CPU too",
        (
            "loading.get_quantized*",
            "loading.quantize_and*",
            "loading.load_and_q*",
            "loading.loaded_keeping(*bnb=True)*",
        ),
        here="",
    ),
    Meant("`nn.MultiheadAttention` and", ("loading.replace_with_bnb_layers(model=attention*",), here="", there=""),
    Meant(_BIG, ("loading.replace_with_bnb_layers(model=*meta*",), here="", there="RuntimeError"),
    # hooks
    Meant("Removing a hook restores", ("hooks.hooked_calls(*call='pickle')*",), here="", there="AttributeError"),
    Meant("A hook that offloads and has no execution device", ("hooks.*",), here="RuntimeError"),
    Meant(
        "Tensors that the `weights_map` of a hook lacks", ("hooks.a*", "dispatching.cpu_offload_of(*"), "", "KeyError"
    ),
    Meant("Tensors that the `weights_map` of a hook lacks", ("hooks.align_from(*weights='some'*",), "", "TypeError"),
    Meant(
        "Tensors that a split module owns", ("hooks.attach_on_blocks(*", "dispatching.dispatch_model(*'most*"), "", ""
    ),
    Meant("`skip_modules_pattern` of", ("hooks.attach_layerwise_casting_hooks(*",), here=""),
    Meant("`init_on_device` takes names", ("dispatching.init_on_device(*",), there="TypeError"),
    Meant('`{"": "disk"}` works', ("dispatching.dispatched(*'disk'*",), there="FileNotFoundError"),
    # pipelines and shards
    Meant('`split_points="auto"` makes', ("sharding.generate*",), here="", there="ValueError"),
    Meant("Arguments without a batch dimension", ("sharding.find_pippy_batch_size(*",), here="", there="IndexError"),
    Meant("Arguments without a batch dimension", ("sharding.generate_device_map(*num_processes=*",), "ValueError", ""),
    Meant("`fsdp2_canonicalize_names` takes", ("sharding.fsdp2_canonicalize_names(*",), here="", there=""),
    Meant(
        "`size_based_wrap` shards",
        ("sharding.fsdp2_*size_based*", "sharding.fsdp2_*SIZE_BASED*", "sharding.*declared='Linear')*"),
        here="",
    ),
    Meant("`fsdp2_switch_optimizer_parameters` takes", ("sharding.fsdp2_switch_*",), here="", there="KeyError"),
    Meant("`save_fsdp_model` and its like", ("merging.unsharded_checkpoints(*",), here=""),
    Meant("`merge_fsdp_weights` makes", ("merging.merge_*",), here=""),
    *(
        Meant("`merge_fsdp_weights` makes", ("merging.merge_*",), kind)
        for kind in ("ValueError", "LaunchError", "SystemExit")
    ),
    Meant("Activation checkpointing wraps", ("merging.fsdp2_apply_ac(*", "merging.fsdp2(*prepare_model*"), here=""),
    Meant(_ON_CPU, ("merging.fsdp2(*load_full*",), here="", there="ValueError"),
]

# -- commands and launches (commands.py, configs.py, launching.py, preparing.py, launches.py, rewriting.py, testing.py)
_ABSENT = "<no such case>"
_FILES = "A configuration file is checked"
_OLD_WORDS = "Old spellings in a file"
_WORDS = "Words of options may be in any case"
_MORE = "`--dry_run`, `--numa_affinity`;"
_ENVIRONMENTS = "Environments that `accelerate.utils.launch` prepares"
_NOTEBOOK = "`notebook_launcher(mixed_precision=...)` holds"
_TESTS = "`accelerate.test_utils`: a command ends after `timeout`"
_TABLE = "The table of `estimate-memory` may be empty"
_FSDP2 = "`to-fsdp2` refuses unknown strategies"
_OUTPUT = "`merge-weights` and `to-fsdp2` make the folder"
_TPU = "`tpu-config` says which of name and zone is missing"
_KMP = "`OMP_NUM_THREADS` is left alone for one process"
_QUESTIONS = "A questionnaire whose input ends"
_SAGEMAKER = "SageMaker: `MODEL_PARALLEL` sets a real distribution"
MEANT += [
    Meant(
        _WORDS,
        (
            "launching.options(given='*=*[A-Z]*')*",
            "launching.options(given='fp8_*=[ho]*')*",
            "preparing.variables_of_options(given='*=*[A-Zho]*')*",
        ),
        "",
        "SystemExit",
    ),
    Meant(_WORDS, ("launching.options(given='dynamo_backend=torhchxla_trace_once')*",), "", ""),
    Meant(
        _WORDS,
        (
            "launching.options(given='megatron_lm_*=*')*",
            "launching.options(given='parallelism_config_sp_seq_length_is_variable=*')*",
        ),
        None,
        "",
    ),
    Meant(
        _WORDS,
        (
            "launching.options(given='fp8_override_linear_precision=*')*",
            "preparing.variables_of_options(given='fp8_override_*",
        ),
        "SystemExit",
    ),
    Meant(_WORDS, ("preparing.variables_of_options(given='megatron_lm_*=[fF]*')*",), "", ""),
    Meant(_WORDS, ("commands.lines(given='* --config f')*",), "SystemExit", ""),
    Meant(
        _WORDS,
        (
            "commands.lines(given='env --config-file f')*",
            "commands.lines(given='tpu --tpu-name n')*",
            "commands.lines(given='config default --mixed-*",
        ),
        "",
        "SystemExit",
    ),
    Meant(
        "`accelerate config --config_file FILE default`",
        ("commands.lines(given='config --config_file f *')*",),
        "",
        "",
    ),
    Meant(_MORE, ("launching.parser() --numa_affinity*", "launching.parser() --dry_run*"), "", _ABSENT),
    Meant(
        _MORE,
        (
            "launching.parser() --dynamo_backend*",
            "launching.parser() --parallelism_config_sp_backend*",
            "commands.parsers(name='estimate') --dtypes*",
        ),
        "",
        "",
    ),
    Meant("`accelerate config show` and `config validate`.", ("commands.parsers(name='config') subcommand*",), "", ""),
    Meant("`accelerate launch --help` lists all options", ("launching.help_formatter(*",), "", ""),
    Meant(_WORDS, ("commands.custom_parser(group=None, *) parsed*",), "", ""),
    Meant(
        _ENVIRONMENTS,
        (
            "preparing.environments(run='several *') ACCELERATE_USE_CPU*",
            "preparing.environments(run='deepspeed *') ACCELERATE_*",
        ),
        "",
        _ABSENT,
    ),
    Meant(
        _ENVIRONMENTS,
        (
            "preparing.setups(run='* --cpu*",
            "preparing.setups(run='deepspeed *_nvme_path *",
            "preparing.setups(run='deepspeed *openmpi*",
            "preparing.setups(run='deepspeed *mvapich*",
        ),
        "",
        "",
    ),
    Meant(
        _ENVIRONMENTS,
        (
            "preparing.variables_of_options(given='*_nvme_path=*",
            "preparing.variables_of_options(given='parallelism_config_sp_size=2*",
        ),
        "",
        "",
    ),
    Meant(
        _ENVIRONMENTS,
        (
            "preparing.setups(run='deepspeed *_launcher what')*",
            "preparing.setups(run='deepspeed *_inclusion_filter a *_exclusion_filter b')*",
        ),
    ),
    Meant(
        "`prepare_multi_gpu_env` refuses a number of processes",
        (
            "preparing.setups(run='several TWO --num_processes ?')*",
            "preparing.variables_of_options(given='num_machines=2')*",
        ),
    ),
    Meant(_ON_CPU, ("launches.launched(config='*fsdp*', line='*--cpu*') *FSDP*",), "", _ABSENT),
    Meant(_ENVIRONMENTS, ("launches.launched(config='*fsdp*', line='*') ACCELERATE_USE_CPU*",), "", _ABSENT),
    Meant(
        "`estimate-memory` has an inference column", ("commands.empty_model(library=None, *", "commands.gathered(*")
    ),
    Meant(
        "One process has no `RANK`",
        (
            "launches.launched(config='*') *RANK*",
            "launches.launched(config='*') WORLD_SIZE*",
            "launches.launched(config='ids', *') CUDA_VISIBLE_DEVICES*",
        ),
        _ABSENT,
        "",
    ),
    Meant("A script, module or program that is not there", ("launches.scripts(*",), "LaunchError"),
    Meant(_FILES, ("launches.launched(config='unknown precision', *",)),
    Meant(_TPU, ("launches.number(name='tpu_pod')*",), "LaunchError", "ModuleNotFoundError"),
    Meant(_NOTEBOOK, ("launches.notebook_several(precision='bf16')*",), "", ""),
    Meant(_KMP, ("preparing.environments(run='simple_command cpu') KMP_*",), _ABSENT, ""),
    Meant(
        "`--mpirun_hostfile` reads host files of every MPI",
        ("preparing.variables_of_options(given='mpirun_hostfile=*",),
        "",
        "OSError",
    ),
    Meant(
        "`PrepareForLaunch` numbers the processes", ("preparing.prepare_for_launch(kind='*', *) variables*",), "", ""
    ),
    Meant(_WORDS, ("preparing.prepare_for_launch_words(kind='*')*",), "", "ValueError"),
    Meant(_SAGEMAKER, ("preparing.convert_nargs(*", "preparing.sagemaker(*")),
    Meant(
        _FILES,
        (
            "configs.loaded(content='*')*",
            "configs.updated(content='*",
            "configs.cluster_config(given=('*', None))*",
            "rewriting.loaded(*",
            "launches.validated(config='*",
        ),
        "LaunchError",
    ),
    Meant(
        _FILES,
        (
            "configs.updated(content='precision what'*",
            "configs.cluster_config(given=('*', None))*",
            "launches.validated(config='unknown precision'*",
        ),
        _ABSENT,
        "",
    ),
    Meant("A setting that has no effect is said", ("launches.validated(config='fp8', *) others*",), "", ""),
    Meant(
        _OLD_WORDS,
        (
            "configs.* content='kind TPU'*",
            "configs.*(content='kind TPU'*",
            "configs.loaded(content='kind False'*",
            "configs.loaded(content='precision False'*",
            "configs.loaded(content='old fp16 off'*",
        ),
    ),
    Meant(
        "A SageMaker file with `distributed_type: NO` loads.",
        ("configs.loaded(content='amazon kind NO'*",),
        "",
        "ValueError",
    ),
    Meant(
        _ARGUMENTS,
        (
            "configs.basic_config(precision=None, *",
            "launches.notebook(*",
            "launches.notebook_arguments(*",
            "launches.notebook_options(*",
            "launches.not_debugged(*",
            "launches.debug_arguments(*",
            "launches.debug_counts(*",
        ),
    ),
    Meant(_QUESTIONS, ("configs.ended_input(*",), "EOFError", "ValueError"),
    Meant(
        _TABLE,
        ("commands.table(*", "commands.on_hub(*", "commands.has_model(name='RuntimeError', text='Unknown model*"),
    ),
    Meant("`accelerate env` masks secrets", ("commands.environment(config='broken.yaml')*",)),
    Meant(_TPU, ("commands.tpu_command(*",), None, "TypeError"),
    Meant(_TPU, ("commands.tpu_command(line='--command_file none.txt', *",), "LaunchError", "FileNotFoundError"),
    Meant(_TPU, ("commands.tpu_command(line='--install_accelerate*",), "", "ValueError"),
    Meant(
        _OUTPUT,
        ("rewriting.merged(*", "rewriting.merged_nothing(*", "rewriting.rewritten(line='*--output_file d/g.yaml')*"),
    ),
    Meant(
        _FSDP2,
        (
            "rewriting.converted(*, given=('fsdp_sharding_strategy', *",
            "rewriting.converted(*, given=('fsdp_state_dict_type', 'LOCAL_STATE_DICT'*",
            "rewriting.converted(*, given=('fsdp_version', *",
        ),
    ),
    Meant(
        _TESTS,
        (
            "testing.compared(*",
            "testing.function_lines(*",
            "testing.cleaned(*",
            "testing.workers(*",
            "testing.too_long(*",
            "testing.mocked_loaders(*",
        ),
        None,
        None,
    ),
    Meant(
        _TESTS,
        (
            "testing.requirements(name='slow', variables={'RUN_SLOW': '1'})*",
            "testing.slow_tests(value='')*",
            "testing.flags(value='', *",
            "testing.flags(value=' true', *",
        ),
    ),
    Meant(_ARGUMENTS, ("testing.model(*, x=None)*", "testing.torch_version(version=2)*")),
]

# -- accelerator, state, data_loader, checkpointing, tracking (accelerator.py, states.py, loaders.py, checkpoints.py, trackers.py, stepping.py, samplers.py, loops.py, tracking.py, saving.py)
_LENGTHS = "A length, total or remainder that upstream's sharded loaders"
_NUMBERS = "Numbers that mean nothing raise `ValueError`"
_ACCIDENTS = "What fails by accident works"
_DIVIDED = "Data without tensors, without batches or without samples"
_FOUND = "`get_sampler` finds the sampler of a sharded loader."
_REPORTED = "A prepared loader reports the `batch_size`"
_ONE_CPU = "In a run of several CPU processes the device is `cpu`."
_UNDER_TORCHRUN = "`torchrun` on a machine without a GPU"
_SKIPPED = "`skip_first_batches` refuses more batches"
_READ_BACK = "`load_state` returns which checkpoint it loaded."
_USER_ORDER = "A dispatched loader with the user's generator"
_UNKNOWN = "An argument of a wrong type, or a word that is unknown,"
_EMPTY = "An empty variable is as if it were not set."
_STAYS = "What is assigned to a state stays"
_SHARED = "`ThreadLocalSharedDict(thread_local=False)`"
MEANT += [
    # states
    Meant(_UNDER_TORCHRUN, ("states.partial(cpu=False,*", "states.partial(cpu=None,*"), "", ""),
    Meant(_UNDER_TORCHRUN, ("states.assigned(which=Partial,*", "states.copied(which=Partial,*"), "", ""),
    Meant(_ONE_CPU, ("states.*(*) device*", "states.accelerator_state(*", "states.partial_given(*"), "", ""),
    Meant(_ONE_CPU, ("states.spelled(*", "states.accelerator_given(*", "states.fsdp_plugins(*"), "", ""),
    Meant(_STAYS, ("states.gradient_assigned(*name='dataloader_references')*",)),
    Meant(_EMPTY, ("states.torch_device(value='')*", "states.accelerator_state(*environment='NO'*"), ""),
    Meant(_UNKNOWN, ("states.torch_device(*", "states.accelerator_state(*"), "ValueError"),
    Meant(
        _UNKNOWN, ("states.partial_given(given=*nonsense*", "states.accelerator_given(given=unknown*"), "TypeError", ""
    ),
    Meant(_UNKNOWN, ("states.accelerator_given(given=debug*",), "TypeError", ""),
    Meant(_NUMBERS, ("states.gradient_plugin(steps=0*", "states.gradient_plugin(steps=-1*"), "ValueError", ""),
    Meant(
        _ACCIDENTS,
        ("states.on_process(*", "states.split(*", "states.split_as(*", "states.partial_given(given=*gloo*"),
        "",
    ),
    Meant(_SHARED, ("states.thread_local(thread_local=False)*", "states.thread_local(thread_local=None)*"), "", ""),
    # loaders
    Meant(_LENGTHS, ("samplers.batch_sampler_shard(*) lengths*", "samplers.iterable_shard(*) lengths*"), "", ""),
    Meant(_LENGTHS, ("loaders.prepared(*) lengths*", "loaders.prepared_stream(*) lengths*"), "", ""),
    Meant(_LENGTHS, ("loaders.prepared_stream(*) seen*", "loaders.prepared_stream(*) totals*"), "", ""),
    Meant(_LENGTHS, ("loaders.kinds*(source=weighted,*", "loaders.kinds*(source=batch sampler,*"), "", ""),
    Meant(_LENGTHS, ("loaders.kinds*(source=*stream,*", "loaders.kinds*(source=own batches,*"), "", ""),
    Meant(_LENGTHS, ("loops.built(*skip_batches*",), "", ""),
    Meant(_NUMBERS, ("samplers.iterable_shard(*batch=1, *split=True) refused*",), "ValueError", ""),
    Meant(
        _NUMBERS,
        ("samplers.batch_sampler_ranks(*", "samplers.batch_sampler_changed(*", "loaders.arguments(*num_processes*"),
    ),
    Meant(
        _NUMBERS, ("samplers.skip_batch_sampler(*skip=-1) batches*", "loops.skipped_odd(skip=-1,*"), "ValueError", ""
    ),
    Meant("A batch sampler whose batches contradict", ("samplers.batch_sampler_kinds(*",)),
    Meant(
        _ACCIDENTS,
        ("samplers.skip_batch_sampler(*", "samplers.skip_odd(skip=None)*", "loaders.skipped*skip=None*"),
        "",
    ),
    Meant(_SKIPPED, ("loops.skipped(*", "loops.skipped_odd(skip=5*", "loops.skipped_odd(skip=100*")),
    Meant(_SKIPPED, ("loops.built(*skip_batches*",)),
    Meant(
        _REPORTED,
        ("loaders.*(*) batch_size*", "loops.*(*) batch_size*", "loaders.*(*) drop_last*", "loops.*(*) drop_last*"),
        "",
        "",
    ),
    Meant(
        _DIVIDED,
        (
            "loaders.*(*) total_batch_size*",
            "loops.*(*) total_batch_size*",
            "loaders.*(*) total_dataset_length*",
            "loops.*(*) total_dataset_length*",
        ),
        None,
        "AttributeError",
    ),
    Meant(_DIVIDED, ("loaders.*(*) totals*",), None, "AttributeError"),
    Meant(_DIVIDED, ("loaders.dispatched(*", "loops.built(kind=DataLoaderDispatcher,*"), "", "ValueError"),
    Meant(_DIVIDED, ("loaders.dispatched(*",), "", "TypeError"),
    Meant(_DIVIDED, ("l*.*(source=*no batches*", "loaders.*(source=collate*", "loops.samplers(source='own batches'*")),
    Meant(_DIVIDED, ("loops.skipped(source='collate'*kind='dispatched')*", "loops.built(*'batch_size': None*")),
    Meant(_FOUND, ("loops.samplers(*prepared=True) sampler*", "loaders.random_order(*) sampler*"), "", ""),
    Meant(_FOUND, ("loops.built(kind=SkipDataLoader,*", "loops.built(*dataset=empty) iteration*"), "", ""),
    Meant(_FOUND, ("loops.built(kind=SkipDataLoader, *) iteration*",), "", "AttributeError"),
    Meant(_USER_ORDER, ("loaders.kinds(source=shuffled generator, dispatch=True*",), "", ""),
    Meant("A seedable sampler without a seed", ("loaders.random_order(*seedable=True, seed=None*",), "", ""),
    Meant("Weighted and subset samplers get a shared", ("loaders.random_order(*) synchronized*",), "", ""),
    Meant(
        _UNKNOWN,
        ("loaders.kinds*(source=none*", "loaders.kinds*(source=list*", "loaders.kinds*(source=dataset*"),
        "TypeError",
    ),
    Meant(_ACCIDENTS, ("loaders.arguments(*'put_on_device': True}*) device*",), "", ""),
    Meant("Preparing a prepared model", ("loaders.prepared_again(*",), "", ""),
    # accelerator
    Meant(_NUMBERS, ("accelerator.arguments(given=? gradient_accumulation_steps)*",), "ValueError", ""),
    Meant(_NUMBERS, ("accelerator.accumulation_environment(*",), "ValueError", ""),
    Meant(_EMPTY, ("accelerator.accumulation_environment(steps='',*",), "", "ValueError"),
    Meant(_EMPTY, ("accelerator.precisions(*environment='BF16'*", "accelerator.precisions(*environment=''*"), "", ""),
    Meant(_UNKNOWN, ("accelerator.arguments(*", "accelerator.precisions(*", "stepping.backward(*"), "TypeError"),
    Meant(_UNKNOWN, ("accelerator.arguments(*rng_types)*", "accelerator.precisions(*"), "ValueError"),
    Meant(_UNKNOWN, ("accelerator.hooks(*) handle*", "accelerator.prepare_by_name(*"), "TypeError"),
    Meant(_UNKNOWN, ("accelerator.prepare_by_name(*) lists*",), "", ""),
    Meant(_UNKNOWN, ("stepping.reduce(value='mixed',*",), "TypeError", "RuntimeError"),
    Meant("`Accelerator(split_batches=True)` works", ("accelerator.arguments(*split_batches)*",), "", ""),
    Meant(_ONE_CPU, ("accelerator.arguments(*", "accelerator.property_of(name='device')*"), "", ""),
    Meant(_SCALER, ("accelerator.*fp16*", "stepping.*fp16*"), "", ""),
    Meant(_ACCIDENTS, ("stepping.clip_norm(*what='one')*", "accelerator.odd_models(*method='unwrap_model')*"), ""),
    Meant(_ACCIDENTS, ("stepping.split(*",), ""),
    Meant("`prepare()` of nothing", ("accelerator.prepare_one(what=text*", "accelerator.prepare_one(what=number*")),
    Meant("`prepare()` of nothing", ("accelerator.prepare_placement(count=0*",), "ValueError"),
    Meant(
        "A model without trainable", ("accelerator.prepare_one(what=frozen*", "accelerator.prepare_one(what=empty*")
    ),
    Meant("A pickled model keeps its autocast.", ("accelerator.unwrap(*keep=False, *) in forward*",), "", ""),
    Meant("Preparing a prepared model", ("accelerator.prepare_order(order='mm'*",), "", ""),
    Meant("What [What runs where]", ("accelerator.ulysses(*",), "NotImplementedError"),
    Meant("`reduce` averages integers", ("stepping.reduce(*'mean'*",), "", "RuntimeError"),
    Meant("`pad_across_processes` keeps booleans.", ("stepping.pad(*value='bool')*",), "", ""),
    Meant("`join_uneven_inputs` works on CPU", ("stepping.join(*what='none')*",), "ValueError", ""),
    Meant(_ACCIDENTS, ("accelerator.parallelism(*",), "", "ValueError"),
    # checkpoints
    Meant(_READ_BACK, ("checkpoints.*(*) returned*", "checkpoints.*(*) load*"), "", ""),
    Meant("A checkpoint is written into a hidden folder", ("checkpoints.hooks(*) seen*",), "", ""),
    Meant("After `load_state`, a loader that was being", ("checkpoints.going_on(*",), "", ""),
    Meant("Each rank saves the state of its stateful", ("checkpoints.saved(*stateful=True) files*",), "", ""),
    Meant("Each rank saves the state of its stateful", ("checkpoints.saved(*) rank1_dl_state*",)),
    Meant("A folder's name that is a file", ("saving.model_places(folder='file'*",), "NotADirectoryError"),
    Meant("A folder's name that is a file", ("checkpoints.places(folder='file'*",), "NotADirectoryError"),
    Meant(_NUMBERS, ("checkpoints.naming(*limit=0,*",)),
    Meant("`save_model` writes aside", ("saving.model_over(*",), "", ""),
    Meant(
        "`accelerate_manifest.json` lists",
        ("checkpoints.places(folder='empty', method='load_state')*",),
        "DamagedCheckpoint",
    ),
    Meant(_UNKNOWN, ("checkpoints.places(folder=None, method='save_state')*",), "ValueError"),
    Meant(_ACCIDENTS, ("checkpoints.places(folder=''*",)),
    # trackers
    Meant("A value that a tracker cannot log", ("trackers.log(*",), ""),
    Meant("TensorBoard gets a nested configuration", ("trackers.configuration(tracker='TensorBoardTracker',*",), ""),
    Meant(
        "SwanLab's `FRAMEWORK`",
        ("trackers.begin(tracker='SwanLabTracker',*", "trackers.names(tracker='SwanLabTracker',*"),
        "",
        "",
    ),
    Meant(
        "MLflow without an experiment's name",
        ("trackers.mlflow(*", "trackers.names(tracker='MLflowTracker', name=None)*"),
        "",
        "",
    ),
    Meant("A tracker that was not started", ("trackers.early(*", "tracking.filtered_own(*times=2)*"), ""),
    Meant("A tracker that was not started", ("tracking.register(kind=known name) asked for*",), "", ""),
    Meant('`log_with="all"` without a folder', ("tracking.filtered(words=*all*", "tracking.available(*None)*")),
]

# -- utilities, operations, training, logging (operations.py, collectives.py, utilities.py, helpers.py, environments.py, modules.py, wrappers.py, training.py, schedules.py, logs.py, versions.py)
_MAPPINGS = "Functions for nested data take every mapping"
_MORE = "Helpers take more: integers of NumPy"
_RECORDS = "`stacklevel` of a logger of `get_logger` counts"
_SHARED = "safetensors of tensors that share memory"
_AVERAGES = "`reduce` averages integers"
_INTEGERS = ("int64", "int32", "int8", "uint8", "bool")
_SEEDS = "`set_seed(device_specific=True)` goes on at 0"
_CONTAINERS = ("unequal blocks", "unequal inside", "shared", "module dict")
_ODD = "environments.convert_dict_to_env_variables(*"
MEANT += [
    Meant(
        _MAPPINGS,
        ("operations.*value=default dict*", "collectives.*value=default dict*", "operations.odd_mappings(*)*"),
    ),
    Meant(
        _MAPPINGS,
        ("operations.mapped(*'ignorant_*value=scalar)*", "operations.first_leaf(*'ignorant_*"),
        "",
        "IndexError",
    ),
    Meant(_MAPPINGS, ("operations.pad_input_tensors_otherwise(value=scalar, *",), "", "IndexError"),
    Meant("`is_torch_xpu_tensor` answers", ("operations.is_torch_xpu_tensor(*",), "", "AttributeError"),
    Meant("`is_torch_xpu_tensor` answers", ("operations.sent_anywhere(device='npu', value=movable)*",), "", ""),
    Meant("`pad_input_tensors` lengthens", ("operations.pad_input_tensors*(*",), "", ""),
    Meant("`pad_input_tensors` lengthens", ("operations.pad_input_tensors(*form=columns)*",), "", "RuntimeError"),
    Meant(
        "`pad_across_processes` keeps",
        ("collectives.pad_index(*", "collectives.pad_across_processes(value=bools of*"),
        "",
        "",
    ),
    Meant("`gather_tensor_shape` and", ("collectives.owned(value=no rows) shape*",), "", ""),
    Meant(_AVERAGES, tuple(f"collectives.reduce(value=torch.{kind}, reduction='mean')*" for kind in _INTEGERS)),
    Meant(_AVERAGES, ("collectives.reduce*(*value=torch.int64, *",), "", "RuntimeError"),
    Meant(_AVERAGES, ("collectives.reduce(value=dtypes, reduction='mean')*",)),
    Meant("`reduce` refuses words", ("collectives.reduction_words(*",), "ValueError", ""),
    Meant(
        "`broadcast` fills columns",
        ("collectives.broadcast*(value=strided*", "collectives.broadcast*(value=expanded*"),
        "",
        "",
    ),
    Meant("`convert_outputs_to_fp32(f)` has", ("wrappers.converter(*) dumps*",), "PicklingError", "AttributeError"),
    Meant(_MORE, ("utilities.set_seed(seed=np.int64(3)*", "utilities.set_seed(seed=tensor(4)*")),
    Meant(_MORE, ("utilities.compare_*Version('*", "versions.is_torch_version(*version=2)*"), there="InvalidVersion"),
    Meant(_MORE, ("utilities.check_os_kernel(*", "helpers.ports(port='text')*", "helpers.is_port_in_use(*")),
    Meant(_MORE, ("helpers.merge_dicts(*", _ODD), there="TypeError"),
    Meant(_MORE, ("helpers.merge_dicts(*",), there="AttributeError"),
    Meant(_MORE, ("helpers.merge_dicts(*",), here="", there="<no such case>"),
    Meant(_MORE, ("environments.nvidia(function='get_gpu_info', gpus=??, *",), "", "IndexError"),
    Meant(_MORE, ("logs.logger_level_kinds(*",)),
    Meant("`check_cuda_fp8_capability` is False", ("environments.check_cuda_fp8_capability(*",), "", "AssertionError"),
    Meant("`get_driver_version` raises", ("environments.nvidia(function='get_driver_version', *",), "ValueError", ""),
    Meant("`convert_dict_to_env_variables` leaves out", (_ODD,), "", ""),
    Meant("`patch_environment(name=None)` unsets", ("environments.patch_environment(value=None, *) inside*",), "", ""),
    Meant(
        "`patch_environment(name=None)` unsets",
        ("environments.purge_*='coroutine'*", "environments.purge_*='generator'*"),
        "",
        "",
    ),
    Meant("`should_reduce_batch_size` also recognises", ("utilities.should_reduce_batch_size*(*",), here=""),
    Meant(_ARGUMENTS, ("utilities.starting_badly(*", "schedules.local_sgd_of(*")),
    Meant(_SEEDS, ("utilities.set_seed(seed=4294967295, *", "utilities.set_seed(seed=-1, *")),
    Meant(
        "`synchronize_rng_state` takes words",
        ("utilities.synchronize_rng_state*(*) result*",),
        there="UnboundLocalError",
    ),
    Meant(
        "`synchronize_rng_state` takes words",
        ("utilities.synchronize_rng_state_by_name(rng_type='torch', *) drawn*",),
        "",
        "",
    ),
    Meant(
        "`synchronize_rng_state` takes words",
        ("utilities.synchronize_rng_state_by_name(rng_type='generator', *) generator*",),
        "",
        "",
    ),
    Meant("Saving to a place that is a folder", ("helpers.save(*place=folder) returned*",), here="OSError"),
    Meant(
        _SHARED,
        (
            "helpers.save(obj=tied, *",
            "helpers.save(obj=not contiguous, *",
            "helpers.clean_state_dict_for_safetensors(*",
        ),
    ),
    Meant(
        "`extract_model_from_parallel` takes off",
        ("modules.extract_model_from_parallel(model=own module, *recursive=True)*",),
        "",
        "",
    ),
    Meant(
        _VARIABLES, ("environments.parse_*(value=*", "environments.get_int_from_env(first='', *"), there="ValueError"
    ),
    Meant(_VARIABLES, ("environments.parse_choice_from_env(value='', *",), "", ""),
    Meant(_VARIABLES, ("environments.get_cpu_distributed_information(*value='', *", "logs.logger_of_environment(*")),
    Meant(
        "Regional compilation leaves containers",
        tuple(f"modules.compiled(*module={m}) *" for m in _CONTAINERS),
        "",
        "",
    ),
    Meant(
        "`extract_model_from_parallel` takes off", ("modules.compiled(*module=data parallel) extracted True*",), "", ""
    ),
    Meant(
        _RECORDS,
        (
            "logs.logged(*call=extra, *) said*",
            "logs.logged(*call=stack level, *) said*",
            "logs.logged(method='warning_once', *) said*",
            "logs.places(*",
            "logs.process(*) *",
        ),
        "",
        "",
    ),
]
