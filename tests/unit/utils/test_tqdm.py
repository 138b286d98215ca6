"""The progress bar."""

import sys

import pytest

import accelerate.process
from accelerate.utils import tqdm


@pytest.mark.parametrize(("rank", "main_only", "hidden"), [(0, True, False), (1, True, True), (1, False, False)])
def test_only_the_main_process_shows_it(monkeypatch, rank, main_only, hidden):
    monkeypatch.setattr(accelerate.process, "PartialState", lambda: type("S", (), {"local_process_index": rank})())
    bar = tqdm(range(2), main_process_only=main_only)
    assert bool(bar.disable) is hidden
    assert list(bar) == [0, 1]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        tqdm(range(2))
