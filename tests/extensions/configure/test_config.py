"""`accelerate config`, without a terminal."""

import io

import pytest
import yaml

from cases import cases


@pytest.fixture
def type_lines(monkeypatch, machine):
    machine()

    def typed(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return typed


def test_a_file_in_the_default_place(accelerate, type_lines, place):
    type_lines("", "2", "", "", "", "", "", "", "")
    status, out, err = accelerate("config")
    assert (status, err) == (0, "")
    path = place / "home" / "accelerate" / "default_config.yaml"
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_CPU"
    assert f"Wrote {path}. `accelerate launch SCRIPT` runs with it." in out


def test_a_faulty_file(accelerate, refused, type_lines, place):
    """What can be read gives the defaults; what cannot be read is left alone."""
    (place / "c.yaml").write_text("num_proceses: 3\ndistributed_type: MULTI_CPU\n")
    type_lines(*[""] * 9)
    status, out, _ = accelerate("config", "--config_file", "c.yaml")
    assert status == 0 and "its settings are the defaults" in out
    assert yaml.safe_load((place / "c.yaml").read_text())["distributed_type"] == "MULTI_CPU"
    for name, text, words in (("d.yaml", "a: [", "d.yaml"), (".", None, "is a folder or a device; name a file")):
        if text:
            (place / name).write_text(text)
        assert words in refused("config", "--config_file", name)
    assert (place / "d.yaml").read_text() == "a: ["


@cases(
    "words, what",
    (["default"], "saved at c.yaml"),
    (["show"], "configuration file: c.yaml"),
    (["update"], "Updated c.yaml"),
    (["validate"], "c.yaml: no problem found"),
    (["show", "--config_file", "d.yaml"], "configuration file: d.yaml"),
)
def test_a_file_before_the_subcommand_is_meant(accelerate, place, default_file, machine, words, what):
    machine()
    default = default_file("fp16: true\n")
    (place / "d.yaml").write_text("distributed_type: 'NO'\n")
    if words != ["default"]:
        (place / "c.yaml").write_text("distributed_type: 'NO'\n")
    status, out, err = accelerate("config", "--config_file", "c.yaml", *words)
    assert (status, err) == (0, "") and what in out and default.read_text() == "fp16: true\n"


def test_an_empty_name_is_not_the_default_file(refused, type_lines):
    type_lines(*[""] * 12)
    for words in ([], ["default"], ["show"], ["update"], ["validate"]):
        assert "''" in refused("config", *words, "--config_file", "")
