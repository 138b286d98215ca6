"""What a run leaves behind when it lets go: tensors, modules and optimizers, as Python's garbage collector counts them."""

import gc
from typing import Any

import torch
from torch import nn

KINDS = (torch.Tensor, nn.Module, torch.optim.Optimizer)


def held() -> list[Any]:
    """Return all that is alive."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), KINDS)]


def left_behind(accelerator, folder: str) -> list[str]:
    """Train two steps, save and load, in the background too, and free the memory; return what is alive then and was not before."""
    before = held()
    known = {id(one) for one in before}
    _train(accelerator, folder)
    accelerator.free_memory()
    # The scaler is the Accelerator's own, with two numbers.
    own = {id(value) for value in vars(accelerator.scaler or object).values()}
    return [f"{type(one).__name__} {getattr(one, 'shape', '')}" for one in held() if id(one) not in known | own]


def _train(accelerator, folder: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.ones(32, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.log({"loss": accelerator.gather_for_metrics(loss.detach()).mean().item()}, step=step)
        if step == 1:
            break
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.save_state(folder)
    accelerator.save_state(folder, blocking=False)
    accelerator.wait_for_checkpoint()
    accelerator.load_state(folder)
