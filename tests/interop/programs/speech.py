"""A recogniser with a CTC loss on recordings of uneven length; its predictions are padded over the ranks and gathered."""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

VOCABULARY, FEATURES, PAD, EPOCHS = 7, 5, -100, 3


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(FEATURES, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, frames):
        return self.head(self.encoder(frames)[0])


def recordings(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        letters = torch.randint(1, VOCABULARY, (2 + number % 3,), generator=generator)
        frames = letters.repeat_interleave(3)[:, None] + torch.randn(3 * len(letters), FEATURES, generator=generator)
        yield {"frames": frames, "labels": letters, "text": "".join(map(str, letters.tolist()))}


def collate(samples):
    batch = {"texts": [sample["text"] for sample in samples]}
    for name, padding in (("frames", 0), ("labels", PAD)):
        values = [sample[name] for sample in samples]
        batch[name] = pad_sequence(values, batch_first=True, padding_value=padding)
        batch[f"{name}_lengths"] = torch.tensor([len(value) for value in values])
    return batch


def distance(first, second):
    row = list(range(len(second) + 1))
    for i, left in enumerate(first, 1):
        corner, row[0] = row[0], i
        for j, right in enumerate(second, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (left != right))
    return row[-1]


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(3)
model = Recogniser()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
train = DataLoader(list(recordings(22, 0)), batch_size=3, shuffle=True, collate_fn=collate)
test = DataLoader(list(recordings(11, 1)), batch_size=3, collate_fn=collate)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
first_epoch = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    first_epoch = int(args.resume_from_checkpoint.rpartition("_")[2]) + 1
result = {"losses": [], "error_rates": [], "predictions": [], "texts": []}
for epoch in range(first_epoch, EPOCHS):
    model.train()
    train.set_epoch(epoch)
    for batch in train:
        log_probs = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
        labels = batch["labels"].masked_fill(batch["labels"] == PAD, 0)
        loss = nn.functional.ctc_loss(log_probs, labels, batch["frames_lengths"], batch["labels_lengths"])
        accelerator.backward(loss)
        accelerator.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    model.eval()
    errors = letters = 0
    for batch in test:
        with torch.no_grad():
            predicted = model(batch["frames"]).argmax(-1)
        predicted = accelerator.pad_across_processes(predicted, dim=1, pad_index=PAD)
        labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=PAD)
        predicted, labels, counts = accelerator.gather_for_metrics((predicted, labels, batch["frames_lengths"]))
        result["texts"] += accelerator.gather_for_metrics(batch["texts"], use_gather_object=True)
        for ids, reference, count in zip(predicted.tolist(), labels.tolist(), counts.tolist(), strict=True):
            collapsed = [ids[i] for i in range(count) if ids[i] > 0 and (i == 0 or ids[i] != ids[i - 1])]
            reference = [letter for letter in reference if letter != PAD]
            errors, letters = errors + distance(collapsed, reference), letters + len(reference)
            result["predictions"].append(collapsed)
    result["error_rates"].append(errors / letters)
    accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
accelerator.print(json.dumps(result))
