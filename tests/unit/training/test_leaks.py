"""What a run leaves behind: nothing."""

import pytest
import torch

from accelerate import Accelerator, DataLoaderConfiguration
from leaks import held, left_behind

DISPATCHES = DataLoaderConfiguration(dispatch_batches=True)


@pytest.mark.parametrize(
    "options", [{}, {"mixed_precision": "fp16", "dataloader_config": DISPATCHES}, {"log_with": "tensorboard"}]
)
def test_free_memory_and_another_accelerator_leave_nothing(tmp_path, options):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, **options)
    accelerator.init_trackers("run")
    former = len(held())
    assert left_behind(accelerator, str(tmp_path / "state")) == []
    other = Accelerator()
    assert left_behind(other, str(tmp_path / "state")) == []
    accelerator.end_training()
    del accelerator, other
    assert len(held()) == former and not torch.distributed.is_initialized()
