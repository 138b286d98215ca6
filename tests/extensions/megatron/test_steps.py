import pytest
import torch

from accelerate.extensions.megatron import steps as home


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(home, "is_megatron_lm_available", lambda: False)
    with pytest.raises(NotImplementedError, match="torch DataLoader"):
        home.MegatronLMDummyDataLoader().set_megatron_data_args()
    with pytest.raises(ImportError, match=r"Accelerator\.reduce"):
        home.avg_losses_across_data_parallel_group([torch.ones(())])
    for step in (home.BertTrainStep, home.T5TrainStep):
        with pytest.raises(NotImplementedError, match="types llama, gpt2 here"):
            step(None, None)


def test_a_step_of_ones_own():
    functions = dict.fromkeys(("get_batch_func", "get_forward_step_func", "get_loss_func"), lambda self, *args: None)
    assert type("Mine", (home.AbstractTrainStep,), functions)("mine").name == "mine"
    with pytest.raises(TypeError):
        home.AbstractTrainStep("abstract")
