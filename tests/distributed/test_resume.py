"""A resumed run equals the run that was never interrupted, bit for bit: in fresh processes, after kills, on other worlds.

One launch runs all cases, because a launch costs seconds and a case milliseconds: the writers log whole runs and leave
checkpoints, the readers are other processes that resume from them.
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate.utils.imports import is_datasets_available, is_torchdata_stateful_dataloader_available
from distributed.conftest import LIMIT_S, SCRIPTS, begun, done, launch_command

SLOW = pytest.mark.slow
WORKERS = {"workers": 2, "saves": ["1-3", "1-last"], "resumes": ["load"]}
# The second interruption is amid an epoch.
TWICE = {"length": 22, "resumes": ["again", "chain"], "saves": ["0-1", "1-3", "1-last"]}
STATE = "stream with state"
FILLED = {"length": 17, "saves": ["0-1", "1-3"]}

CASES: dict[str, dict[str, Any]] = {
    # Samplers.
    "default shuffle": {},
    "seedable sampler": {"sampler": "seedable"},
    "in order": {"sampler": "sequential"},
    "sampler with a generator": {"sampler": "own generator"},
    "loader with a generator": {"sampler": "loader generator"},
    "weighted sampler": {"sampler": "weighted"},
    "custom sampler": {"sampler": "custom"},
    # Each rank has other random numbers, so only one may draw the order.
    "custom sampler that draws from torch": {"sampler": "draws from torch", "dispatch": True},
    "custom sampler that draws from numpy": {"sampler": "draws from numpy", "dispatch": True},
    "custom batch sampler": {"sampler": "custom batches", "length": 18},
    "split batches": {"split": True, "batch_size": 4},
    # Worker processes.
    "workers": {**WORKERS, "resumes": ["load", "skip"]},
    "persistent workers": {**WORKERS, "persistent": True},
    "workers read a stream": {**WORKERS, "data": "stream", "dispatch": False},
    # Streams and dispatching.
    "stream": {"data": "stream", "dispatch": False},
    "stream, dispatched": {"data": "stream"},
    "stream with a state": {"data": STATE, "dispatch": False},
    "stream with a state, dispatched": {"data": STATE},
    "dispatched": {"dispatch": True},
    "dispatched, weighted sampler": {"dispatch": True, "sampler": "weighted"},
    # The last step is completed with samples of the first one.
    "filled": {**FILLED},
    "filled, dispatched": {**FILLED, "length": 21, "dispatch": True, "resumes": ["load", "skip", "chain"]},
    "filled, dispatched, custom batch sampler": {**FILLED, "dispatch": True, "sampler": "custom batches"},
    "filled, dispatched stream": {**FILLED, "data": "stream"},
    "filled, dispatched stream with a state": {**FILLED, "data": STATE},
    # Rank 1 has had its last batch when the checkpoint is saved, and rank 0 has one more.
    "uneven ends": {"even": False, "length": 22, "batch_size": 4, "saves": ["0-3"]},
    "uneven ends, own generator": {"even": False, "length": 14, "sampler": "own generator", "saves": ["0-3"]},
    # What else happens in a loop.
    "nothing random but the order": {"dropout": 0.0, "noise": False, "loop_draws": False},
    "accumulation": {"accumulation": 2, "length": 18, "saves": ["0-2", "1-4", "1-last", "1-after"]},
    "evaluation inside": {"evaluate": True, "saves": ["0-1", "1-2", "1-3", "1-last"]},
    "a loop that is left": {"length": 18, "leave": [1, 4], "saves": ["1-3", "1-after"], "resumes": ["load"]},
    "a loop that is left at its last batch": {
        "length": 16,
        "leave": [1, "last"],
        "saves": ["1-last"],
        "resumes": ["load"],
    },
    "shared random states": {"rng_types": ["torch", "generator"]},
    # Ways of resuming that are not in every case.
    "all batches skipped": {"resumes": ["skip all"], "saves": ["1-last"]},
    "interrupted twice": {**TWICE},
    "interrupted twice, stream with a state": {**TWICE, "data": STATE, "dispatch": False},
    "interrupted twice, persistent workers": {**WORKERS, **TWICE, "persistent": True, "saves": ["1-2"]},
}
STATEFUL = {
    "stateful": {},
    "stateful, dispatched": {"dispatch": True},
    "stateful, filled, dispatched": {**FILLED, "dispatch": True},
    "stateful, workers": {**WORKERS},
    "stateful, stream": {"data": "stream", "dispatch": False},
    "stateful, stream with a state": {"data": STATE, "dispatch": False},
    "stateful, interrupted twice": {**TWICE},
    "stateful, interrupted twice, stream": {**TWICE, "data": "stream", "dispatch": False},
    "stateful, interrupted twice, dispatched stream": {**TWICE, **WORKERS, "data": "stream"},
}
HUGGING_FACE = {
    "datasets": {"data": "datasets", "length": 24, "dispatch": False, "saves": ["1-3", "1-last"]},
    "datasets, dispatched": {"data": "datasets", "length": 24, "saves": ["1-3", "1-last"]},
}


if is_torchdata_stateful_dataloader_available():
    CASES |= {name: {**options, "stateful": True} for name, options in STATEFUL.items()}
    if is_datasets_available():
        HUGGING_FACE["datasets, stateful"] = {**HUGGING_FACE["datasets"], "stateful": True}
if is_datasets_available():
    CASES |= HUGGING_FACE


def command(folder: Path, processes: int, name: str, plan: dict[str, Any]) -> dict[str, Any]:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(plan, default=str))
    words = [*launch_command(processes, cpu=True), str(SCRIPTS / "resume_run.py"), str(file)]
    return {"command": words, "cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}}


def launch(folder: Path, processes: int, name: str, **plan: Any) -> str:
    ended = done(**command(folder, processes, name, plan), timeout=300)
    assert ended.returncode == 0, f"{name}\n{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return ended.stdout + ended.stderr


def entries(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; half a line is what a killed run left."""
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def listed(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, **options} for name, options in cases.items()]


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, ["load", "skip"]), marks=SLOW), (2, ["load"]), pytest.param((2, ["skip"]), marks=SLOW)],
    ids=["1 process", "2 processes", "2 processes, skipping"],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, dict]:
    """The logs of all whole runs and of all resumed ones; two launches. Cases that do not say where save at four places or two."""
    (processes, resumes), folder = request.param, tmp_path_factory.mktemp("runs")
    saves = ["0-1", "1-3", "1-last", "1-after"] if processes == 1 else ["1-3", "1-last"]
    cases = {name: {"saves": saves, "resumes": resumes, **options} for name, options in CASES.items()}
    launch(folder, processes, "write", mode="write", out=folder / "whole", cases=listed(cases))
    reading = {"from": folder / "whole", "out": folder / "on", "cases": listed(cases)}
    launch(folder, processes, "read", mode="read", **reading)
    return processes, folder, cases


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, name):
    processes, folder, cases = runs
    resumed = 0
    for rank in range(processes):
        whole = entries(folder / "whole" / name / f"whole.rank{rank}.jsonl")
        saving = entries(folder / "whole" / name / f"saving.rank{rank}.jsonl")
        assert [entry for entry in saving if "saved" not in entry] == whole, "saving changes nothing"
        for file in sorted((folder / "on" / name).glob(f"*.rank{rank}.jsonl")):
            place = saving.index({"saved": file.name.partition(".")[0]})
            expected = [entry for entry in saving[place:] if "saved" not in entry]
            assert len(expected) > 4 and entries(file) == expected, file.name
            resumed += 1
    assert resumed == processes * len(cases[name]["saves"]) * len(cases[name]["resumes"])


WORLDS = {
    "seedable": {"sampler": "seedable"},
    "shuffle": {},
    "dispatched": {"dispatch": True},
    "custom": {"sampler": "custom"},
    "custom batches": {"sampler": "custom batches"},
}
GLOBAL_BATCH = 8
# Expensive: their tests run in one process.
SHARED = ("runs", "worlds")
# Written by, read by, samples of a step of the readers.
CHANGES = [(2, 1, 8), (1, 2, 8), (2, 1, 3), (1, 2, 6), (2, 4, 8), (4, 2, 8), (1, 4, 8), (2, 4, 12), (4, 2, 6)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=SLOW)], ids=["up to 2 processes", "up to 4"])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Logs of runs on one, two and four processes, and of those that went on elsewhere; a launch each."""
    folder = tmp_path_factory.mktemp("worlds")
    shared = {"length": 40, "noise": False, "epochs": 3, "saves": ["1-2"], "resumes": ["load"]}
    cases = [{**shared, **case} for case in listed(WORLDS)]
    changes = [change for change in CHANGES if max(change[:2]) <= request.param]
    sizes = [size for size in (1, 2, 4) if size <= request.param]
    for writers in sizes:
        plan = {"mode": "write", "out": folder / f"by{writers}", "gather": True, "cases": cases}
        launch(folder, writers, f"write{writers}", **plan, changes={"batch_size": GLOBAL_BATCH // writers})
    found = {"folder": folder, "changes": changes}
    for readers in sizes:
        plans = []
        for writers, to, size in changes:
            out = folder / f"{writers}to{readers}by{size}"
            plan = {"mode": "read", "gather": True, "cases": cases, "from": folder / f"by{writers}", "out": out}
            plans += [{**plan, "changes": {"batch_size": size // readers}}] if to == readers else []
        for mode in ("refuse", "begin_anew") if readers < 4 else ():
            plans.append({"mode": mode, "out": folder / f"{mode}{readers}", "cases": [{"name": mode}]})
        found[readers] = launch(folder, readers, f"read{readers}", mode="several", plans=plans)
    return found


def gathered(file: Path) -> dict[int, list[int]]:
    """Return the sample numbers of all processes, by epoch and in their order."""
    epochs: dict[int, list[int]] = {}
    for entry in entries(file):
        if "gathered" in entry:
            epoch, numbers = entry["gathered"]
            epochs.setdefault(epoch, []).extend(numbers)
    return epochs


@pytest.mark.parametrize("name", [name for name in WORLDS if name != "custom batches"])
def test_another_number_of_processes_goes_on_with_the_next_sample(worlds, name):
    for writers, readers, size in worlds["changes"]:
        whole = gathered(worlds["folder"] / f"by{writers}" / name / "whole.rank0.jsonl")
        resumed = gathered(worlds["folder"] / f"{writers}to{readers}by{size}" / name / "1-2.load.rank0.jsonl")
        # The interrupted epoch: nothing lost, nothing twice, same order.
        assert resumed[1] == whole[1][2 * GLOBAL_BATCH :], (writers, readers, size)
        assert sorted(resumed[2]) == list(range(40))
        if name in ("seedable", "custom"):
            assert resumed[2] == whole[2], "an order that depends on a seed and the epoch is the same everywhere"


def test_new_ranks_have_derived_seeds_and_say_so(worlds):
    most = max(readers for _, readers, _ in worlds["changes"])
    seeds = [line for line in worlds[most].splitlines() if "is new and seeds its random generators with" in line]
    new = {line.partition("Rank ")[2].split()[0] for line in seeds}
    assert new >= {str(rank) for rank in range(most // 2, most)}
    assert len({line.partition("generators with ")[2].split(",")[0] for line in seeds}) >= most // 2
    assert f"was saved by more processes than the {most // 2} running now" in worlds[most // 2]


def test_a_custom_batch_sampler_goes_on_at_a_whole_step(worlds):
    for writers, readers, size in worlds["changes"]:
        if size != GLOBAL_BATCH:
            continue
        whole = gathered(worlds["folder"] / f"by{writers}" / "custom batches" / "whole.rank0.jsonl")
        out = worlds["folder"] / f"{writers}to{readers}by{size}" / "custom batches"
        resumed = gathered(out / "1-2.load.rank0.jsonl")
        consumed = 2 * writers
        again = consumed % readers
        behind = sum(2 + number % 2 for number in range(consumed - again))  # they hold two and three samples in turn
        order = list(dict.fromkeys(whole[1]))
        assert sorted(order) == list(range(40)) and list(dict.fromkeys(resumed[1])) == order[behind:]
        line = f"consumed {consumed} batches, which is not a multiple of the {readers} that a step takes"
        assert (line in worlds[readers]) is bool(again)


class Victim:
    """A run that is killed, with all its processes, when it has passed a number of marks."""

    def __init__(self, folder: Path, processes: int, name: str, **plan: Any) -> None:
        self.out, self.processes = Path(plan["out"]), processes
        self.errors = open(folder / f"{name}.err", "w+")  # noqa: SIM115
        self.process = begun(**command(folder, processes, name, plan), stderr=self.errors)

    def marks(self) -> Iterator[int]:
        for line in self.process.stdout:
            if line.startswith("mark "):
                yield int(line.split()[1])

    def kill(self) -> None:
        ranks = [int(Path(self.out, f"pid.{rank}").read_text()) for rank in range(self.processes)]
        for pid in dict.fromkeys([self.process.pid, *ranks]):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.stdout.read()  # to its end: it is not held any more
        self.process.wait(timeout=LIMIT_S)

    def end(self) -> None:
        self.process.communicate(timeout=LIMIT_S)
        self.errors.seek(0)
        assert self.process.returncode == 0, self.errors.read()[-6000:]


def stitched(file: Path) -> tuple[dict[tuple[int, int], list[Any]], list[Any]]:
    """Return the steps of a run that was killed again and again, and where it went on; a repeated step must be equal."""
    steps: dict[tuple[int, int], list[Any]] = {}
    starts = []
    for entry in entries(file):
        if "step" in entry:
            epoch, step, *values = entry["step"]
            assert steps.setdefault((epoch, step), values) == values, (epoch, step)
        elif "resumed" in entry:
            starts.append((entry["resumed"], *entry["at"]))
    return steps, starts


def killed_and_resumed(folder: Path, processes: int, kills: int, seed: int, options: dict[str, Any]) -> list[Any]:
    """Kill a run at random marks until it was killed so many times; compare it with one that was left in peace."""
    chance = random.Random(seed)
    plan = {"mode": "endure", "every": 3, "cases": [{"name": "killed", **options}], "marks_of": 0}
    launch(folder, processes, "peace", **plan, out=folder / "peace")
    out = folder / "killed"
    for number in range(kills):
        mark = chance.randint(2, 12)
        victim = Victim(folder, processes, f"kill{number}", **{**plan, "out": out, "marks_of": number % processes})
        assert mark in victim.marks(), f"run {number} ended before it could be killed"
        victim.kill()
    Victim(folder, processes, "last", **plan, out=out).end()
    for rank in range(processes):
        steps, starts = stitched(out / f"run.rank{rank}.jsonl")
        expected, _ = stitched(folder / "peace" / f"run.rank{rank}.jsonl")
        assert steps == expected and list(steps) == sorted(steps) == list(expected)
        assert len(starts) == kills + 1
    return starts


KILLED = {"evaluate": True, "length": 22}


@SLOW
@pytest.mark.parametrize(
    ("processes", "kills", "options"),
    [
        (2, 50, {**KILLED, "epochs": 90}),
        (1, 10, {**KILLED, "epochs": 20, "workers": 2, "persistent": True}),
        (2, 10, {**KILLED, "epochs": 30, "data": STATE}),
    ],
    ids=["50 kills", "workers", "dispatched stream"],
)
def test_kills_at_random_steps(tmp_path, processes, kills, options):
    starts = killed_and_resumed(tmp_path, processes, kills=kills, seed=7, options=options)
    assert sum(start[0] == "load" for start in starts) > kills // 2


def test_what_cannot_go_on_is_refused_and_changes_nothing(worlds):
    for processes in (1, 2):
        assert "ok refused" in worlds[processes] and "ok again" in worlds[processes]
