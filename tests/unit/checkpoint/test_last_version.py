"""What the version before this layout of the package wrote on two ranks, whole under DDP and sharded under FSDP2, loads here."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelerate import Accelerator

LAST = Path(__file__).parents[2] / "fixtures" / "last_version"


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_it_loads(kind):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=2, shuffle=True)
    accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.load_state(LAST / kind)
    expected = load_file(LAST / "whole" / "model.safetensors")
    torch.testing.assert_close(dict(model.state_dict()), expected)  # both runs trained on the same samples
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.025 and {float(kept["step"]) for kept in state["state"].values()} == {
        2.0
    }
    assert all(kept["exp_avg"].abs().max() > 0 for kept in state["state"].values())
