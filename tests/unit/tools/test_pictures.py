"""The picture of restarts reads what a benchmark has measured, in any of the forms that it may have."""

import importlib.util
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools/pictures.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pictures", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "phases",
    [
        [["noticed", 1.5], ["start", 0], ["load", 2]],
        [{"phase": "noticed", "seconds": 1.5}, {"phase": "start", "seconds": 0.0}, {"phase": "load", "seconds": 2}],
        {"noticed": 1.5, "start": 0.0, "load": 2},
    ],
)
def test_rows_have_a_label_and_the_phases_that_took_time(tool, tmp_path, phases):
    file = tmp_path / "restart.json"
    for content in ([{"label": "cold", "phases": phases}], {"rows": [{"label": "cold", "phases": phases}]}):
        file.write_text(json.dumps(content))
        assert tool.measured_phases(file) == [("cold", [("noticed", 1.5), ("load", 2.0)])]


def test_a_picture_is_drawn_once_it_is_measured(tool, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "restart.json"
    monkeypatch.setattr(tool, "RESTARTS", file)
    monkeypatch.setattr(tool, "PICTURES", {"restarts": tool.restarts})
    monkeypatch.setattr(tool, "NEEDS", {"restarts": file})
    assert tool.draw(tmp_path) == []
    file.write_text(json.dumps([{"label": "cold", "phases": {"noticed": 1.0, "load": 2.0}}]))
    light, dark = tool.draw(tmp_path)
    assert (light.name, dark.name) == ("restarts-light.svg", "restarts-dark.svg")
    assert "3.00 s" in light.read_text() and "cold" in dark.read_text()
