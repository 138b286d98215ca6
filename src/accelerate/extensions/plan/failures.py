"""`accelerate plan --failures`: a simulated week on GPUs that fail, for four ways of continuing after a failure.

Failures of each GPU are a Poisson process. A week is simulated from event to event: a checkpoint is due, a GPU fails, a recovery is over.
Each second of the cluster has one cause.
"""

import functools
import heapq
import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.base.table import table
from accelerate.launch.errors import LaunchError

_HOUR, _DAY = 3600.0, 86400.0
_LLAMA, _BENCHMARKS = "Llama 3 (arXiv:2407.21783)", "docs/benchmarks.md, 2 CPU cores"
CAUSES = ("productive", "recomputed", "save", "detect", "restart", "load", "pause", "absent")


@dataclass(frozen=True)
class Assumption:
    """A number that a simulation takes, and where it is from; `least` is the smallest value that has a meaning."""

    value: float
    unit: str
    what: str
    source: str
    least: float = 0.0


# By their names on the command line. 0 of an interval is the Young/Daly optimum, 0 of `replicas` one for 128 GPUs.
ASSUMPTIONS = {
    "days": Assumption(7, "d", "length of the run", "a week", 1e-3),
    "mtbf": Assumption(54 * 24 * 16384 / 419, "h", "between failures of one GPU", f"{_LLAMA}: 419 in 54 days", 1e-3),
    "detect": Assumption(600, "s", "until a failure is noticed and its GPU replaced", "assumed"),
    "cold": Assumption(1.8, "s", "start of new processes, until they load", _BENCHMARKS),
    "warm": Assumption(0.9, "s", "the same without imports", f"{_BENCHMARKS}: less 0.87 s of imports"),
    "load": Assumption(33, "s", "load from disk", f"{_LLAMA}: 4 GB a GPU, 2 TB/s of storage"),
    "load_peer": Assumption(0.08, "s", "load from a peer's memory", f"{_LLAMA}: 4 GB at 400 Gb/s"),
    "save": Assumption(33, "s", "stall of a save to disk", "as load", 1e-3),
    "save_peer": Assumption(0.08, "s", "stall of a copy to a peer", "as load_peer", 1e-3),
    "interval": Assumption(0, "s", "between saves to disk", "Young/Daly"),
    "interval_peer": Assumption(0, "s", "between copies to a peer", "Young/Daly"),
    "archive": Assumption(
        3600, "s", "between saves to disk where failures do not need them", "assumed; at least interval", 1.0
    ),
    "replicas": Assumption(0, "", "replicas that can do without each other", f"{_LLAMA}: 128 GPUs each"),
    "pause": Assumption(5, "s", "until the other replicas continue", "torchft: timeout of heartbeats"),
    "runs": Assumption(100, "", "simulated runs", "chosen", 2),
    "seed": Assumption(0, "", "of the random numbers", "chosen"),
}
_WHOLE = ("replicas", "runs", "seed")


def young_daly(save: float, mtbf: float) -> float:
    """Return the seconds of work between saves that waste least, to first order.

    Not a collective.

    Args:
        save: seconds that a save takes.
        mtbf: seconds between failures of the cluster, on average.

    Source:
        J. W. Young, doi:10.1145/361147.361115; J. T. Daly, doi:10.1016/j.future.2004.11.016
    """
    return math.sqrt(2 * save * mtbf)


def expected_goodput(interval: float, save: float, recovery: float, mtbf: float) -> float:
    """Return the expected goodput of a long run whose failures may also come in saves and recoveries; all in seconds.

    Not a collective.
    """
    return interval / (mtbf * math.exp(recovery / mtbf) * math.expm1((interval + save) / mtbf))


# -- one run -------------------------------------------------------------------------------------------------------------


class Timeline:
    """The seconds of one run by cause, until it is over; GPUs fail at a constant rate."""

    def __init__(self, length: float, rate: float, numbers: random.Random) -> None:
        self.now, self.length, self._rate, self._numbers = 0.0, length, rate, numbers
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self._fails_at = numbers.expovariate(rate)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.now >= self.length

    def spend(self, cause: str, duration: float) -> float:
        """Spend time for a cause, up to the next failure or the end; return how much it was."""
        spent = max(0.0, min(duration, self._fails_at - self.now, self.length - self.now))
        self.now = self._fails_at if spent == self._fails_at - self.now else self.now + spent
        self.seconds[cause] += spent
        return spent

    def fails_after(self, share: float) -> float:
        """Return when the next GPU fails if only a share of them is at work; drawn anew, as a constant rate allows."""
        return self.now + self._numbers.expovariate(self._rate * share)

    @property
    def has_failed(self) -> bool:
        """Whether a GPU has failed, so that only `recover` spends more time."""
        return self.now >= self._fails_at

    def recover(self, phases: Mapping[str, float]) -> None:
        """Spend the seconds of each phase of a recovery, which begins again if a GPU fails in it."""
        self._fails_at = self.now
        while self.has_failed and not self.is_over:
            self._fails_at = self.fails_after(1.0)
            for cause, duration in phases.items():
                self.spend(cause, duration)


def restarting(
    line: Timeline, interval: float, save: float, archive: tuple[int, float], recovery: Mapping[str, float]
) -> None:
    """Let all processes restart after each failure, and repeat the work since the last save or copy.

    Not a collective.

    Args:
        line: an empty timeline, which is filled.
        interval: seconds of work between saves.
        save: seconds of a save.
        archive: after how many saves there is one to disk too, and its seconds.
        recovery: seconds of each phase after a failure.
    """
    saves, every, to_disk = 0, *archive
    while not line.is_over:
        saves += 1
        unsaved = line.spend("productive", interval)
        line.spend("save", save + (to_disk if saves % every == 0 else 0.0))
        if line.has_failed:
            line.seconds["productive"] -= unsaved
            line.seconds["recomputed"] += unsaved
            line.recover(recovery)


def continuing(line: Timeline, values: Mapping[str, float], recovery: Mapping[str, float]) -> None:
    """Let the other replicas continue after a failure, without the share of the one that failed.

    Not a collective.

    Args:
        line: an empty timeline, which is filled.
        values: numbers by the names of `ASSUMPTIONS`.
        recovery: seconds of each phase after which a failed replica is back.
    """
    replicas = alive = int(values["replicas"])
    returns: list[float] = []  # of absent replicas, as a heap
    stopped, cause = 0.0, "pause"  # until when no replica works, and why
    saves_at, unsaved = values["archive"], 0.0
    while not line.is_over:
        share = alive / replicas
        is_stopped = line.now < stopped
        events = {"fail": line.fails_after(share), "save": saves_at, "return": returns[0] if returns else math.inf}
        events |= {"end": line.length, "continue": stopped if is_stopped else math.inf}
        event = min(events, key=lambda name: events[name])
        duration, line.now = events[event] - line.now, events[event]
        line.seconds[cause if is_stopped else "productive"] += duration * share
        line.seconds["absent"] += duration * (1 - share)
        unsaved += 0.0 if is_stopped else duration * share
        if event == "fail":
            alive -= 1
            heapq.heappush(returns, line.now + sum(recovery.values()))
            stopped, cause = max(stopped, line.now + values["pause"]), "pause"
        elif event == "return":  # the others send it the state
            alive += 1
            heapq.heappop(returns)
            stopped, cause = max(stopped, line.now + recovery["load"]), "load"
        elif event == "save":
            stopped, cause = max(stopped, line.now + values["save"]), "save"
            saves_at = stopped + values["archive"]
        elif cause == "save":  # the save is complete
            unsaved = 0.0
        if not alive:  # the state is lost, but for the last save
            line.seconds["productive"] -= unsaved
            line.seconds["recomputed"] += unsaved
            line.recover({**recovery, "load": values["load"]})
            alive, unsaved, returns, saves_at = replicas, 0.0, [], line.now + values["archive"]


# -- the ways of continuing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What happens after a failure.

    Attributes:
        name: In the table.
        run: Fills a timeline.
        expected: The goodput of the formula; nan where there is none.
    """

    name: str
    run: Callable[[Timeline], None]
    expected: float = math.nan


def ways(values: Mapping[str, float], mtbf: float) -> list[Way]:
    """Return the ways of continuing that are compared.

    Not a collective.

    Args:
        values: numbers by the names of `ASSUMPTIONS`.
        mtbf: seconds between failures of the cluster, on average.
    """

    def recovery(restart: str, load: str) -> dict[str, float]:
        return {"detect": values["detect"], "restart": values[restart], "load": values[load]}

    save, interval, rows = values["save"], values["interval"], []
    for restart in ("cold", "warm"):
        phases = recovery(restart, "load")
        run: Callable[[Timeline], None] = functools.partial(
            restarting, interval=interval, save=save, archive=(1, 0.0), recovery=phases
        )
        expected = expected_goodput(interval, save, sum(phases.values()), mtbf)
        rows.append(Way(f"{restart} restart, from disk", run, expected))
    between = values["interval_peer"]
    archive = (max(1, round(values["archive"] / between)), save)
    phases = recovery("warm", "load_peer")
    copying = functools.partial(
        restarting, interval=between, save=values["save_peer"], archive=archive, recovery=phases
    )
    rows.append(Way("warm restart, from a peer's memory", copying))
    if values["replicas"] > 1:
        name = f"{values['replicas']:.0f} replicas, the others continue"
        rows.append(Way(name, functools.partial(continuing, values=values, recovery=phases)))
    return rows


@dataclass(frozen=True)
class Result:
    """The mean of simulated runs: goodput with its standard error, what a formula expects, and hours by cause."""

    way: str
    goodput: float
    error: float
    expected: float
    hours: dict[str, float]


def simulate(gpus: int, values: Mapping[str, float]) -> list[Result]:
    """Return the means of simulated runs, for each way of continuing.

    Not a collective.

    Args:
        gpus: how many GPUs there are.
        values: numbers by the names of `ASSUMPTIONS`, complete.
    """
    length, mtbf, count = values["days"] * _DAY, values["mtbf"] * _HOUR / gpus, int(values["runs"])
    results = []
    for way in ways(values, mtbf):
        numbers = random.Random(int(values["seed"]))
        lines = [Timeline(length, 1 / mtbf, numbers) for _ in range(count)]
        for line in lines:
            way.run(line)
        shares = [line.seconds["productive"] / length for line in lines]
        hours = {cause: statistics.mean(line.seconds[cause] for line in lines) / _HOUR for cause in CAUSES}
        error = statistics.stdev(shares) / math.sqrt(count)
        results.append(Result(way.name, statistics.mean(shares), error, way.expected, hours))
    return results


# -- the command ---------------------------------------------------------------------------------------------------------


def parse(words: Sequence[str], gpus: int) -> tuple[dict[str, float], set[str]]:
    """Return the numbers of a simulation, and the names of those that were given.

    Not a collective.

    Args:
        words: such as ``"detect=30"``, or ``"measured=goodput.jsonl"`` for the numbers of a run that was measured.
        gpus: how many GPUs there are.

    Raises:
        LaunchError: a word, a number or the file cannot be used.
    """
    pairs = dict(word.partition("=")[::2] for word in words)
    file = pairs.pop("measured", None)
    numbers = {} if file is None else measured(file)
    for name, text in pairs.items():
        if name not in ASSUMPTIONS:
            raise LaunchError(
                f"--failures has no {name!r}; write NAME=VALUE, with measured or {', '.join(ASSUMPTIONS)}."
            )
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        least = ASSUMPTIONS[name].least
        if not least <= number < math.inf or (name in _WHOLE and number % 1):
            kind = "a whole number" if name in _WHOLE else "a number"
            raise LaunchError(
                f"--failures {name}={text}: give {kind} of at least {least:g} {ASSUMPTIONS[name].unit}".rstrip() + "."
            )
        numbers[name] = number
    values = {name: assumption.value for name, assumption in ASSUMPTIONS.items()} | numbers
    mtbf = values["mtbf"] * _HOUR / gpus
    values["interval"] = values["interval"] or young_daly(values["save"], mtbf)
    values["interval_peer"] = values["interval_peer"] or young_daly(values["save_peer"], mtbf)
    if "archive" not in numbers:
        values["archive"] = max(values["archive"], values["interval"])
    values["replicas"] = values["replicas"] or max(min(2, gpus), gpus // 128)
    for name in ("interval", "interval_peer"):
        if values[name] < 1:
            raise LaunchError(
                f"--failures {name}={values[name]:g}: give at least 1 s, or 0 for the Young/Daly optimum."
            )
    if values["replicas"] > gpus:
        raise LaunchError(
            f"--failures replicas={values['replicas']:.0f}, but --gpus is {gpus}: give at most one replica a GPU."
        )
    if mtbf < values["detect"]:
        what = f"{gpus} GPUs fail each {mtbf:.3g} s on average, before a failure is noticed (detect={values['detect']:g} s)"
        raise LaunchError(f"{what}: such a run makes no progress. Give a larger mtbf, or a smaller detect.")
    return values, set(numbers)


def measured(file: str) -> dict[str, float]:
    """Return what a run with ACCELERATE_GOODPUT has measured, as means over its restarts.

    Not a collective.

    Raises:
        LaunchError: the file cannot be read, or the run has no restart.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            attempts = [json.loads(line)["seconds"] for line in lines]
        restarts = [seconds for seconds in attempts if seconds["failure"]]
        means = {
            "detect": statistics.mean(seconds["failure"] for seconds in restarts),
            "cold": statistics.mean(seconds["imports"] + seconds["setup"] for seconds in restarts),
            "load": statistics.mean(seconds["load"] for seconds in restarts),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:  # of no numbers, statistics.mean raises a ValueError
        raise LaunchError(
            f"--failures measured={file}: {error}. Name the file of a run with ACCELERATE_GOODPUT that has restarted after a failure."
        ) from None
    return means


def run(gpus: int, words: Sequence[str], as_json: bool) -> None:
    """Simulate a week, and print tables or JSON.

    Not a collective.

    Raises:
        LaunchError: as in `parse`.
    """
    values, given = parse(words, gpus)
    results = simulate(gpus, values)
    if as_json:
        rows = [
            {**vars(result), "expected": None if math.isnan(result.expected) else result.expected}
            for result in results
        ]
        print(json.dumps({"gpus": gpus, "assumptions": values, "ways": rows}, indent=1))
        return
    lost = [cause for cause in CAUSES[1:] if any(result.hours[cause] >= 0.005 for result in results)]
    cells: list[list[Any]] = [
        [
            result.way,
            f"{result.goodput:.2%}",
            f"{result.error:.2%}",
            "-" if math.isnan(result.expected) else f"{result.expected:.2%}",
            *(f"{result.hours[cause]:.2f}" for cause in lost),
        ]
        for result in results
    ]
    each = values["mtbf"] / gpus
    print(
        f"{values['days']:g} days of {gpus:,} GPUs, with a failure each {each:.3g} h; means of {values['runs']:.0f} simulated runs."
    )
    print("Columns behind the formula: hours of the cluster that were lost.\n")
    headings = ["after a failure", "goodput", "+-", "formula", *lost]
    print(table(headings, cells, headings[1:], rule=True))
    sources = [
        [
            name,
            f"{values[name]:.4g} {assumption.unit}".rstrip(),
            assumption.what,
            "given" if name in given else assumption.source,
        ]
        for name, assumption in ASSUMPTIONS.items()
    ]
    print("\nAssumptions; change them by --failures NAME=VALUE:\n")
    print(table(["name", "value", "what", "source"], sources, ["value"], rule=True))
    print(
        "\nFailures are independent. Two that hit both copies in memory at once are not simulated. Spare GPUs are there."
    )
