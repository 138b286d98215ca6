"""Each number in the README is the one that the benchmarks measured."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[3]
README = " ".join((ROOT / "README.md").read_text("utf-8").split())


def figures(name):
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text("utf-8"))["figures"]


def prepared_twice():
    row = figures("double_prepare")["1000 MB, prepared twice"]
    written, calls = row["written (MB)"], row["state_dict calls, save"]
    return (
        f"upstream's `save_state` write {round(written['1.15.0'], -2):,.0f} MB and call `state_dict` {calls['1.15.0']} times per rank. "
        f"This fork writes {round(written['ours'], -2):,.0f} MB"
    )


def step_overhead():
    row = figures("step")
    overhead, plain = row["step overhead (us)"], row["plain torch step (us)"]["ours"]
    return f"takes {plain:.0f} µs in plain torch, {overhead['ours']:.0f} µs more here, {overhead['1.15.0']:.0f} µs more with"


def strategies():
    ratios = [row["both"]["step, ratio"] for row in figures("strategies").values() if "both" in row]
    return f"at most {max(ratios):.3f}x the step time of plain torch"


def small_save():
    row = figures("checkpoint")["10 MB, 1 process"]["save_state (s)"]
    return f"saved in {1000 * row['ours']:.0f} ms, upstream's in {1000 * row['1.15.0']:.0f} ms"


@pytest.mark.parametrize("sentence", [prepared_twice, step_overhead, strategies, small_save])
def test_numbers_are_those_of_the_benchmarks(sentence):
    assert sentence() in README
