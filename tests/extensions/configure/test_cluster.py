"""The interview about machines of your own, and what `accelerate launch` makes of its file."""

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.config.options import CHAPTERS, OPTIONS, SWITCH_OF_DISTRIBUTED_TYPE
from accelerate.extensions.configure import cluster
from accelerate.extensions.configure.cluster import ask_cluster
from accelerate.extensions.configure.config_args import load_config_from_file
from accelerate.extensions.configure.interview import Interview, check
from accelerate.launch import config_file
from accelerate.launch.plan import Source
from accelerate.launch.resolve import merge


@pytest.fixture(autouse=True)
def no_devices(machine):
    machine()


def test_conditions_name_what_is_asked_in_a_chapter_that_exists():
    unasked = {"megatron", ""}  # what only a file or a flag says
    assert {option.chapter for option in OPTIONS} - unasked <= {chapter.name for chapter in CHAPTERS}
    known = {"kind", "distributed_type", "picks_devices"}
    known |= {option.name for option in OPTIONS} | {chapter.name for chapter in CHAPTERS if chapter.question}
    special = [option.special_words[0] for option in OPTIONS if option.special_words]
    for wanted in (*(option.when for option in OPTIONS), *(chapter.when for chapter in CHAPTERS), *special):
        assert set(wanted) <= known


@pytest.mark.parametrize("devices", [("cpu", 0), ("cuda", 1), ("cuda", 4), ("xpu", 2)], ids=str)
def test_launch_reads_back_what_was_answered(place, at_random, machine, monkeypatch, devices):
    machine(*devices)
    talks, parser = [], launch_command_parser()
    monkeypatch.setattr(cluster, "Interview", lambda *a, **k: talks.append(Interview(*a, **k)) or talks[-1])
    for seed in range(25):
        config = ask_cluster(at_random(f"{seed} {devices}"))
        path = config.save(place / ("c.json" if seed % 2 else "c.yaml"))
        merged, file = merge(parser.parse_args(["--config_file", str(path), "train.py"]), {})
        for name, value in talks[-1].values.items():
            assert merged[name].value == value, (seed, name)
            assert merged[name].source is Source.FILE, (seed, name)
        switch = SWITCH_OF_DISTRIBUTED_TYPE[config.to_dict()["distributed_type"]]
        assert switch is None or merged[switch].value is True, seed
        assert file.unused == (), seed
        assert load_config_from_file(path).to_dict() == config.to_dict(), seed
        problems, notes = check(config_file.inspect(path))
        assert ([problem.text for problem in problems], notes) == ([], []), seed
