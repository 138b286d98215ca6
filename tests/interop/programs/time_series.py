"""Windows of an endless series from an iterable data set that rank 0 reads and sends; a rank may stop the training early."""

import json
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

WINDOW, EPOCHS, PATIENCE = 6, 12, 2


class Windows(IterableDataset):
    def __init__(self, count, start):
        self.count, self.start, self.epoch = count, start, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 * self.start + self.epoch)
        for number in range(self.count):
            times = torch.arange(WINDOW + 1) + self.start + number
            series = torch.sin(times / 3) + 0.2 * torch.randn(WINDOW + 1, generator=generator)
            yield {"past": series[:-1], "future": series[-1], "time": self.start + number}


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, past):
        mean, log_scale = self.head(self.recurrent(past[..., None])[0][:, -1]).unbind(-1)
        return torch.distributions.Normal(mean, log_scale.exp())


class EarlyStopping:
    def __init__(self):
        self.best, self.waited = math.inf, 0

    def should_stop(self, loss):
        self.best, self.waited = (loss, 0) if loss < self.best - 0.02 else (self.best, self.waited + 1)
        return self.waited >= PATIENCE


config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True, non_blocking=True)
accelerator = Accelerator(dataloader_config=config)
set_seed(14)
model = Forecaster()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
train, test = DataLoader(Windows(30, 0), batch_size=8), DataLoader(Windows(14, 200), batch_size=4)
model, optimizer, plateau, train, test = accelerator.prepare(model, optimizer, plateau, train, test)
stopping = EarlyStopping()
result = {"losses": [], "validation": [], "times": [], "rates": [], "stopped": None}
for epoch in range(EPOCHS):
    model.train()
    train.set_epoch(epoch)
    for batch in train:
        loss = -model(batch["past"]).log_prob(batch["future"]).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(accelerator.gather(loss.detach()).mean().item())
    model.eval()
    errors, times = [], []
    for batch in test:
        with torch.no_grad():
            error = (model(batch["past"]).mean - batch["future"]) ** 2
        error, time = accelerator.gather_for_metrics((error, batch["time"]))
        errors += error.tolist()
        times += time.tolist()
    validation = sum(errors) / len(errors)
    plateau.step(validation)
    result["validation"].append(validation)
    result["times"].append(times)
    result["rates"].append(optimizer.param_groups[0]["lr"])
    # Only the last rank looks at the validation loss; the trigger tells the others.
    if accelerator.is_last_process and stopping.should_stop(validation):
        accelerator.set_trigger()
    if accelerator.check_trigger():
        result["stopped"] = epoch
        break
accelerator.print(json.dumps(result))
