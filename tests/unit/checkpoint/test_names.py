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
    assert (names.custom_file(0), names.scaler_file()) == ("custom_checkpoint_0.pkl", "scaler.pt")
    assert names.random_states_file(3) == "random_states_3.pkl"


@pytest.mark.parametrize(
    ("folder", "number"),
    [("checkpoint_3", 3), ("a/b/checkpoint_10/", 10)]
    + [(name, None) for name in ("checkpoint_", "checkpoint_3_old", "best_checkpoint_3", "checkpoint_-1", "a")],
)
def test_folders(folder, number):
    assert names.number_of(folder) == number
    assert names.numbered_folder(4) == "checkpoint_4"
