"""Megatron-LM's plugin next to its fields, its train steps' masks, and the conversions of `utils.ao` and `utils.transformer_engine`."""

import types

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import ao, dataclasses, megatron_lm, transformer_engine
from interop.differential.core import Words, probe, words
from interop.differential.probes.plugins import fields_of

PLUGIN = "utils.dataclasses:MegatronLMPlugin"
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 32,
    "vocab_size": 64,
}  # fmt: skip
CONFIGURATIONS = {
    "bert": {**SIZES, "architectures": ["BertForMaskedLM"], "num_labels": 2},
    "megatron-bert": {**SIZES, "architectures": ["MegatronBertForPreTraining"], "num_labels": 3},
    "gpt2": {
        "n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": 64,
        "architectures": ["GPT2LMHeadModel"],
    },
    "t5": {
        "num_layers": 3, "num_decoder_layers": 2, "d_model": 8, "num_heads": 2, "n_positions": 32, "vocab_size": 64,
        "architectures": ["T5ForConditionalGeneration"],
    },
    "llama": {
        **SIZES, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "intermediate_size": 16,
    }, "nonsense": dict(SIZES),
}  # fmt: skip
BATCHES = {
    "none": lambda: None, "labels": lambda: {"input_ids": torch.ones(2, 16), "labels": torch.ones(2, 12)},
    "no labels": lambda: {"input_ids": torch.ones(2, 16)},
}  # fmt: skip


def settings(plugin):
    return dict(fields_of(plugin)["megatron_lm_default_args"])


def changes(plugin, before):
    return {
        key: value for key, value in settings(plugin).items() if key not in before or repr(before[key]) != repr(value)
    }


PARSERS = ["bert", "gpt2", "t5", "llama", "glm4_moe"]


@probe(
    *[f"utils.dataclasses:parse_{name}_config" for name in PARSERS], parser=PARSERS, kind=Words(CONFIGURATIONS),
    batch={name: BATCHES[name] for name in ("none", "labels")},
)  # fmt: skip
def parsed(parser, kind, batch):
    plugin = dataclasses.MegatronLMPlugin(context_parallel_size=1)
    before = settings(plugin)
    config = types.SimpleNamespace(model_type=kind, return_dict=True, **CONFIGURATIONS[kind])
    result = getattr(dataclasses, f"parse_{parser}_config")(plugin, types.SimpleNamespace(config=config), batch)
    return [result, changes(plugin, before)]


@probe(
    "utils.dataclasses:add_model_config_to_megatron_parser", name=["tiny", "TINY", "", None, 1],
    asked=["tiny", "my-tiny-2", "TINY"],
)  # fmt: skip
def own_parser(name, asked):
    parsers = dataclasses.MODEL_CONFIGS_TO_MEGATRON_PARSERS
    known, called = dict(parsers), []
    try:
        register = dataclasses.add_model_config_to_megatron_parser(name)
        register(lambda plugin, model, batch: called.append([model.config.model_type, batch]))
        model = types.SimpleNamespace(config=types.SimpleNamespace(model_type=asked, return_dict=True))
        dataclasses.MegatronLMPlugin().set_network_size_args(model, {"a": 1})
        return [called, sorted(map(str, set(parsers) - set(known)))]
    finally:
        parsers.clear()
        parsers.update(known)


BACKENDS = words("te TE msamp MSAMP ao nonsense", None, "", 1)


@probe("utils.dataclasses:FP8RecipeKwargs", backend=BACKENDS, opt_level=words("O1 O2 O3 o1", ""))
def fp8_recipe(backend, opt_level):
    return fields_of(dataclasses.FP8RecipeKwargs(backend=backend, opt_level=opt_level))


OPTIMIZERS = {
    "adam": lambda: torch.optim.Adam(
        [nn.Parameter(torch.ones(2))], lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2,
    ), "adamw": lambda: torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
    "sgd": lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.3),
    "groups": lambda: torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.3, "weight_decay": 0.5}]),
    "rmsprop": lambda: torch.optim.RMSprop([nn.Parameter(torch.ones(2))]), "nothing": lambda: None,
}  # fmt: skip


@probe(PLUGIN, optimizer=OPTIMIZERS)
def optimizer_settings(optimizer):
    plugin = dataclasses.MegatronLMPlugin(context_parallel_size=1)
    before = settings(plugin)
    plugin.set_optimizer_type(optimizer)
    return changes(plugin, before)


@probe(PLUGIN, batch=[0, 1, 4, None], degree=[0, 1, 2, None], micro=[None, 2])
def training_settings(batch, degree, micro):
    plugin = dataclasses.MegatronLMPlugin(context_parallel_size=1, num_micro_batches=micro)
    before = settings(plugin)
    plugin.set_training_args(batch, degree)
    return [changes(plugin, before), plugin.data_parallel_size, plugin.micro_batch_size, plugin.global_batch_size]


@probe(
    "utils.megatron_lm:MegatronLMDummyDataLoader", "utils.megatron_lm:avg_losses_across_data_parallel_group",
    "utils.megatron_lm:BertTrainStep", "utils.megatron_lm:GPTTrainStep", "utils.megatron_lm:T5TrainStep",
    do=["set_megatron_data_args", "provider", "iterators", "losses", "BertTrainStep", "GPTTrainStep", "T5TrainStep"],
)  # fmt: skip
def without_megatron(do):
    accelerator, data = Accelerator(), megatron_lm.MegatronLMDummyDataLoader()
    does = {
        "set_megatron_data_args": data.set_megatron_data_args,
        "provider": lambda: data.get_train_valid_test_datasets_provider(accelerator),
        "iterators": lambda: data.build_train_valid_test_data_iterators(accelerator),
        "losses": lambda: megatron_lm.avg_losses_across_data_parallel_group([torch.ones(1)]),
    }
    made = does[do]() if do in does else getattr(megatron_lm, do)(accelerator, types.SimpleNamespace())
    return type(made).__name__


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 16)
        self.blocks = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.odd = nn.Linear(16, 7)
        self.head = nn.Linear(7, 16)


MODELS = {
    "named": Named, "one": lambda: nn.Linear(16, 16), "in one": lambda: nn.Sequential(nn.Linear(16, 16)),
    "two": lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "none": lambda: nn.Sequential(nn.ReLU()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(7)), "nothing": lambda: None,
    "meta": lambda: nn.Sequential(
        nn.Linear(16, 16, device="meta"), nn.Linear(16, 16, device="meta"), nn.Linear(16, 16, device="meta"),
    ),
}  # fmt: skip


def kinds(model):
    return {name: type(part).__name__ for name, part in model.named_modules()}


@probe("utils.ao:filter_first_and_last_linear_layers", model=MODELS)
def ao_first_and_last(model):
    return {name: ao.filter_first_and_last_linear_layers(part, name) for name, part in model.named_modules()}


@probe(
    "utils.ao:convert_model_to_fp8_ao", "utils.imports:torchao_required", model=MODELS,
    function=[None, lambda module, name: False],
)  # fmt: skip
def ao_converted(model, function):
    result = ao.convert_model_to_fp8_ao(model, module_filter_func=function)
    return [result is None, kinds(model), ao.has_ao_layers(model)]


TRANSFORMER_ENGINE = [
    f"utils.transformer_engine:{name}"
    for name in ("convert_model", "has_transformer_engine_layers", "apply_fp8_autowrap", "contextual_fp8_autocast")
]


@probe(
    *TRANSFORMER_ENGINE,
    function=["convert_model", "has_transformer_engine_layers", "apply_fp8_autowrap", "contextual"], model=MODELS,
)  # fmt: skip
def without_transformer_engine(function, model):
    if function == "apply_fp8_autowrap":
        return kinds(transformer_engine.apply_fp8_autowrap(model, None))
    if function == "contextual":
        return type(transformer_engine.contextual_fp8_autocast(lambda x: x, None)).__name__
    return getattr(transformer_engine, function)(model)
