"""Who reads the weights of a load, by ACCELERATE_CHECKPOINT_READERS, with four processes that take themselves for two nodes."""

import os
import sys

LOCAL = 2
RANK = int(os.environ["RANK"])
os.environ.update(LOCAL_RANK=str(RANK % LOCAL), LOCAL_WORLD_SIZE=str(LOCAL))

import torch  # noqa: E402
from expect import differing, logged, raised  # noqa: E402
from harness import everywhere, fresh_accelerator, learn, shared_folder  # noqa: E402

from accelerate.checkpoint.manifest import DamagedCheckpoint  # noqa: E402

WEIGHTS = {"model.safetensors", "optimizer.bin"}
opened: list[str] = []
sys.addaudithook(lambda event, found: opened.append(str(found[0])) if event == "open" else None)


class Job:
    def __init__(self, seed=0, width=32, wrapped=lambda model: model):
        torch.manual_seed(seed)
        self.accelerator = fresh_accelerator()
        model = wrapped(
            torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, count=2):
        inputs = [torch.randn(4, 8) for _ in range(count)]
        return [learn(self.accelerator, self.model(one).square().mean(), self.optimizer) for one in inputs]

    def state(self):
        inner = self.optimizer.optimizer.state_dict()["state"]
        return {"model": dict(self.model.state_dict()), "optimizer": inner}

    def load(self, folder, readers):
        """Load, and return the files of weights that this rank has opened."""
        os.environ["ACCELERATE_CHECKPOINT_READERS"] = readers
        opened.clear()
        self.accelerator.load_state(folder)
        return WEIGHTS & {os.path.basename(path) for path in opened if path.startswith(folder)}


def check_one_rank_reads_for_others_and_the_run_goes_on_bit_for_bit():
    with shared_folder() as folder:
        job = Job()
        job.steps()
        job.accelerator.save_state(folder)
        state = torch.utils._pytree.tree_map(
            lambda value: value.clone() if torch.is_tensor(value) else value, job.state()
        )
        following = job.steps()
        for readers, who in (("all", {0, 1, 2, 3}), ("one_per_node", {0, 2}), ("one", {0})):
            for warm in (False, True):
                other = Job(seed=7)
                if warm:
                    other.steps()
                read = everywhere(other.load(folder, readers))
                assert {rank for rank, files in enumerate(read) if files} == who, (readers, read)
                assert all(read[rank] == WEIGHTS for rank in who) or readers == "all", (readers, read)
                assert not differing(other.state(), state), readers
                assert other.steps() == following, readers


def check_what_is_wrong_is_raised_on_all_ranks_and_nothing_changes():
    with shared_folder() as folder:
        job = Job()
        job.steps()
        job.accelerator.save_state(folder)
        wider = Job(width=40)
        before = {name: value.clone() for name, value in wider.model.state_dict().items()}
        with raised(RuntimeError, "32"):
            wider.load(folder, "one")
        assert not differing(dict(wider.model.state_dict()), before)
        job.accelerator.wait_for_everyone()
        if RANK == 0:
            with open(f"{folder}/model.safetensors", "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"else")
        job.accelerator.wait_for_everyone()
        for readers in ("one", "one_per_node"):
            before = {name: value.clone() for name, value in job.model.state_dict().items()}
            with raised(DamagedCheckpoint, "model.safetensors"):
                job.load(folder, readers)
            assert not differing(dict(job.model.state_dict()), before)


def check_a_choice_without_effect_says_so():
    class Own(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, inputs):
            return self.inner(inputs)

        def load_state_dict(self, *arguments, **options):
            return super().load_state_dict(*arguments, **options)

    with shared_folder() as folder:
        job = Job(wrapped=Own)
        job.steps()
        job.accelerator.save_state(folder)
        with logged("accelerate.training.readers") as lines:
            assert "optimizer.bin" in job.load(folder, "one")
        assert ["its own way of loading, so every rank reads" in line for line in lines] == [True] * (RANK == 0), lines
    with shared_folder() as folder, raised(ValueError, "ACCELERATE_CHECKPOINT_READERS='two'", "one_per_node"):
        job.load(folder, "two")


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            if RANK == 0:
                print("ok", name, flush=True)
