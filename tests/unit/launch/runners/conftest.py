"""Files and packages of a test."""

import sys

import pytest


@pytest.fixture
def written(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """Make an importable package of files; it is forgotten after the test."""

    def make(name, **files):
        folder = tmp_path / "packages"
        monkeypatch.syspath_prepend(str(folder))
        for path, text in {"__init__": "", **files}.items():
            file = folder / name / f"{path.replace('__of__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    yield make
    monkeypatch.undo()  # a test may have put something else in the place of its package
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
