import types

import pytest
import torch

from accelerate.extensions.megatron import steps
from accelerate.extensions.megatron.plugin import MegatronLMPlugin as Plugin
from accelerate.extensions.megatron.plugin import is_megatron_lm_available
from accelerate.utils import MegatronLMDummyScheduler
from installed import forget


def test_arguments():
    plugin = Plugin(recompute_activations=True, consumed_samples=[5], tensorboard_dir="logs")
    arguments = plugin.megatron_lm_default_args
    assert (arguments["recompute_granularity"], arguments["recompute_method"]) == ("selective", None)
    assert arguments["consumed_samples"] == [5, 0, 0] and arguments["tensorboard_dir"] == "logs"
    assert Plugin(other_megatron_args={"lr": 1}).megatron_lm_default_args["lr"] == 1


def llama(**sizes):
    given = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    given |= {"vocab_size": 61, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "intermediate_size": 64}
    return types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama", **given | sizes))


def test_sizes_are_read_and_other_arguments_win():
    plugin = Plugin(other_megatron_args={"ffn_hidden_size": 7})
    plugin.set_network_size_args(llama(intermediate_size=64))
    found = plugin.megatron_lm_default_args
    assert (found["num_layers"], found["num_query_groups"], found["orig_vocab_size"]) == (2, 2, 61)
    assert found["ffn_hidden_size"] == 7


@pytest.mark.parametrize("kind", ["megatron-bert", "t5", "glm4_moe", "falcon"])
def test_other_models_are_refused_with_a_way_out(kind):
    with pytest.raises(NotImplementedError, match=f"types llama, gpt2 here, and this one is a '{kind}'.*FullySharded"):
        Plugin().set_network_size_args(types.SimpleNamespace(config=types.SimpleNamespace(model_type=kind)))


@pytest.mark.parametrize(
    "setting",
    [{"context_parallel_size": 2}, {"use_custom_fsdp": True}, {"megatron_dataset_flag": True}, {"lr_mult": 2.0}],
)
def test_settings_without_effect_are_refused(setting):
    with pytest.raises(NotImplementedError, match=f"{next(iter(setting))}=.*is not possible here"):
        Plugin(**setting).refuse_unused()
    Plugin(tp_degree=2, sequence_parallelism=True).refuse_unused()


def test_batches_optimizers_and_schedules():
    plugin, weights = Plugin(num_micro_batches=3), [torch.nn.Parameter(torch.zeros(1))]
    plugin.set_training_args(4, 2)
    assert plugin.global_batch_size == 24
    plugin.set_optimizer_type(torch.optim.AdamW(weights, lr=0.5, betas=(0.1, 0.2)))
    found = plugin.megatron_lm_default_args
    assert (found["optimizer"], found["lr"], found["adam_beta2"]) == ("adam", 0.5, 0.2)
    for refused in (torch.optim.Adagrad(weights), torch.optim.AdamW(weights, amsgrad=True)):
        with pytest.raises(ValueError, match="Adam, AdamW or SGD"):
            plugin.set_optimizer_type(refused)
    with pytest.raises(ValueError, match="use_distributed_optimizer=True with SGD"):
        Plugin(use_distributed_optimizer=True).set_optimizer_type(torch.optim.SGD(weights))
    plugin.set_scheduler_args(MegatronLMDummyScheduler(None, total_num_steps=11, warmup_num_steps=3))
    assert (found["lr_decay_iters"], found["lr_warmup_iters"]) == (6, 2)
    with pytest.raises(ValueError, match="total_num_steps"):
        plugin.set_scheduler_args(MegatronLMDummyScheduler(None))
    with pytest.raises(ValueError, match="bf16"):
        plugin.set_mixed_precision("fp8")
    with pytest.raises(NotImplementedError, match="log_with"):
        plugin.set_tensorboard_logging_options()


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(steps, "is_megatron_lm_available", lambda: False)
    with pytest.raises(NotImplementedError, match="torch DataLoader"):
        steps.MegatronLMDummyDataLoader().set_megatron_data_args()
    with pytest.raises(ImportError, match=r"Accelerator\.reduce"):
        steps.avg_losses_across_data_parallel_group([torch.ones(())])
    for step in (steps.BertTrainStep, steps.T5TrainStep):
        with pytest.raises(NotImplementedError, match="types llama, gpt2 here"):
            step(None, None)


def test_a_step_of_ones_own():
    functions = dict.fromkeys(("get_batch_func", "get_forward_step_func", "get_loss_func"), lambda self, *args: None)
    assert type("Mine", (steps.AbstractTrainStep,), functions)("mine").name == "mine"
    with pytest.raises(TypeError):
        steps.AbstractTrainStep("abstract")


def test_megatron_must_be_wanted_whole_and_recent(machine, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    machine.install("megatron", "megatron-core", "0.8.0")
    assert is_megatron_lm_available() is False
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert is_megatron_lm_available() is True
    machine.install("megatron", "megatron-core", "0.7.0")
    assert is_megatron_lm_available() is False
    del machine.distributions["megatron-core"]
    forget()
    with pytest.warns(UserWarning, match="ACCELERATE_USE_MEGATRON_LM is set"):
        assert is_megatron_lm_available() is False
