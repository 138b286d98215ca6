"""Two encoders, of which parts are frozen, with a contrastive loss over the features of all ranks; weights are exported."""

import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed

TOKENS, WIDTH, EPOCHS = 12, 8, 2


class Pairs(Dataset):
    def __init__(self, count):
        self.images, self.tokens = torch.randn(count, 3, 4, 4), torch.randint(0, TOKENS, (count, 5))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "input_ids": self.tokens[index]}


class TwoEncoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, 6, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.embed, self.text = nn.Embedding(TOKENS, WIDTH), nn.TransformerEncoder(layer, 2)
        self.image_projection, self.text_projection = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused_head = nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def encode_image(self, pixel_values):
        return nn.functional.normalize(self.image_projection(self.vision(pixel_values)), dim=-1)

    def encode_text(self, input_ids):
        return nn.functional.normalize(self.text_projection(self.text(self.embed(input_ids)).mean(1)), dim=-1)

    def forward(self, pixel_values, input_ids):
        return self.encode_image(pixel_values), self.encode_text(input_ids), self.scale.exp()


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
args = parser.parse_args()
unused = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(kwargs_handlers=[unused], gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
set_seed(11)
model = TwoEncoders()
model.vision.requires_grad_(False)
model.embed.requires_grad_(False)
model.text.layers[0].requires_grad_(False)
new = [p for name, p in model.named_parameters() if p.requires_grad and "projection" in name]
rest = [p for name, p in model.named_parameters() if p.requires_grad and "projection" not in name]
groups = [{"params": new, "lr": 1e-2}, {"params": rest, "lr": 1e-3, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
train, test = DataLoader(Pairs(22), batch_size=4, shuffle=True), DataLoader(Pairs(10), batch_size=3)
model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
result = {"losses": [], "rates": [], "ranks": [], "steps": 0}
for _ in range(EPOCHS):
    model.train()
    for batch in train:
        with accelerator.accumulate(model):
            images, texts, scale = model(**batch)
            everyone = accelerator.gather(texts.detach())
            start = accelerator.process_index * len(texts)
            everyone = torch.cat([everyone[:start], texts, everyone[start + len(texts) :]])
            targets = torch.arange(start, start + len(images), device=accelerator.device)
            loss = nn.functional.cross_entropy(scale * images @ everyone.T, targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
                result["steps"] += 1
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        result["losses"].append(accelerator.gather(loss.detach()).mean().item())
    scheduler.step()
    result["rates"].append(scheduler.get_last_lr())
    model.eval()
    plain = accelerator.unwrap_model(model)
    with torch.no_grad():
        pairs = [(plain.encode_image(b["pixel_values"]), plain.encode_text(b["input_ids"])) for b in test]
    images, texts = (
        torch.cat(part) for part in zip(*[accelerator.gather_for_metrics(pair) for pair in pairs], strict=True)
    )
    similar = images @ texts.T
    result["ranks"].append((similar > similar.diagonal()[:, None]).sum(1).tolist())
accelerator.wait_for_everyone()
state = accelerator.get_state_dict(model)
trained = {name: state[name] for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad}
accelerator.save(trained, os.path.join(args.output_dir, "trained.bin"))
accelerator.save_model(model, args.output_dir, max_shard_size="2KB")
accelerator.wait_for_everyone()
again = torch.load(os.path.join(args.output_dir, "trained.bin"))
result["trained"] = {name: value.sum().item() for name, value in again.items()}
result["files"] = sorted(os.listdir(args.output_dir))
accelerator.print(json.dumps(result))
