import types

import pytest
import torch

from accelerate.utils import megatron_lm as home


def test_placeholders_keep_their_arguments():
    scheduler = home.MegatronLMDummyScheduler("optimizer", 10, 2, z=1)
    assert (scheduler.optimizer, scheduler.total_num_steps, scheduler.warmup_num_steps) == ("optimizer", 10, 2)
    assert scheduler.kwargs == {"z": 1}
    loader = home.MegatronLMDummyDataLoader(data_path=["a"])
    assert loader.dataset_args == {"data_path": ["a"], "megatron_dataset_flag": True}
    settings = types.SimpleNamespace(custom_megatron_datasets_provider_function=len)
    accelerator = types.SimpleNamespace(state=types.SimpleNamespace(megatron_lm_plugin=settings))
    assert loader.get_train_valid_test_datasets_provider(accelerator) is len
    settings.custom_megatron_datasets_provider_function = None
    with pytest.raises(NotImplementedError, match="custom_megatron_datasets_provider_function"):
        loader.get_train_valid_test_datasets_provider(accelerator)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(home, "is_megatron_lm_available", lambda: False)
    with pytest.raises(ImportError):
        home.MegatronLMDummyDataLoader().set_megatron_data_args()
    with pytest.raises(ImportError, match=r"Accelerator\.reduce"):
        home.avg_losses_across_data_parallel_group([torch.ones(())])
    for step in (home.BertTrainStep, home.GPTTrainStep, home.T5TrainStep):
        with pytest.raises(NotImplementedError, match=f"{step.__name__} is not available yet.*FSDP or DeepSpeed"):
            step(None, None)


def test_a_step_of_ones_own():
    class Mine(home.AbstractTrainStep):
        def get_batch_func(self, accelerator, megatron_dataset_flag):
            return "batch"

        def get_forward_step_func(self):
            return "forward"

        def get_loss_func(self, accelerator):
            return "loss"

    assert Mine("mine").name == "mine"
    with pytest.raises(TypeError):
        home.AbstractTrainStep("abstract")


def test_masks_mark_what_is_hidden():
    tokens = torch.tensor([[1, 1, 0]])
    own = home.T5TrainStep.attn_mask_postprocess(tokens)
    assert own.tolist() == [[[False, False, True], [False, False, True], [True, True, True]]]
    later = home.T5TrainStep.get_decoder_mask(3, torch.device("cpu"))
    assert later.tolist() == [[[False, True, True], [False, False, True], [False, False, False]]]
    across = home.T5TrainStep.get_enc_dec_mask(tokens, 2, torch.device("cpu"))
    assert across.tolist() == [[[False, False, True]] * 2]
