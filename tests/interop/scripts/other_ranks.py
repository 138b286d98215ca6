"""A loop that saves within an epoch, and resumes on as many processes as it is started with.

`other_ranks.py FOLDER CASE ...` trains each case for two epochs, with a checkpoint after three steps. `CASE=RUN` resumes from the checkpoint
of the run in that folder. A case is a strategy with words: `fsdp2+sharded`, `ddp+skip` (which skips batches itself, as programs for
upstream do), `ddp+half` (which resumes with half of the global batch), `ddp+schedule` (with a learning rate schedule), `ddp+end` (saved after the last
step of the first epoch), or a kind of loader: `workers`, `dispatch`, `stateful`.
"""

import sys
import traceback

import tiny
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, skip_first_batches
from accelerate.utils import set_seed

ROWS, GLOBAL_BATCH, EPOCHS, SAVED_AFTER = 40, 8, 2, 3


def plugin(words):
    if not words[0].startswith("fsdp"):
        return None
    version = int(words[0][-1])
    options = {"use_orig_params": True} if version == 1 else {}
    kind = "SHARDED_STATE_DICT" if "sharded" in words else "FULL_STATE_DICT"
    wrapping = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 50}
    return FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind, **wrapping, **options)


def parts():
    set_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    rows = torch.randn(ROWS, 6)
    return model, TensorDataset(rows, rows[:, :3].argmax(-1), torch.arange(ROWS))


def train(folder, words, checkpoint):
    batch = GLOBAL_BATCH // tiny.ranks() // (2 if checkpoint and "half" in words else 1)
    order = DataLoaderConfiguration(
        use_seedable_sampler=True,
        data_seed=7,
        dispatch_batches="dispatch" in words,
        use_stateful_dataloader="stateful" in words,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(words), dataloader_config=order)
    model, rows = parts()
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24 * accelerator.num_processes)
    optimizer, loader = accelerator.prepare(
        optimizer, DataLoader(rows, batch, shuffle=True, num_workers=2 * ("workers" in words))
    )
    if "schedule" in words:
        schedule = accelerator.prepare(schedule)
    if checkpoint:
        accelerator.load_state(checkpoint)
    saved_after = ROWS // GLOBAL_BATCH if "end" in words else SAVED_AFTER
    report = {"saved_after": saved_after, "losses": [], "norms": [], "rates": [], "rows": []}
    for epoch in range(loader.iteration if "end" in words else 0, EPOCHS):
        skips = checkpoint and epoch == 0 and "skip" in words
        loader.set_epoch(epoch)
        report["rows"].append([])
        for step, (inputs, labels, numbers) in enumerate(skip_first_batches(loader, SAVED_AFTER) if skips else loader):
            report["rates"].append(optimizer.param_groups[0]["lr"])
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            report["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            if "schedule" in words:
                schedule.step()
            optimizer.zero_grad()
            report["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
            report["rows"][-1] += accelerator.gather_for_metrics(numbers).tolist()
            if not checkpoint and (epoch, step + 1) == (0, saved_after):
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
    return report


def main():
    root, *cases = sys.argv[1:]
    reports = {}
    for case, _, run in (words.partition("=") for words in cases):
        with tiny.apart():
            try:
                reports[case] = train(f"{root}/{case}", case.split("+"), run)
            except Exception:
                reports[case] = {"error": traceback.format_exc()[-3000:]}
    tiny.report(**reports)


if __name__ == "__main__":
    main()
