"""What --tee, --log_dir and their neighbours may be."""

import io
import os
import sys

import pytest

from accelerate.launch import logs
from accelerate.launch.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "processes", "expected"),
    [
        ("0", 2, {0: 0, 1: 0}),
        (" 3 ", 2, {0: 3, 1: 3}),
        ("0:1,1:3", 2, {0: 1, 1: 3}),
        ("1:2", 3, {0: 0, 1: 2, 2: 0}),
        ("11:1, 0:2", 12, {0: 2, **dict.fromkeys(range(1, 11), 0), 11: 1}),
        ("0:1,0:2", 1, {0: 2}),
    ],
)
def test_streams_by_number_and_by_rank(text, processes, expected):
    assert logs.parse_tee(text, processes) == expected


@pytest.mark.parametrize("text", ["4", "-1", "", "both", "0:4", "0:1,", "0:1;1:2", "a:1", "\u0663", "0:\u0663"])
def test_other_words_are_refused(text):
    with pytest.raises(LaunchError, match="--tee is .*Write 0"):
        logs.parse_tee(text, 2)


def test_ranks_that_there_are_not():
    with pytest.raises(LaunchError, match="there is no local rank 2: they go from 0 to 1"):
        logs.parse_tee("2:1", 2)


def test_a_directory_without_a_choice_gets_both_streams(plan):
    assert logs.streams(plan("--cpu --num_processes 2")) == {0: 0, 1: 0}
    assert logs.streams(plan("--cpu --num_processes 2 --log_dir out")) == {0: 3, 1: 3}
    assert logs.streams(plan("--cpu --num_processes 2 --log_dir out --tee 0")) == {0: 0, 1: 0}
    assert logs.streams(plan("--cpu --num_processes 2 --tee 0:1")) == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ("--max_restarts -1", "--max_restarts is -1 (command line)"),
        ("--monitor_interval 0", "--monitor_interval is 0.0"),
        ("--monitor_interval -2", "--monitor_interval is -2.0"),
        ("--monitor_interval nan", "--monitor_interval is nan"),
        ("--monitor_interval inf", "--monitor_interval is inf"),
        ("--role=", "--role is ''"),
        ("--log_dir=", "needs the name of a directory"),
        ("--log_dir train.py", "train.py is not a directory"),
        ("--log_dir train.py/logs", "train.py is not a directory"),
        ("--tee 9", "--tee is '9'"),
    ],
)
def test_bad_values_name_the_option(plan, options, fragment):
    with pytest.raises(LaunchError) as caught:
        logs.check(plan(f"--cpu --num_processes 2 {options}"))
    assert fragment in str(caught.value)


def test_good_values(plan, tmp_path):
    logs.check(plan("--cpu --num_processes 2 --max_restarts 3 --monitor_interval 0.01 --role x --log_dir a/b --tee 3"))
    assert not (tmp_path / "a").exists()  # a check makes nothing


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_nobody_may_write_to(plan, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(LaunchError, match="nothing may be written"):
        logs.check(plan("--cpu --num_processes 2 --log_dir closed/logs"))


def test_directories(tmp_path):
    given = str(tmp_path / "a" / "b")
    with logs.directory(given) as directory:
        assert directory == given and os.listdir(given) == []
    assert os.path.isdir(given)
    with logs.directory(None) as directory:
        assert os.path.isdir(directory)
    assert not os.path.exists(directory)


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="--log_dir is .*file"), logs.directory(str(tmp_path / "file")):
        pass

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(logs.tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match="Permission denied"), logs.directory(str(tmp_path)):
        pass


def test_lines_come_when_they_are_written(monkeypatch):
    held = io.TextIOWrapper(io.BytesIO(), line_buffering=False)
    monkeypatch.setattr(sys, "stdout", held)
    with logs.lines_at_once({0: 0}):
        assert not held.line_buffering
    with logs.lines_at_once({0: 3}):
        assert held.line_buffering
    assert not held.line_buffering
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # what a notebook has there
    with logs.lines_at_once({0: 3}):
        pass
