"""A student that learns from a frozen teacher, which is prepared for evaluation; the best student is saved and read again."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import set_seed

CLASSES, TEMPERATURE, EPOCHS = 4, 2.0, 3


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs, labels=None):
        hidden = self.body(inputs)
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": hidden}


def divergence(student_logits, teacher_logits):
    student = nn.functional.log_softmax(student_logits / TEMPERATURE, dim=-1)
    teacher = nn.functional.softmax(teacher_logits / TEMPERATURE, dim=-1)
    return nn.functional.kl_div(student, teacher, reduction="batchmean") * TEMPERATURE**2


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
args = parser.parse_args()
accelerator = Accelerator(mixed_precision="bf16")
set_seed(8)
teacher, student = Classifier(24), Classifier(8)
projector = nn.Linear(8, 24)
teacher.requires_grad_(False)
inputs = torch.randn(37, 6)
labels = teacher.eval()(inputs)["logits"].argmax(-1)
train = DataLoader(TensorDataset(inputs[:24], labels[:24]), batch_size=4, shuffle=True)
test = DataLoader(TensorDataset(inputs[24:], labels[24:]), batch_size=4)
optimizer = torch.optim.AdamW([*student.parameters(), *projector.parameters()], lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=18)
teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
student, projector, optimizer, scheduler, train, test = accelerator.prepare(
    student, projector, optimizer, scheduler, train, test
)
set_seed(9, device_specific=True)
result = {"losses": [], "accuracy": [], "saved": []}
best, best_path = -1.0, os.path.join(args.output_dir, "best")
for _ in range(EPOCHS):
    student.train()
    total = torch.zeros(3)
    for features, targets in train:
        with torch.no_grad():
            guide = teacher(features)
        output = student(features, labels=targets)
        soft = divergence(output["logits"], guide["logits"])
        with accelerator.autocast():
            close = nn.functional.mse_loss(projector(output["hidden"]), guide["hidden"].float())
        accelerator.backward(0.5 * output["loss"] + 0.5 * soft + 0.1 * close)
        accelerator.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += torch.stack([output["loss"].detach(), soft.detach(), close.detach()])
    result["losses"].append(accelerator.reduce(total, reduction="sum").tolist())
    student.eval()
    hits = []
    for features, targets in test:
        with torch.no_grad():
            predictions = student(features)["logits"].argmax(-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        hits += (predictions == targets).tolist()
    result["accuracy"].append([sum(hits), len(hits)])
    if sum(hits) / len(hits) > best:
        best = sum(hits) / len(hits)
        accelerator.wait_for_everyone()
        accelerator.save_model(student, best_path)
        result["saved"].append(best)
accelerator.wait_for_everyone()
fresh = Classifier(8)
load_checkpoint_in_model(fresh, best_path)
result["best"] = [parameter.sum().item() for parameter in fresh.parameters()]
student, projector, teacher, optimizer = accelerator.free_memory(student, projector, teacher, optimizer)
accelerator.print(json.dumps(result))
