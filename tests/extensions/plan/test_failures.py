"""A simulated week on GPUs that fail: every second has a cause, and the goodput is the one that formulas expect."""

import json
import math
import random
import statistics

import pytest

from accelerate.extensions.plan import failures
from accelerate.extensions.plan.failures import (
    ASSUMPTIONS,
    Timeline,
    continuing,
    expected_goodput,
    restarting,
    young_daly,
)

LENGTH = 100_000.0


def simulated(run, mtbf, count=40, length=LENGTH):
    """Return timelines, and the mean and standard error of their goodput."""
    lines = [Timeline(length, 1 / mtbf, random.Random(seed)) for seed in range(count)]
    for line in lines:
        run(line)
        assert sum(line.seconds.values()) == pytest.approx(length) and min(line.seconds.values()) >= 0
    shares = [line.seconds["productive"] / length for line in lines]
    return lines, statistics.mean(shares), statistics.stdev(shares) / math.sqrt(count)


@pytest.mark.parametrize("mtbf", [200.0, 700.0, 5000.0])
@pytest.mark.parametrize("interval", [30.0, 150.0])
def test_restarts_have_the_expected_goodput(mtbf, interval):
    """Also where failures are so frequent that many of them come in saves and recoveries."""
    recovery = {"detect": 10.0, "restart": 15.0, "load": 5.0}
    lines, mean, error = simulated(lambda line: restarting(line, interval, 8.0, (1, 0.0), recovery), mtbf)
    assert error < 0.01 and abs(mean - expected_goodput(interval, 8.0, 30.0, mtbf)) < 4 * error
    counted = statistics.mean(line.seconds["detect"] for line in lines)
    assert counted > statistics.mean(line.seconds["load"] for line in lines) * 2 - 4 * error


def test_rare_failures_cost_what_young_and_daly_say():
    """To first order: the save of each interval, half an interval for each failure, and the recovery."""
    save, recovery, mtbf = 5.0, 20.0, 20_000.0
    interval = young_daly(save, mtbf)
    assert interval == math.sqrt(2 * save * mtbf)
    phases = {"detect": recovery}
    lines, mean, error = simulated(lambda line: restarting(line, interval, save, (1, 0.0), phases), mtbf, count=200)
    assert 1 - mean == pytest.approx(save / interval + (interval / 2 + recovery) / mtbf, abs=4 * error + 0.001)
    repeated = statistics.mean(line.seconds["recomputed"] for line in lines)
    assert repeated == pytest.approx(LENGTH / mtbf * interval / 2, rel=0.2)
    for factor in (0.25, 4.0):
        _, other, _ = simulated(lambda line: restarting(line, factor * interval, save, (1, 0.0), phases), mtbf)  # noqa: B023
        assert other < mean - 4 * error


def test_without_failures_only_saves_cost():
    _, mean, _ = simulated(lambda line: restarting(line, 90.0, 5.0, (2, 10.0), {}), mtbf=1e15, count=2, length=2000.0)
    assert mean == pytest.approx(2 * 90 / (2 * (90 + 5) + 10))


def test_replicas_lose_the_share_of_those_that_are_absent():
    """Each replica is at work and absent by turns, so it is absent for the part absence / (absence + time between its failures)."""
    replicas, mtbf = 8, 250.0
    recovery = {"detect": 90.0, "restart": 9.0, "load": 1.0}
    values = {"replicas": replicas, "archive": 1e9, "save": 1.0, "pause": 0.0, "load": 1.0}
    lines, _, _ = simulated(lambda line: continuing(line, values, recovery), mtbf)
    absent = [line.seconds["absent"] / LENGTH for line in lines]
    wanted = 100.0 / (100.0 + replicas * mtbf)
    assert abs(statistics.mean(absent) - wanted) < 4 * statistics.stdev(absent) / math.sqrt(len(lines))
    assert sum(line.seconds["recomputed"] for line in lines) == 0


def test_the_last_replica_takes_the_work_with_it():
    values = {"replicas": 1, "archive": 150.0, "save": 8.0, "pause": 0.0, "load": 5.0}
    recovery = {"detect": 10.0, "restart": 15.0, "load": 1.0}
    _, mean, error = simulated(lambda line: continuing(line, values, recovery), 700.0)
    assert abs(mean - expected_goodput(150.0, 8.0, 30.0, 700.0)) < 4 * error


def test_the_command_prints_each_way_and_its_assumptions(accelerate):
    status, out, err = accelerate("plan", "--gpus", "16384", "--failures", "detect=30", "runs=20")
    assert status == 0, err
    assert "with a failure each 3.09 h" in out and "128 replicas, the others continue" in out
    assert all(name in out for name in ASSUMPTIONS) and "given" in out and "arXiv:2407.21783" in out
    status, out, err = accelerate("plan", "--gpus", "16384", "--failures", "detect=30", "runs=20", "--json")
    facts = json.loads(out)
    cold, warm, peer, replicas = facts["ways"]
    assert cold["goodput"] < warm["goodput"] + 4 * cold["error"] < peer["goodput"] < replicas["goodput"]
    assert abs(cold["goodput"] - cold["expected"]) < 4 * cold["error"] and peer["expected"] is None
    for way in facts["ways"]:
        assert sum(way["hours"].values()) == pytest.approx(7 * 24)
    assert facts["assumptions"]["interval"] == pytest.approx(young_daly(33, 54 * 86400 / 419))


def test_numbers_of_a_run_replace_assumptions(tmp_path):
    causes = dict.fromkeys(("productive", "failure", "imports", "setup", "load"), 0.0)
    attempts = [causes | {"setup": 50.0}]
    attempts += [causes | {"failure": 4.0, "imports": 2.0, "setup": 3.0, "load": 5.0}]
    attempts += [causes | {"failure": 8.0, "imports": 4.0, "setup": 3.0, "load": 7.0}]
    file = tmp_path / "goodput.jsonl"
    file.write_text("".join(json.dumps({"seconds": seconds}) + "\n" for seconds in attempts))
    values, given = failures.parse([f"measured={file}", "load=1"], 64)
    assert (values["detect"], values["cold"], values["load"]) == (6.0, 6.0, 1.0)
    assert given == {"detect", "cold", "load"} and values["replicas"] == 2 and values["archive"] > 3600
    assert len(failures.ways(values | {"replicas": 1}, 1e5)) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("speed=1", "has no 'speed'; write NAME=VALUE, with measured or days, mtbf"),
        ("./llama", "has no './llama'"),
        ("detect=soon", "detect=soon: give a number of at least 0 s"),
        ("save=0", "save=0: give a number of at least 0.001 s"),
        ("load=nan", "load=nan: give a number"),
        ("days=inf", "days=inf: give a number"),
        ("runs=1.5", "runs=1.5: give a whole number of at least 2."),
        ("replicas=9", "replicas=9, but --gpus is 8: give at most one replica a GPU"),
        ("interval_peer=0.1", "interval_peer=0.1: give at least 1 s, or 0 for"),
        ("mtbf=0.5", "8 GPUs fail each 225 s on average, before a failure is noticed"),
        ("measured=none.jsonl", "measured=none.jsonl: .*Name the file of a run with ACCELERATE_GOODPUT"),
    ],
)
def test_nonsense_is_refused(words, message):
    with pytest.raises(failures.LaunchError, match=message):
        failures.parse([words], 8)


def test_a_model_and_a_week_are_two_questions(refused):
    assert "remove 'x'" in refused("plan", "x", "--gpus", 8, "--failures")
    assert "--gpus is 0" in refused("plan", "--gpus", 0, "--failures")
    assert "--gpu is missing" in refused("plan", "x", "--gpus", 8)
    assert "--nodes has no meaning with --failures" in refused("plan", "--gpus", 8, "--nodes", 2, "--failures")
    assert "--write has no meaning with --failures" in refused("plan", "--gpus", 8, "--write", "x.yaml", "--failures")
