"""One small training program that saves, is interrupted, and resumes; it logs each step of each rank: resume_run.py PLAN.json.

The plan is `{"mode": ..., "out": FOLDER, "cases": [...], ...}`; the modes are functions. A line of a log is JSON:
`{"step": [epoch, step, ids, loss]}`, `{"saved": NAME}`, `{"gathered": [epoch, ids]}` or `{"end": ...}`.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from expect import raised
from harness import Kept, fresh_accelerator, learn
from resume_data import WIDTH, loader_of, parts
from torch import nn
from torch.utils.data import DataLoader

from accelerate import DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

WRITER_SEED, READER_SEED = 5, 77


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run: its data, what draws random numbers in it, and where it saves."""

    name: str
    sampler: str = "shuffle"
    data: str = "rows"  # or "stream", "stream with state" or "datasets"
    length: int = 14
    batch_size: int = 2
    shards: int = 4
    workers: int = 0
    persistent: bool = False
    dispatch: bool | None = None
    split: bool = False
    stateful: bool = False
    even: bool = True
    dropout: float = 0.5
    noise: bool = True
    loop_draws: bool = True
    evaluate: bool = False
    accumulation: int = 1
    epochs: int = 3
    saves: tuple = ()  # `EPOCH-STEP`, `EPOCH-last` (after the last batch, inside the loop) or `EPOCH-after` (the loop)
    resumes: tuple = ()  # ways to continue, see `Job.train`
    leave: list | None = None  # epoch, and step or "last", at which the loop is left with break
    rng_types: tuple | None = None


class Log:
    """The lines of one run on this rank."""

    def __init__(self, folder, run, rank):
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = open(Path(folder, f"{run}.rank{rank}.jsonl"), "a", encoding="utf-8")  # noqa: SIM115
        if self.file.tell():
            self.file.write("\n")  # a killed run may have left half a line

    def write(self, **entry):
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


class Job:
    """Everything that a run prepares."""

    def __init__(self, case, seed, continue_after_load=True, **options):
        config = DataLoaderConfiguration(
            use_seedable_sampler=case.sampler == "seedable",
            use_stateful_dataloader=case.stateful,
            dispatch_batches=case.dispatch,
            split_batches=case.split,
            even_batches=case.even,
            continue_after_load=continue_after_load,
        )
        self.case = case
        self.accelerator = fresh_accelerator(
            dataloader_config=config,
            gradient_accumulation_steps=case.accumulation,
            rng_types=case.rng_types and list(case.rng_types),
            **options,
        )
        set_seed(seed, device_specific=True)
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(case.dropout), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        evaluation = DataLoader(torch.randn(12, WIDTH), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader, self.evaluation = self.accelerator.prepare(
            model, optimizer, scheduler, loader_of(case), evaluation
        )
        self.place = Kept(epoch=0, step=0)  # the user's own counters
        self.accelerator.register_for_checkpointing(self.place)

    def learn(self, features):
        with self.accelerator.accumulate(self.model):
            loss = learn(self.accelerator, self.model(features).pow(2).mean(), self.optimizer, self.scheduler)
        if self.case.loop_draws:
            torch.rand(2), random.random(), np.random.rand()
        return loss

    def evaluate(self):
        for number, batch in enumerate(self.evaluation):
            if number == 2:
                break
            self.model(batch)

    def joined(self):
        """Let ranks end at different steps where the case says that they do."""
        return contextlib.nullcontext() if self.case.even else self.accelerator.join_uneven_inputs([self.model])

    def train(self, log, save=None, resume=None, gather=False):
        """Train to the end, and log the steps; `save` is called with the name of each place where a run may save.

        A run continues with `resume`: "load" iterates as ever, "skip" omits what is behind with `skip_first_batches`, "skip
        all" does the latter after a whole epoch, counted as such. `gather` logs the numbers that `gather_for_metrics` returns.
        """
        save = save or (lambda name: None)
        place = self.place.state
        behind = place["step"]
        for epoch in range(place["epoch"], self.case.epochs):
            batches, start = self.loader, 0
            if resume is not None:
                start = behind
                batches = self.loader if resume == "load" else self.accelerator.skip_first_batches(self.loader, behind)
                resume = None
            with self.joined():
                for step, batch in enumerate(batches, start + 1):
                    numbers, features = parts(batch)
                    loss = self.learn(features)
                    if self.case.evaluate and step % 2:
                        self.evaluate()
                    # Upstream's arithmetic: so many whole epochs, and so many steps.
                    last = self.loader.end_of_dataloader
                    place["epoch"], place["step"] = (epoch + 1, 0) if last else (epoch, step)
                    log.write(step=[epoch, step, numbers.tolist(), repr(loss)])
                    if gather:
                        found = self.accelerator.gather_for_metrics(numbers.tolist(), use_gather_object=True)
                        log.write(gathered=[epoch, found])
                    save(f"{epoch}-{step}")
                    if last:
                        save(f"{epoch}-last")
                    if self.case.leave in ([epoch, step], [epoch, "last" if last else step]):
                        break
            place["epoch"], place["step"] = epoch + 1, 0
            save(f"{epoch}-after")
        weights = [value.tolist() for value in self.accelerator.unwrap_model(self.model).state_dict().values()]
        log.write(end=[weights, *map(repr, (torch.rand(1).item(), float(np.random.rand()), random.random()))])


def cases_of(plan):
    return [Case(**{**fields, **plan.get("changes", {})}) for fields in plan["cases"]]


def stir():
    """Draw from all generators: nothing that a resumed run does may depend on what was drawn before it loaded."""
    torch.rand(7), random.random(), np.random.rand(3)


def write(plan):
    """Run each case twice, without saving and with it: the log that others must equal, and the checkpoints."""
    for case in cases_of(plan):
        folder = Path(plan["out"], case.name)
        for saving in (False, True):
            job = Job(case, WRITER_SEED)
            log = Log(folder, "saving" if saving else "whole", job.accelerator.process_index)

            def save(name, job=job, log=log, case=case, folder=folder):
                if name in case.saves:
                    job.accelerator.save_state(folder / name)
                    log.write(saved=name)

            job.train(log, save if saving else None, gather=plan.get("gather", False))


class Interrupted(Exception):
    """The run ends here."""


def read(plan):
    """Resume each case from each of its checkpoints, in each of its ways."""
    for case in cases_of(plan):
        for name in case.saves:
            for way in case.resumes:
                read_one(plan, case, name, way)


def read_one(plan, case, name, way):
    """Resume a case: as `Job.train` does, "again" after loading and saving once more, or "chain" with two interruptions."""
    job = Job(case, READER_SEED)
    stir()
    job.accelerator.load_state(Path(plan["from"], case.name, name))
    out = Path(plan["out"], case.name)
    log = Log(out, f"{name}.{way}", job.accelerator.process_index)
    if way == "skip all":
        job.place.state = {"epoch": job.place.state["epoch"] - 1, "step": len(job.loader)}
    if way in ("again", "chain"):
        folder = out / f"{name}.{way}.checkpoint"
        if way == "again":
            job.accelerator.save_state(folder)
        else:
            two_steps = iter([False, True])

            def save(name):
                if next(two_steps, False):
                    job.accelerator.save_state(folder)
                    raise Interrupted

            with contextlib.suppress(Interrupted):
                job.train(log, save, resume="skip")
        job = Job(case, READER_SEED + 1)
        stir()
        job.accelerator.load_state(folder)
        way = "load"
    job.train(log, resume=way, gather=plan.get("gather", False))


def endure(plan):
    """Go on from the newest checkpoint if there is one, save every few steps, and expect to be killed.

    One rank prints a mark after each step and before each save.
    """
    (case,) = cases_of(plan)
    out = Path(plan["out"])
    rank = int(os.environ.get("RANK", "0"))
    out.mkdir(parents=True, exist_ok=True)
    Path(out, f"pid.{rank}").write_text(str(os.getpid()))
    project = ProjectConfiguration(project_dir=str(out), automatic_checkpoint_naming=True, total_limit=2)
    job = Job(case, WRITER_SEED, project_config=project)
    log = Log(out, "run", rank)
    try:
        job.accelerator.load_state()
        resume = "load"
    except FileNotFoundError:
        resume = None
    log.write(resumed=resume, at=list(job.place.state.values()))
    marks, steps = itertools.count(1), 0

    def pass_by(*_):
        print(f"mark {next(marks)}", flush=True)

    if rank == plan["marks_of"]:
        job.accelerator.register_save_state_pre_hook(pass_by)

    def save(name):
        nonlocal steps
        if not name.split("-")[1].isdigit():
            return
        steps += 1
        if rank == plan["marks_of"]:
            pass_by()
        if steps % plan["every"] == 0:
            job.accelerator.save_state()
            log.write(saved=name)

    job.train(log, save, resume=resume)


def saved_and_left(plan):
    (case,) = cases_of(plan)
    folder, job = Path(plan["out"], "checkpoint"), Job(case, WRITER_SEED)

    def save(name):
        if job.place.state["step"] == 2:
            job.accelerator.save_state(folder)
            raise Interrupted

    with contextlib.suppress(Interrupted):
        job.train(Log(plan["out"], "left", job.accelerator.process_index), save)
    return case, job, folder


def refuse(plan):
    """What cannot continue is refused on every rank, and nothing has changed."""
    case, job, folder = saved_and_left(plan)
    for changes, fragments in (
        ({"length": 30}, ("30 samples", "14 samples")),
        ({"sampler": "seedable"}, ("SeedableRandomSampler", "RandomSampler")),
        ({"sampler": "custom"}, ("Ordered", "RandomSampler")),
    ):
        other = Job(dataclasses.replace(case, **changes), READER_SEED)
        for _ in other.loader:
            break
        before = everything(other)
        with raised(ValueError, "Data loader 0", "continue_after_load=False", *fragments):
            other.accelerator.load_state(folder)
        assert everything(other) == before, changes
        assert len(list(other.loader)) == len(other.loader), "the loader is as it was"
    job.accelerator.print("ok refused")


def begin_anew(plan):
    """With `continue_after_load=False` an epoch begins again, unless a skip asks for its rest."""
    case, job, folder = saved_and_left(plan)
    told = {}
    for continues in (True, False):
        for behind in (0, 2):
            other = Job(case, READER_SEED, continue_after_load=continues)
            other.accelerator.load_state(folder)
            batches = other.accelerator.skip_first_batches(other.loader, behind)
            told[continues, behind] = [numbers.tolist() for numbers, _ in batches]
    steps = len(job.loader)
    assert len(told[True, 0]) == steps - 2 and told[True, 0] == told[True, 2] == told[False, 2]
    assert len(told[False, 0]) == steps
    job.accelerator.print("ok again")


def everything(job):
    """Everything that a load changes, as text."""
    states = [kept.state_dict() for kept in (job.model, job.optimizer, job.scheduler, job.place)]
    positions = [loader._progress for loader in (job.loader, job.evaluation)]
    generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return repr([states, positions, generators])


def several(plan):
    for one in plan["plans"]:
        MODES[one["mode"]](one)


MODES = {mode.__name__: mode for mode in (write, read, endure, refuse, begin_anew, several)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    PLAN = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    MODES[PLAN["mode"]](PLAN)
