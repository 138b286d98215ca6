"""The differences from 1.15.0 that are meant: for each row of docs/differences.yaml, which cases may differ, and how."""

import dataclasses
import fnmatch


@dataclasses.dataclass(frozen=True)
class Meant:
    """Cases that may differ.

    Attributes:
        row: how the row begins in docs/differences.yaml.
        here: the kind of exception that ours raises, or several with " or " between, "" for a value, None for whatever.
        there: the same of 1.15.0.
        cases: patterns of fnmatch for names of cases.
    """

    row: str
    here: str | None
    there: str | None
    cases: tuple[str, ...]

    def explains(self, case: str, here: str, there: str) -> bool:
        """Return whether a case may differ in this way; `here` and `there` are kinds of exceptions."""
        for wanted, found in ((self.here, here), (self.there, there)):
            if wanted is not None and found not in wanted.split(" or "):
                return False
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.cases)


def alternatives(pattern: str) -> list[str]:
    """Return the patterns that one with `<a|b>` stands for."""
    head, _, rest = pattern.partition("<")
    choice, _, tail = rest.partition(">")
    return [p for word in choice.split("|") for p in alternatives(head + word + tail)] if rest else [head]


# Row -> what ours raises, what 1.15.0 raises, and the cases; `<a|b>` stands for a or b.
ROWS: dict[str, list[tuple[str | None, ...]]] = {
    "A subclass of `AbstractTrainStep`": [(None, None, "plain.megatron_lm_AbstractTrainStep(*")],
    "`id_tensor_storage` distinguishes": [("", "", "plain.modeling_id_tensor_storage(*")],
    "Fields of plugins and sizes of `ParallelismConfig` may be given as text": [
        ("", "",
         "plugins.*Plugin_*(value=<'1'|'2'|'3'|'0.5'|'true'|'TRUE'|'False'|'FALSE'|'100000000'|0|-1|1|2|3|4>)*",
         "plugins.*Plugin_*(value=<5|2.0|True|False>)*",
         "plugins.FullyShardedDataParallelPlugin_transformer_cls_names_to_wrap_?(value=*",
         "variables.*FSDP_TRANSFORMER_CLS_TO_WRAP(value='A, B')*",
         "plugins.InitProcessGroupKwargs_timeout(value=[-5]*"),
        ("ValueError", None,
         "plugins.*Plugin_*(value=<''|'nonsense'|'auto'|'true'|'TRUE'|'False'|'FALSE'|'0.5'|None|False|0|1>)*",
         "plugins.*Plugin_*(value=<-1|2.5|3|4|9|10*|?]|?'a'?|{*>)*"),
        ("TypeError", "", "plugins.*_transformer_cls_names_to_wrap_?(value=1)*",
         "plugins.MegatronLMPlugin_consumed_samples*"),
        ("", "ValueError", "plugins.FullyShardedDataParallelPlugin_cpu_offload_?(value=*",
         "plugins.FullyShardedDataParallelPlugin_activation_checkpointing_offload_?(value='False')*"),
        ("ValueError", "", "plugins.FullyShardedDataParallelPlugin_state_dict_type_2(value=2)*",
         "parallelism.?p_with_?p_handler(value=<tensor|context|sequence|text>, *"),
        ("", "TypeError", "plugins.MegatronLMPlugin_*(value='2')*"),
        (None, "", "plugins.ProjectConfiguration_total_limit(value=*")],
    "`DeepSpeedPlugin(gradient_clipping=0)`": [("", "", "variables.*_ACCELERATE_GRADIENT_CLIPPING(value='0')*")],
    "An unknown communication hook, a wrapper without a hook": [
        (None, None, "plugins.DistributedDataParallelKwargs_comm_*")],
    "With FSDP version 2, `sharding_strategy` is translated": [
        ("", "ValueError", "plugins.FullyShardedDataParallelPlugin_<sharding_strategy_2|mixed_precision_policy_?>(*")],
    "A `state_dict_config` or `optim_state_dict_config` of another type": [
        ("", "", "plugins.FullyShardedDataParallelPlugin_*state_dict_config_?(*")],
    "FSDP and DeepSpeed plugins are used on the CPU": [
        ("", "RuntimeError",
         "plugins.FullyShardedDataParallelPlugin_<sync_module_states|cpu_ram_efficient_loading>_1(*",
         "variables.fsdp1_FSDP_SYNC_*", "variables.fsdp1_FSDP_CPU_RAM_*"),
        ("", "", "variables.<*_ACCELERATE_USE_FSDP|partial_ACCELERATE_USE_DEEPSPEED>(*"),
        ("ImportError", None, "variables.*_ACCELERATE_USE_DEEPSPEED(*"),
        ("ImportError", None, "variables.*_ACCELERATE_USE_MEGATRON_LM(*"),
        ("ValueError", None, "variables.fp8_ACCELERATE_USE_MEGATRON_LM(*"),
        ("NotImplementedError", None,
         "numerics.<parsed|own_parser|optimizer_settings|training_settings>(*",
         "plugins.MegatronLMPlugin_set_all_logging_options(*"),
        ("", "ValueError", "merging.fsdp2(*load_full*")],
    "`FullyShardedDataParallelPlugin(module_precision=)`": [
        ("", "", "plugins.FullyShardedDataParallelPlugin_backward_prefetch_2(value=*",
         "variables.fsdp2_FSDP_<FORWARD|BACKWARD>_PREFETCH*"),
        ("", "ValueError", "plugins.FullyShardedDataParallelPlugin_backward_prefetch_2(value=*",
         "plugins.FullyShardedDataParallelPlugin_forward_prefetch_2(value=1)*",
         "variables.fsdp2_FSDP_<FORWARD|BACKWARD>_PREFETCH*")],
    "`FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=8)`": [
        ("", "ValueError", "plugins.FullyShardedDataParallelPlugin_reshard_after_forward_2(value=2)*")],
    "Warnings, `warning_once` too, name the line": [
        ("", "", "preparing.setups(run='<simple_command|several> --tee 3 --log_dir d*variables*",
         "preparing.variables_of_options(given='log_dir=*")],
    "`reshard_after_forward` of an FSDP 1 plugin": [
        ("", "", "plugins.FullyShardedDataParallelPlugin_reshard_after_forward_1(*")],
    "`activation_checkpointing_offload` works with FSDP version 1": [("", "ValueError", "variables.checkpointing_*")],
    "`MegatronLMPlugin(recompute_activations=True)`": [
        ("", "", "plugins.MegatronLMPlugin_recompute_*", "variables.megatron_MEGATRON_LM_RECOMPUTE_*")],
    "`MegatronLMPlugin.context_parallel_size` is 1": [
        ("", "", "plugins.MegatronLMPlugin_context_parallel_size(value=None)*")],
    "Plugins, configurations and placeholders of engines": [
        ("ImportError", "ModuleNotFoundError", "plain.deepspeed_map_pytorch_*"),
        (None, "NameError", "numerics.without_megatron(*"),
        (None, "PackageNotFoundError", "engines.<active_plugin|plugin_actions>(*"),
        ("", None, "engines.active_plugin(plugins=one*select=True)*"),
        (None, "ImportError", "numerics.fp8_recipe(backend='<msamp|MSAMP>'*")],
    "fp8 with MS-AMP raises": [
        ("NotImplementedError", "", "words.handlers(handlers=msamp, precision='fp8')*",
         "variables.fp8_ACCELERATE_FP8_BACKEND(value='MSAMP')*")],
    "An argument of a wrong type, or a word that is unknown,": [
        (None, "ImportError", "numerics.without_transformer_engine(*model=nothing)*"),
        ("ValueError", None, "engines.active_plugin(*", "accelerator.arguments(*rng_types)*",
         "checkpoints.places(folder=None, method='save_state')*"),
        ("", "ValueError", "engines.active_plugin(plugins=bare*",
         "words.accelerator_gradient_accumulation_steps(value=True)*"),
        ("TypeError", None, "words.handlers(handlers=<text|texts|number|base|class|accumulation>, *",
         "words.accelerator_*(value=<'nonsense'|1|text|number>)*", "loaders.kinds*(source=<none|list|dataset>*",
         "accelerator.arguments(*"),
        ("ValueError", "", "words.handlers(handlers=two recipes, precision='fp8')*",
         "words.accelerator_<rng_type|gradient_accumulation_step>s(*"),
        ("ValueError", "AttributeError", "words.accelerator_dynamo_backend(value=1)*",
         "numerics.fp8_recipe(backend=1,*"),
        ("", "ImportError", "words.accelerator_deepspeed_plugins(value={})*"),
        (None, None, "configs.basic_config(precision=None, *",
         "<launches.notebook|launches.debug_counts|utilities.starting_badly|schedules.local_sgd_of>(*"),
        ("TypeError", "RuntimeError", "stepping.reduce(value='mixed',*")],
    "An empty variable is as if it were not set.": [
        ("ValueError", None, "variables.*(value='<x|nonsense|auto|2|3|0|-1|07|2.5|1e3>')*",
         "variables.*_TORCH_DEVICE(value='*", "variables.*_MIXED_PRECISION(value='fp32')*"),
        ("", None, "variables.*(value='')*"), ("", "", "variables.*_ACCELERATE_MIXED_PRECISION(value='*"),
        (None, None, "variables.*_ACCELERATE_GRADIENT_ACCUMULATION_STEPS(value='*",
         "environments.get_cpu_distributed_information(*value='', *"),
        (None, "ValueError", "variables.*_ACCELERATE_FP8_BACKEND(value='*")],
    "`ACCELERATE_USE_FSDP`, `ACCELERATE_USE_DEEPSPEED` and the like take every spelling": [
        ("", None, "variables.*(value='<1|yes|on>')*")],
    "`LOCAL_RANK` without `WORLD_SIZE`": [
        ("", "ValueError", "<variables.*_LOCAL_RANK|words.partial_backend>(*", "variables.*_WORLD_SIZE(value='x')*"),
        ("", "ModuleNotFoundError", "variables.*_ACCELERATE_USE_SAGEMAKER(*")],
    '`mixed_precision="fp16"` scales gradients on the CPU, too.': [
        ("", "", "words.accelerator_mixed_precision(value='<fp|FP>16')*")],
    "`Accelerator(split_batches=True)` works": [
        ("", "", "words.accelerator_split_batches(*", "accelerator.arguments(*split_batches)*")],
    '`log_with="all"` without a folder': [("", "", "words.accelerator_log_with(value=*'all'*")],
    "Folders and indices of offloaded weights are made where they are missing": [
        ("ValueError",
         "AttributeError or TypeError or IndexError or RuntimeError or ZeroDivisionError or OverflowError",
         "modeling.*", "placing.*", "offload.*", "loading.*", "hooks.*", "dispatching.*", "sharding.*"),
        ("ValueError", "", "<modeling.convert_file_size_to_int|placing.get_max_memory>(*",
         "placing.get_balanced_memory(*{0: -1,*", "placing.infer_auto_device_map(*max_memory={0: <-1|None>,*",
         "offload.set_value(*dtype='x')*", "offload.align_module_device(*'nothing'*",
         "dispatching.dispatch_model(device_map='*"),
        ("TypeError", None, "offload.set_value(*dtype=5)*", "offload.*",
         "pla<cing.clean_device_map|in.modeling_get_module_leaves>(*", "loading.load_state_dict(*'auto'*",
         "hooks.hooked_calls(hook=cpu, *"),
        ("AttributeError", None, "<plain.modeling_get_module_leaves|offload.load_offloaded_weight>(*"),
        ("", "ValueError", "modeling.convert_file_size_to_int(*"),
        ("", "FileNotFoundError", "offload.*", "dispatching.*", "loading.*"),
        ("ValueError", "FileNotFoundError", "offload.*", "loading.quantize_and_offload_8bit(*"),
        ("ValueError", "JSONDecodeError", "loading.*'broken index'*"),
        ("ValueError", "NotImplementedError", "offload.set_value(*value='itself', dtype='x')*")],
    "`remove_non_persistent` of": [
        ("", "", "modeling.named_module_tensors(*recurse=True, remove_non_persistent=True)*")],
    "A module or parameter that is in one parent": [
        ("", "IndexError", "*model=shared,*", "*model=*", "placing.placement(*")],
    "Edge cases work with big models, too": [
        ("", None, "placing.clean_device_map(*module_name=None)*", "offload.odd_weights(weight=parameter, *",
         "offload.extract_submodules_state_dict(*?None?)*", "loading.<load_state_dict|about_quantizing>(*",
         "dispatching.load_checkpoint_and_dispatch(*device_map='<none|meta>'*", "loading.*device_map='meta'*",
         "hooks.hooked_calls(hook=cpu, *"),
        ("RuntimeError", None, "dispatching.load_checkpoint_and_dispatch(*device_map='none', meta=True*"),
        ("", "AttributeError", "placing.check_device_map(*"), ("", "", "offload.extract_submodules_state_dict(*"),
        ("", "RuntimeError", "loading.replace_with_bnb_layers(model=*meta*")],
    "`fallback_allocation` takes budgets that are floats": [
        ("", "RuntimeError", "placing.*"), ("", "", "placing.get_balanced_memory(*low_zero=True)*"),
        ("", "AttributeError", "placing.*")],
    "A module tied by two weights counts once.": [
        ("", "CountedTwice", "placing.placement(*"), ("", "TieBroken", "placing.placement(*")],
    "Buffers of a module that a device map splits": [("", "NoDevice", "placing.placement(*")],
    "Entries of a device map that name tensors": [("", "", "placing.check_device_map(*")],
    "`set_module_tensor_to_device(dtype=...)` casts without": [
        ("", "", "offload.set_value(*value='none', *"), ("", "RuntimeError", "offload.set_value(*dtype='bfloat16')*")],
    "`set_module_tensor_to_device` keeps a parameter a parameter": [
        ("", "", "offload.set_value(*<'cpu:0|value='parameter>'*"), ("", "RuntimeError", "offload.set_value(*")],
    "`align_module_device` finds": [("", None, "offload.align_module_device(*")],
    "`get_state_dict_offloaded_model` and": [("", "", "offload.state_of_root(*")],
    "`.dat` files appear all at once": [("ValueError", "", "offload.load_offloaded_weight(*")],
    "A tensor without data": [
        ("ValueError", "NotImplementedError", "offload.odd_weights(*", "dispatching.*")],
    "A checkpoint is checked before it is loaded": [
        ("KeyError", "SafetensorError", "offload.loader(*index='missing'*"),
        ("ValueError", None, "<loading.load_checkpoint_in_model|dispatching.load_checkpoint_and_dispatch>(*"),
        ("FileNotFoundError", None, "loading.load_checkpoint_in_model(*")],
    "`PrefixedDataset` finds": [("", "KeyError", "offload.PrefixedDataset(*")],
    '`{"": "disk"}` works': [("", "SafetensorError", "loading.*", "dispatching.*")],
    "`strict=True` raises for missing keys": [("RuntimeError", None, "loading.loaded_with(*strict=True*")],
    "A folder with both": [("", "", "loading.load_checkpoint_in_model(kind='both', *")],
    "Buffers of modules on disk are loaded": [("", "", "loading.*device_map='parts'*", "loading.*device_map='disk'*")],
    "`dtype` and `keep_in_fp32_modules` hold": [
        ("", "", "loading.loaded_*", "dispatching.load_*kind='half'*"),
        ("", "RuntimeError", "dispatching.load_*kind='half'*")],
    "The longest entry of a device map": [("", "ValueError", "loading.*", "dispatching.*device_map='nested'*")],
    "`load_and_quantize_model` runs on the CPU too": [
        ("", None, "loading.get_quantized*", "loading.quantize_and*", "loading.load_and_q*",
         "loading.loaded_with(*bnb=True)*")],
    "`nn.MultiheadAttention` and": [("", "", "loading.replace_with_bnb_layers(model=attention*")],
    "Removing a hook restores": [("", "AttributeError", "hooks.hooked_calls(*call='pickle')*")],
    "A hook that offloads and has no execution device": [("RuntimeError", None, "hooks.*")],
    "Tensors that the `weights_map` of a hook lacks": [("", "KeyError", "hooks.a*", "dispatching.cpu_offload_of(*")],
    "Tensors that a split module owns": [("", "", "hooks.attach_on_blocks(*", "dispatching.dispatch_model(*'most*")],
    "`skip_modules_pattern` of": [("", None, "hooks.attach_layerwise_casting_hooks(*")],
    "`init_on_device` takes names": [(None, "TypeError", "dispatching.init_on_device(*")],
    '`split_points="auto"` makes': [("", "ValueError", "sharding.generate*")],
    "Arguments without a batch dimension": [
        ("", "IndexError", "sharding.find_pippy_batch_size(*"),
        ("ValueError", "", "sharding.generate_device_map(*num_processes=*")],
    "`fsdp2_canonicalize_names` takes": [("", "", "sharding.fsdp2_canonicalize_names(*")],
    "`size_based_wrap` shards": [
        ("", None, "sharding.fsdp2_*size_based*", "sharding.fsdp2_*SIZE_BASED*", "sharding.*declared='Linear')*")],
    "`fsdp2_switch_optimizer_parameters` takes": [("", "KeyError", "sharding.fsdp2_switch_*")],
    "`save_fsdp_model` and its like": [("", None, "merging.unsharded_checkpoints(*")],
    "`merge_fsdp_weights` makes": [
        ("", None, "merging.merge_*"), ("ValueError", None, "merging.merge_*")],
    "Activation checkpointing wraps": [("", None, "merging.fsdp2(*prepare_model*")],
    "Choices are case-insensitive": [
        ("", "SystemExit", "launching.options(given='<*=*[A-Z|fp8_*=[ho>]*')*",
         "preparing.variables_of_options(given='*=*[A-Zho]*')*",
         "commands.lines(given='<env --config-file f')|tpu --tpu-name n')|config default --mixed->*"),
        ("", "", "launching.options(given='dynamo_backend=torhchxla_trace_once')*",
         "preparing.variables_of_options(given='megatron_lm_*=[fF]*')*"),
        (None, "", "launching.options(given='<megatron_lm_*|parallelism_config_sp_seq_length_is_variable>=*')*"),
        ("SystemExit", None, "launching.options(given='fp8_override_linear_precision=*')*",
         "preparing.variables_of_options(given='fp8_override_*"),
        ("SystemExit", "", "commands.lines(given='* --config f')*"),
        ("", "ValueError", "preparing.prepare_for_launch_words(kind='*')*")],
    "`accelerate config --config_file FILE default`": [("", "", "commands.lines(given='config --config_file f *')*")],
    "`accelerate launch --help` lists all options": [("", "", "launching.help_formatter(*")],
    "Environments that `accelerate.utils.launch` prepares": [
        ("", "", "preparing.setups(run='<* --cpu|deepspeed *_nvme_path |deepspeed *openmpi|deepspeed *mvapich>*",
         "preparing.variables_of_options(given='<*_nvme_path=|parallelism_config_sp_size=2>*"),
        (None, None, "preparing.setups(run='deepspeed *_<launcher what|inclusion_filter a *_exclusion_filter b>')*")],
    "`prepare_multi_gpu_env` refuses a number of processes": [
        (None, None, "preparing.setups(run='several TWO --num_processes ?')*",
         "preparing.variables_of_options(given='num_machines=2')*")],
    "`estimate-memory` has an inference column": [
        (None, None, "commands.empty_model(library=None, *", "commands.gathered(*")],
    "A script, module or program that is not there": [("LaunchError", None, "launches.scripts(*")],
    "`tpu-config` says which of name and zone is missing": [
        ("LaunchError", "ModuleNotFoundError", "launches.number(name='tpu_pod')*"),
        (None, "TypeError", "commands.tpu_command(*"),
        ("LaunchError", "FileNotFoundError", "commands.tpu_command(line='--command_file none.txt', *"),
        ("", "ValueError", "commands.tpu_command(line='--install_accelerate*")],
    "`--mpirun_hostfile` reads host files of every MPI": [
        ("", "OSError", "preparing.variables_of_options(given='mpirun_hostfile=*")],
    "Unknown keys, wrong types and empty configuration files": [
        ("LaunchError", None, "configs.loaded(content='*')*", "configs.updated(content='*",
         "launches.validated(config='*"), ("ValueError", "", "configs.loaded(content='kind <None|0>'*"),
        ("<no such case>", "", "configs.updated(content='precision what'*",
         "launches.validated(config='precision what'*")],
    "A setting without effect warns": [("", "", "launches.validated(config='fp8', *) others*")],
    "Old spellings in a file": [
        (None, None, "configs.* content='kind TPU'*", "configs.*(content='kind TPU'*",
         "configs.loaded(content='<kind False|precision False|old fp16 off>'*")],
    "A SageMaker file with `distributed_type: NO` loads": [
        ("", "ValueError", "configs.loaded(content='amazon kind NO'*")],
    "A questionnaire whose input ends": [(None, None, "configs.ended_input(*")],
    "The table of `estimate-memory` may be empty": [(None, None, "commands.<table|on_hub>(*")],
    "`accelerate env` masks secrets": [(None, None, "commands.environment(config='broken.yaml')*")],
    "`merge-weights` and `to-fsdp2` make the folder": [
        (None, None, "rewriting.merged(*", "rewriting.rewritten(line='*--output_file d/g.yaml')*")],
    "`to-fsdp2` refuses unknown strategies": [
        (None, None,
         "rewriting.converted(*, given=('fsdp_<sharding_strategy', |state_dict_type', 'LOCAL_STATE_DICT'>*",
         "rewriting.converted(*, given=('fsdp_version', *")],
    "`accelerate.test_utils`: a command ends after `timeout`": [
        (None, None, "plain.training_mocked_dataloaders*(*"),
        (None, None, "testing.requirements(name='slow', variables={'RUN_SLOW': '1'})*")],
    "In a run of several CPU processes the device is `cpu`": [
        ("", "", "states.*(*) device*", "<states.spelled|accelerator.arguments>(*")],
    "`ThreadLocalSharedDict(thread_local=False)`": [("", "", "states.thread_local(thread_local=<Fals|Non>e)*")],
    "A length, total or remainder that upstream's sharded loaders": [
        ("", "", "loaders.kinds*(source=<weighted|batch sampler|*stream|own batches>,*",
         "loops.built(*skip_batches*")],
    "Numbers that mean nothing raise `ValueError`": [
        (None, None, "samplers.batch_sampler_ranks(*", "checkpoints.naming(*limit=0,*"),
        ("ValueError", "", "loops.skipped_odd(skip=-1,*",
         "accelerator.arguments(given=? gradient_accumulation_steps)*"),
        ("SystemExit", "", "<launching.|preparing.variables_of_>options(given='num_processes=-1')*")],
    "A batch sampler whose batches contradict": [(None, None, "samplers.batch_sampler_kinds(*")],
    "Edge cases work: `split_between_processes`": [
        ("", None, "stepping.split(*", "loops.built(kind=SkipDataLoader, *) <device|rng_types>*"),
        (None, None, "checkpoints.places(folder=''*")],
    "`skip_first_batches` refuses more batches": [
        (None, None, "loops.skipped(*", "loops.skipped_odd(skip=<5|100>*", "loops.built(*skip_batches*")],
    "A prepared loader reports the `batch_size`": [
        ("", "", "loaders.*(*) <batch_size|drop_last>*", "loops.*(*) <batch_size|drop_last>*")],
    "Data without tensors, without batches or without samples": [
        (None, "AttributeError", "loaders.*(*) total<_batch_size|_dataset_length|s>*",
         "loops.*(*) total_<batch_size|dataset_length>*"),
        ("", "ValueError", "loaders.dispatched(*", "loops.built(kind=DataLoaderDispatcher,*"),
        ("", "TypeError", "loaders.dispatched(*"),
        (None, None, "l*.*(source=*no batches*", "loaders.*(source=collate*",
         "loops.skipped(source='collate'*kind='dispatched')*", "loops.built(*'batch_size': None*")],
    "`get_sampler` finds the sampler of a sharded loader.": [
        ("", "", "loops.built(<kind=SkipDataLoader,|*dataset=empty) iteration>*"),
        ("", "AttributeError", "loops.built(kind=SkipDataLoader, *) iteration*")],
    "A dispatched loader with the user's generator": [
        ("", "", "loaders.kinds(source=shuffled generator, dispatch=True*")],
    "`prepare()` of nothing": [("ValueError", None, "accelerator.prepare_placement(count=0*")],
    "`reduce` averages integers": [("", "RuntimeError", "stepping.reduce(*'mean'*")],
    "Megatron-LM trains Llama and GPT-2": [
        ("", "", "numerics.parsed(parser='llama', kind='llama'*"),
        # The probe's configurations lack fields that a configuration of transformers has.
        ("AttributeError", "", "numerics.parsed(parser='gpt2', kind='gpt2'*",
         "numerics.parsed(parser='llama', kind=<'bert'|'megatron-bert'|'nonsense'>*")],
    "A parser that `add_model_config_to_megatron_parser` registers": [("", "ValueError", "numerics.own_parser(*")],
    "`gather_object` and `gather_for_metrics` keep a dictionary": [
        ("", "", "stepping.gather_objects(given={'a': 1})*", "collectives.gather_object(value=*dict*)*",
         "collectives.gather_object(value=<nested|empty inside>)*"),
        ("TypeError", "", "stepping.gather_objects(given='ab')*", "collectives.gather_object(value=*text)*",
         "collectives.gather_object(value=bytes)*")],
    "`join_uneven_inputs` works on CPU": [("ValueError", "", "stepping.join(*what='none')*")],
    "`load_state` returns which checkpoint it loaded.": [("", "", "checkpoints.*(*) <returne|loa>d*")],
    "After `load_state`, a loader continues": [("", "", "checkpoints.going_on(*")],
    "A schedule resumed on another number of replicas": [("", "", "checkpoints.saved(*) random_states_*.pkl*")],
    "Each rank saves the state of its stateful": [("", "", "checkpoints.saved(*stateful=True) random_states_1.pkl*")],
    "A folder's name that is a file": [("NotADirectoryError", None, "checkpoints.<model_|>places(folder='file'*")],
    "`accelerate_manifest.json`, with a part of each rank": [
        ("DamagedCheckpoint", None, "checkpoints.places(folder='empty', method='load_state')*")],
    "A value that a tracker cannot log": [("", None, "trackers.log(*")],
    "TensorBoard gets a nested configuration": [("", None, "trackers.configuration(tracker='TensorBoardTracker',*")],
    "Configuration values that Aim or DVCLive cannot store": [("", None, "trackers.configuration(tracker='<AimTracker|DVCLiveTracker>',*")],
    "Functions for nested data take every mapping": [
        (None, None, "operations.*value=default dict*"),
        ("", "IndexError", "operations.pad_input_tensors_otherwise(value=scalar, *")],
    "`is_torch_xpu_tensor` answers": [("", "AttributeError", "operations.is_torch_xpu_tensor(*")],
    "`pad_input_tensors` lengthens": [("", "", "operations.pad_input_tensors*(*")],
    "`gather_tensor_shape` and": [("", "", "collectives.owned(value=no rows) shape*")],
    "Helpers accept NumPy integers": [
        (None, None, "utilities.set_seed(seed=<np.int64(3|tensor(4>)*", "plain.other_is_port_in_use(*"),
        (None, "InvalidVersion", "utilities.compare_*Version(*")],
    "`check_cuda_fp8_capability` is False": [("", "AssertionError", "environments.check_cuda_fp8_capability(*")],
    "`patch_environment(name=None)` unsets": [
        ("", "", "environments.purge_*='coroutine'*", "environments.purge_*='generator'*")],
    "`should_reduce_batch_size` also recognises": [("", None, "utilities.should_reduce_batch_size*(*")],
    "`set_seed(device_specific=True)` continues at 0": [(None, None, "utilities.set_seed(seed=<4294967295|-1>, *")],
    "`synchronize_rng_state` takes words": [
        (None, "UnboundLocalError", "utilities.synchronize_rng_state*(*) result*")],
    "Saving to a place that is a folder": [("OSError", None, "helpers.save(*place=folder) returned*")],
    "safetensors of tensors that share memory": [
        (None, None, "helpers.save(obj=<tied|not contiguous>, *", "helpers.clean_state_dict_for_safetensors(*")],
    "`extract_model_from_parallel` removes": [
        ("", "", "modules.extract_model_from_parallel(model=own module, *recursive=True)*")],
}  # fmt: skip
MEANT = [
    Meant(row, here, there, tuple(p for pattern in patterns for p in alternatives(pattern)))
    for row, rules in ROWS.items()
    for here, there, *patterns in rules
]
