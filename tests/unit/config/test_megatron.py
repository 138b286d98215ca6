import os
import types

import pytest
import torch

from accelerate.config import megatron
from accelerate.config.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    find_parser,
)
from accelerate.config.megatron import MegatronLMPlugin as Plugin

BATCH = {"input_ids": torch.ones(2, 9, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 4, "n_positions": 16, "vocab_size": 50}
BERT = {
    "model_type": "megatron-bert",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "vocab_size": 50,
    "num_labels": 3,
}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 8, "num_heads": 4, "n_positions": 16, "vocab_size": 50}
LLAMA = {**BERT, "model_type": "llama"}
GLM = {
    **LLAMA,
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "rope_theta": 1e4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}


def model(config, name="Model"):
    made = type(name, (), {})()
    made.config = types.SimpleNamespace(return_dict=True, **config)
    return made


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MEGATRON_LM_"):
            monkeypatch.delenv(name)


def test_defaults():
    arguments = Plugin().megatron_lm_default_args
    assert arguments["tensor_model_parallel_size"] == arguments["pipeline_model_parallel_size"] == 1
    assert arguments["context_parallel_size"] == arguments["num_micro_batches"] == 1
    assert (arguments["DDP_impl"], arguments["clip_grad"], arguments["sequence_parallel"]) == ("torch", 1.0, False)
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("full", "uniform")
    assert "tensorboard_dir" not in arguments


@pytest.mark.parametrize(
    ("variable", "text", "argument", "value"),
    [
        ("TP_DEGREE", "4", "tensor_model_parallel_size", 4),
        ("CONTEXT_PARALLEL_SIZE", "2", "context_parallel_size", 2),
        ("GRADIENT_CLIPPING", "0.3", "clip_grad", 0.3),
        ("SEQUENCE_PARALLELISM", "true", "sequence_parallel", True),
        ("ATTENTION_BACKEND", "false", "attention_backend", False),
        ("RECOMPUTE_GRANULARITY", "selective", "recompute_granularity", "selective"),
    ],
)
def test_environment(monkeypatch, variable, text, argument, value):
    monkeypatch.setenv(f"MEGATRON_LM_{variable}", text)
    assert Plugin().megatron_lm_default_args[argument] == value


def test_bad_environment(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_HIDDEN_DROPOUT", "much")
    with pytest.raises(ValueError, match="MEGATRON_LM_HIDDEN_DROPOUT is 'much'"):
        Plugin()


def test_recomputed_activations_are_selective():
    plugin = Plugin(recompute_activations=True)
    assert plugin.megatron_lm_default_args["recompute_granularity"] == "selective"
    assert plugin.megatron_lm_default_args["recompute_method"] is None


@pytest.mark.parametrize("options", [{"pp_degree": 2}, {"use_distributed_optimizer": True}])
def test_own_wrapper(options):
    assert Plugin(**options).megatron_lm_default_args["DDP_impl"] == "local"


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), ([5], [5, 0, 0]), ((5, 6), [5, 6, 0]), ([1, 2, 3], [1, 2, 3]), ([], [])]
)
def test_consumed_samples_are_completed(given, kept):
    plugin = Plugin(consumed_samples=given)
    assert plugin.consumed_samples == plugin.megatron_lm_default_args["consumed_samples"] == kept


def test_consumed_samples_are_a_list():
    with pytest.raises(TypeError, match="consumed_samples is 5"):
        Plugin(consumed_samples=5)


def test_other_arguments_win():
    plugin = Plugin(other_megatron_args={"clip_grad": 9.0, "extra": 1})
    assert plugin.megatron_lm_default_args["clip_grad"] == 9.0
    assert plugin.megatron_lm_default_args["extra"] == 1


def test_logging_options(monkeypatch):
    assert Plugin(tensorboard_dir="logs").megatron_lm_default_args["tensorboard_dir"] == "logs"
    with pytest.warns(UserWarning, match="tensorboard_dir"):
        Plugin(set_all_logging_options=True)
    monkeypatch.setattr(megatron, "is_megatron_lm_available", lambda: False)
    with pytest.raises(ImportError, match="Megatron-LM"):
        Plugin(tensorboard_dir="logs", set_all_logging_options=True)


def test_precision():
    plugin = Plugin()
    plugin.set_mixed_precision("no")
    assert not {"fp16", "bf16"} & set(plugin.megatron_lm_default_args)
    plugin.set_mixed_precision("bf16")
    assert plugin.megatron_lm_default_args["bf16"] is True
    assert plugin.megatron_lm_default_args["DDP_impl"] == plugin.DDP_impl == "local"


def test_batch_sizes():
    plugin = Plugin(num_micro_batches=8)
    plugin.set_training_args(micro_batch_size=4, dp_degree=2)
    assert plugin.megatron_lm_default_args["global_batch_size"] == plugin.global_batch_size == 64


def test_optimizers():
    parameters = [torch.nn.Parameter(torch.ones(1))]
    plugin = Plugin()
    plugin.set_optimizer_type(torch.optim.AdamW(parameters, lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3))
    arguments = plugin.megatron_lm_default_args
    assert (arguments["optimizer"], arguments["lr"], arguments["weight_decay"]) == ("adam", 0.1, 0.3)
    assert (arguments["adam_beta1"], arguments["adam_beta2"], arguments["adam_eps"]) == (0.8, 0.9, 1e-5)
    plugin.set_optimizer_type(torch.optim.SGD(parameters, lr=0.2, momentum=0.5))
    assert (arguments["optimizer"], arguments["sgd_momentum"], arguments["lr"]) == ("sgd", 0.5, 0.2)
    with pytest.raises(ValueError, match="Adagrad"):
        plugin.set_optimizer_type(torch.optim.Adagrad(parameters))


def scheduler(total=100, warmup=10):
    return types.SimpleNamespace(total_num_steps=total, warmup_num_steps=warmup)


def scheduled(**options):
    plugin = Plugin(**options)
    plugin.set_training_args(micro_batch_size=1, dp_degree=2)
    plugin.set_scheduler_args(scheduler())
    return plugin.megatron_lm_default_args


def test_schedule_counts_steps_of_all_replicas():
    arguments = scheduled(lr_decay_style="cosine")
    assert (arguments["train_iters"], arguments["lr_warmup_iters"], arguments["lr_decay_style"]) == (50, 5, "cosine")
    assert arguments["train_samples"] is None


def test_own_schedule_stays():
    arguments = scheduled(train_iters=7, lr_warmup_iters=3)
    assert (arguments["train_iters"], arguments["lr_warmup_iters"]) == (7, 3)
    arguments = scheduled(lr_warmup_fraction=0.5)
    assert (arguments["lr_warmup_fraction"], arguments["lr_warmup_iters"]) == (0.5, 0)


def test_samples_next_to_a_scheduler_are_ignored_aloud():
    with pytest.warns(UserWarning, match="train_samples=50 is ignored"):
        assert scheduled(train_samples=50)["train_samples"] is None
    with pytest.warns(UserWarning, match="lr_warmup_samples=4 is ignored"):
        assert scheduled(lr_warmup_samples=4)["lr_warmup_samples"] == 0


def test_schedule_without_lengths():
    with pytest.raises(ValueError, match="set_training_args"):
        Plugin().set_scheduler_args(scheduler())
    plugin = Plugin()
    plugin.set_training_args(1, 1)
    with pytest.raises(ValueError, match="total_num_steps"):
        plugin.set_scheduler_args(scheduler(total=None))


@pytest.mark.parametrize("config", [GPT2, BERT, LLAMA, GLM])
@pytest.mark.parametrize(
    ("options", "batch", "length"), [({}, BATCH, 9), ({}, None, 16), ({"seq_length": 7}, BATCH, 7)]
)
def test_sequence_length(config, options, batch, length):
    plugin = Plugin(**options)
    plugin.set_network_size_args(model(config), batch)
    assert plugin.seq_length == plugin.megatron_lm_default_args["seq_length"] == length


@pytest.mark.parametrize(("config", "name"), [(GPT2, "decoder_seq_length"), (BERT, "encoder_seq_length")])
def test_specific_length_wins_aloud(config, name):
    plugin = Plugin(seq_length=7, **{name: 4})
    with pytest.warns(UserWarning, match=f"{name}=4"):
        plugin.set_network_size_args(model(config), BATCH)
    assert plugin.seq_length == 4


def test_t5_has_two_lengths():
    plugin = Plugin()
    plugin.set_network_size_args(model(T5), BATCH)
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == (9, 5)
    plugin = Plugin(decoder_seq_length=3)
    plugin.set_network_size_args(model(T5))
    arguments = plugin.megatron_lm_default_args
    assert (arguments["encoder_seq_length"], arguments["decoder_seq_length"]) == (16, 3)


@pytest.mark.parametrize("config", [GPT2, BERT, LLAMA, T5])
def test_sizes(config):
    plugin = Plugin()
    plugin.set_network_size_args(model(config), BATCH)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["num_layers"], arguments["hidden_size"], arguments["num_attention_heads"]) == (2, 8, 4)
    assert (arguments["orig_vocab_size"], arguments["max_position_embeddings"]) == (50, 16)
    assert arguments["model_return_dict"] is True


@pytest.mark.parametrize(("name", "pretrains"), [("BertForMaskedLM", True), ("BertForSequenceClassification", False)])
def test_bert_pretrains_with_masked_words(name, pretrains):
    plugin = Plugin()
    plugin.set_network_size_args(model(BERT, name))
    assert plugin.megatron_lm_default_args["pretraining_flag"] is pretrains


def test_mixture_of_experts():
    plugin = Plugin()
    plugin.set_network_size_args(model(GLM))
    arguments = plugin.megatron_lm_default_args
    assert arguments["moe_layer_freq"] == [0, 1, 1]
    assert (arguments["num_experts"], arguments["moe_router_topk"], arguments["kv_channels"]) == (6, 2, 2)
    assert arguments["moe_shared_expert_intermediate_size"] == 24
    assert arguments["untie_embeddings_and_output_weights"] is True
    assert arguments["eos_token_id"] == 7
    assert "fp8" not in arguments


def test_own_parser(monkeypatch):
    monkeypatch.setattr("accelerate.config.megatron.MODEL_CONFIGS_TO_MEGATRON_PARSERS", {})
    with pytest.raises(ValueError, match="model_type is 'tiny'"):
        find_parser("tiny")

    @add_model_config_to_megatron_parser("tiny")
    def parse(plugin, model, batch_data):
        plugin.megatron_lm_default_args["num_layers"] = model.config.depth

    plugin = Plugin()
    plugin.set_network_size_args(model({"model_type": "Tiny2", "depth": 5}))
    assert plugin.megatron_lm_default_args["num_layers"] == 5


def test_the_longest_fitting_name_wins(monkeypatch):
    monkeypatch.setitem(MODEL_CONFIGS_TO_MEGATRON_PARSERS, "llama4", "new")
    assert find_parser("llama4_text") == "new"
    assert find_parser("llama").__name__ == "parse_llama_config"
