"""Names of files and folders."""

import pytest

from accelerate.checkpoint import names


def test_files():
    assert [names.model_file(i) for i in (0, 1)] == ["model.safetensors", "model_1.safetensors"]
    assert [names.model_file(i, False) for i in (0, 1)] == ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert [names.optimizer_file(i) for i in (0, 2)] == ["optimizer.bin", "optimizer_2.bin"]
    assert [names.scheduler_file(i) for i in (0, 1)] == ["scheduler.bin", "scheduler_1.bin"]
    assert [names.dataloader_file(i) for i in (0, 1)] == ["dl_state_dict.bin", "dl_state_dict_1.bin"]
    assert names.dataloader_file(1, 3) == "rank3_dl_state_dict_1.bin"
    assert names.custom_file(0) == "custom_checkpoint_0.pkl"
    assert names.random_states_file(3) == "random_states_3.pkl"
    assert names.scaler_file() == "scaler.pt"


@pytest.mark.parametrize(
    ("folder", "number"),
    [
        ("checkpoint_3", 3),
        ("a/b/checkpoint_10/", 10),
        ("checkpoint_", None),
        ("checkpoint_3_old", None),
        ("best_checkpoint_3", None),
        ("checkpoint_-1", None),
        ("a", None),
    ],
)
def test_numbers(folder, number):
    assert names.number_of(folder) == number


def test_folders():
    assert names.checkpoints_folder("project") == "project/checkpoints"
    assert names.numbered_folder(4) == "checkpoint_4"
