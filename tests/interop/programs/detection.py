"""A detector whose batches are lists of images and of dictionaries, and whose data set rank 0 prepares first."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

CLASSES, EPOCHS = 3, 2


class Boxes(Dataset):
    def __init__(self, path, rows):
        self.records = torch.load(path)[rows]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        image, boxes, labels = self.records[index]
        return image, {"boxes": boxes, "labels": labels, "image_id": torch.tensor(index)}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.boxes, self.scores = nn.Linear(16, 4), nn.Linear(16, CLASSES)

    def forward(self, images, targets=None):
        features = torch.stack([self.backbone(image[None]).flatten() for image in images])
        boxes, scores = self.boxes(features), self.scores(features)
        if targets is None:
            found = zip(boxes, scores.softmax(-1).max(-1).values, scores.argmax(-1), strict=True)
            return [{"boxes": box[None], "scores": score, "labels": label} for box, score, label in found]
        losses = {"loss_box": boxes.new_zeros(()), "loss_class": boxes.new_zeros(())}
        for box, score, target in zip(boxes, scores, targets, strict=True):
            losses["loss_box"] += nn.functional.smooth_l1_loss(box.expand_as(target["boxes"]), target["boxes"])
            repeated = score.expand(len(target["labels"]), -1)
            losses["loss_class"] += nn.functional.cross_entropy(repeated, target["labels"])
        return losses


def write_records(path):
    generator = torch.Generator().manual_seed(5)
    records = []
    for number in range(18):
        count, side = 1 + number % 3, 6 + number % 4
        boxes = torch.rand(count, 4, generator=generator)
        labels = torch.randint(0, CLASSES, (count,), generator=generator)
        records.append((torch.rand(1, side, side + 2, generator=generator), boxes, labels))
    torch.save(records, path)


def collate(batch):
    return tuple(zip(*batch, strict=True))


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
args = parser.parse_args()
accelerator = Accelerator()
set_seed(5)
path = os.path.join(args.output_dir, "records.pt")
with accelerator.main_process_first():
    written_before = os.path.exists(path)
    if not written_before:
        write_records(path)
    train_set, test_set = Boxes(path, slice(0, 11)), Boxes(path, slice(11, None))
model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(train_set, batch_size=2, shuffle=True, collate_fn=collate)
test = DataLoader(test_set, batch_size=2, collate_fn=collate)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
wrote = gather_object([not written_before])
result = {"losses": [], "detections": [], "length": [len(train), len(test)], "wrote": wrote}
for _ in range(EPOCHS):
    model.train()
    for images, targets in train:
        loss_dict = model(images, targets)
        reduced = accelerator.reduce({name: value.detach() for name, value in loss_dict.items()}, reduction="mean")
        result["losses"].append([reduced[name].item() for name in sorted(reduced)])
        optimizer.zero_grad()
        accelerator.backward(sum(loss_dict.values()))
        optimizer.step()
    model.eval()
    seen = {}
    for images, targets in test:
        with torch.no_grad():
            outputs = accelerator.unwrap_model(model)(images)
        for target, output in zip(targets, outputs, strict=True):
            seen[target["image_id"].item()] = [output["labels"].item(), output["scores"].item()]
    merged = {image_id: found for part in gather_object([seen]) for image_id, found in part.items()}
    result["detections"].append(sorted(merged.items()))
accelerator.print(json.dumps(result))
