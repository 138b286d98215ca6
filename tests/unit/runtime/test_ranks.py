"""Ranks from the variables of torchrun."""

import os

import pytest

from accelerate.runtime import ranks
from accelerate.runtime.ranks import Ranks, resolve


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, Ranks(1, 2, 0, None, "torchrun")),
        (dict(zip(ranks.VARIABLES, "2412", strict=True)), Ranks(2, 4, 1, 2, "torchrun")),
    ],
)
def test_launchers(environ, found):
    assert resolve(environ) == found


def test_no_launcher():
    for environ in ({}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "-1"}, {"WORLD_SIZE": "1"}, {"RANK": "0"}):
        assert resolve(environ) is None, environ


@pytest.mark.parametrize(
    ("environ", "fragments"),
    [
        ({"WORLD_SIZE": "two"}, ("WORLD_SIZE", "'two'")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE is 2", "RANK is not set")),
        ({"RANK": "1"}, ("RANK is 1", "WORLD_SIZE is not set")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK is 2", "0 to 1")),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK is -1",)),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ("WORLD_SIZE is 0",)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, ("LOCAL_WORLD_SIZE is 3",)),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK is not set",)),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ("LOCAL_RANK is 2",)),
    ],
)
def test_contradictions_are_named(environ, fragments):
    with pytest.raises(ValueError) as caught:
        resolve(environ)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.fixture
def unset(monkeypatch):
    for name in (*ranks.VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_export_sets_what_is_missing_only(monkeypatch, unset):
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        ranks.export(Ranks(1, 4, 1, 2, "other"))
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    ranks.export(Ranks(1, 4, 1, 2, "other"))
    assert os.environ["RANK"] == "1" and os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert os.environ["MASTER_ADDR"] == "elsewhere" and os.environ["MASTER_PORT"] == "29500"
