"""A run without training, all of whose state is a function of the step: a loader can compute what it must be."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness import Kept
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

BATCH, LENGTH = 2, 100_000


@dataclasses.dataclass(frozen=True)
class Chain:
    """Runs that follow each other in one folder."""

    folder: Path
    world: int = 1
    blocking: bool = True  # a save waits until it is written
    limit: int | None = (
        None  # `total_limit` of automatically named checkpoints; None saves into one folder again and again
    )

    def __str__(self) -> str:
        place = "one folder" if self.limit is None else f"total_limit={self.limit}"
        return f"{self.world} process(es), {'sync' if self.blocking else 'async'}, {place}"

    @property
    def target(self) -> Path:
        return self.folder / "state"


class Run:
    """A training run without training: its state is computed from the number of the step."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        project = ProjectConfiguration(
            str(chain.folder), automatic_checkpoint_naming=chain.limit is not None, total_limit=chain.limit
        )
        self.accelerator = Accelerator(cpu=True, project_config=project)
        model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
        loader = DataLoader(torch.arange(LENGTH), batch_size=BATCH)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.ballast = Kept(step=0, data=torch.zeros(0))  # the step, and more or less to write
        self.accelerator.register_for_checkpointing(self.ballast)
        self.accelerator.register_save_state_pre_hook(self._write_more)
        self.batches: Iterator | None = None
        self.origin: Path | None = None
        self.fill(0)

    @property
    def step(self) -> int:
        return self.ballast.state["step"]

    def _write_more(self, models: list, weights: list, folder: str) -> None:
        if self.accelerator.is_main_process:
            Path(folder, f"more_{self.step % 3}.json").write_text(str(self.step))

    def fill(self, step: int) -> None:
        """Put everything into the state that it has after so many steps."""
        draw = torch.Generator().manual_seed(step)
        optimizer, scheduler = self.optimizer.optimizer, self.scheduler.scheduler
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.copy_(torch.rand(tensor.shape, generator=draw) * 100)
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
            for weight in group["params"]:
                moments = {name: torch.rand(weight.shape, generator=draw) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.tensor(float(step)), **moments}
        scheduler.last_epoch, scheduler._step_count, scheduler._last_lr = step, step + 1, [_rate(step)]
        data = torch.rand(int(torch.randint(20_000, (1,), generator=draw)), generator=draw)
        self.ballast.state = {"step": step, "data": data}
        seed = 1000 * step + self.accelerator.process_index
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    def _everything(self) -> list[torch.Tensor]:
        optimizer = self.optimizer.optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        found = [*self.model.state_dict().values(), self.ballast.state["data"]]
        found += [optimizer.state[weight][name] for weight in weights for name in ("step", "exp_avg", "exp_avg_sq")]
        numbers = [optimizer.param_groups[0]["lr"], self.scheduler.scheduler.last_epoch, self.step]
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return [tensor.clone() for tensor in found] + [torch.tensor(numbers + drawn, dtype=torch.float64)]

    def check(self, step: int | None = None) -> int:
        """Compare everything with what it must be after the step that it claims; returns that step."""
        claimed = self.step
        assert step is None or claimed == step, f"step {claimed} is here, not {step}"
        found = self._everything()
        self.fill(claimed)
        for index, (tensor, expected) in enumerate(zip(found, self._everything(), strict=True)):
            assert torch.equal(tensor, expected), f"step {claimed}: tensor {index} is {tensor}, not {expected}"
        self.fill(claimed)
        return claimed

    def advance(self, former_world: int | None = None) -> int:
        """Take a batch, and go to the next step; returns its number."""
        self.batches = iter(self.loader) if self.batches is None else self.batches
        here = self.accelerator
        first = BATCH * (self.step * (former_world or here.num_processes) + here.process_index)
        batch = next(self.batches)
        assert batch.tolist() == [first, first + 1], f"the batch after step {self.step} is {batch}, not {first}"
        self.fill(self.step + 1)
        return self.step

    def save(self, blocking: bool, safe: bool) -> None:
        chain = self.chain
        target = chain.target if chain.limit is None else None
        self.accelerator.save_state(target, safe_serialization=safe, blocking=blocking)

    def load(self, missing_ok: bool = False) -> bool:
        """Load the newest checkpoint; return whether there was one."""
        target = None if self.chain.limit is not None else self.chain.target
        found = self.accelerator.load_state(target, latest=target is None or missing_ok, missing_ok=missing_ok)
        if found is not None:
            self.batches = None  # the next ones come after the checkpoint
            self.origin = found
        return found is not None


def _rate(step: int) -> float:
    return 1.0 / (1 + step)
