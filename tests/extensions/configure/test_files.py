"""Files that are written without questions: `accelerate config update`, `default`, and how: whole or not at all."""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from accelerate.extensions.configure import config_utils as store
from accelerate.extensions.configure.default import write_basic_config
from accelerate.launch import config_file
from accelerate.launch.errors import LaunchError
from cases import cases

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures" / "configs").glob("*.[yj]*"))


@pytest.fixture
def update(accelerate):
    return lambda name="c.yaml": accelerate("config", "update", "--config_file", name)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_every_setting_of_every_release_is_right_and_kept(place, accelerate, update, path):
    copy = place / path.name
    shutil.copy(path, copy)
    status, out, err = accelerate("config", "validate", path.name)
    assert (status, err) == (0, "") and out.endswith("no problem found.\n")
    before = config_file.read(copy)
    assert before.unused == ()
    status, _, err = update(path.name)
    assert (status, err) == (0, "")
    after = config_file.inspect(copy)
    assert {name: after.values[name] for name in before.values} == before.values
    assert after.notes == []
    once = copy.read_bytes()
    status, out, _ = update(path.name)
    assert status == 0 and "is already in the current format" in out and copy.read_bytes() == once


def test_the_old_file_is_kept(place, update):
    text = "# mine\ndistributed_type: FSDP  # as always\nfp16: true\nfsdp_config: {offload_params: true, own: 1}\n"
    (place / "c.yaml").write_text(text)
    os.chmod(place / "c.yaml", 0o640)
    status, out, _ = update()
    assert status == 0 and "note: fp16 is now mixed_precision: fp16." in out
    assert "note: fsdp_config.own is unknown" in out
    assert (place / "c.yaml.bak").read_text() == text
    content = yaml.safe_load((place / "c.yaml").read_text())
    wanted = {"fsdp_config": {"fsdp_offload_params": True, "own": 1}, "mixed_precision": "fp16"}
    assert wanted.items() <= content.items()
    if os.name == "posix":
        assert (place / "c.yaml").stat().st_mode & 0o777 == 0o640
    (place / "c.yaml").write_text("distributed_type: TPU\n")
    assert "c.yaml.bak2" in update()[1]
    assert (place / "c.yaml.bak").read_text() == text
    assert sorted(path.name for path in place.iterdir()) == ["c.yaml", "c.yaml.bak", "c.yaml.bak2"]


@cases(
    "text, message",
    ("distributed_type: NO\nmixed_precision: fp17", "not changed: mixed_precision is 'fp17'"),
    ("num_processes: 1", "lacks `distributed_type`"),
)
def test_a_faulty_file_is_left_alone(place, update, text, message):
    (place / "c.yaml").write_text(text)
    status, _, err = update()
    assert status == 2 and message in err and (place / "c.yaml").read_text() == text
    assert [path.name for path in place.iterdir()] == ["c.yaml"]


@pytest.mark.skipif(os.name != "posix", reason="links need rights on Windows")
def test_a_link_stays_a_link(place, update):
    (place / "real.yaml").write_text("distributed_type: TPU\n")
    (place / "c.yaml").symlink_to("real.yaml")
    assert update()[0] == 0
    assert (place / "c.yaml").is_symlink()
    assert "XLA" in (place / "real.yaml").read_text()
    assert (place / "real.yaml.bak").exists()


@pytest.mark.parametrize(
    ("device", "count", "kind"),
    [("cpu", 0, "NO"), ("cuda", 1, "NO"), ("cuda", 4, "MULTI_GPU"), ("xpu", 2, "MULTI_XPU")],
)
def test_file_describes_the_machine(place, machine, device, count, kind):
    machine(device, count)
    path = write_basic_config("bf16", place / "deep" / "c.yaml")
    wanted = {"distributed_type": kind, "num_processes": count or 1, "use_cpu": not count, "mixed_precision": "bf16"}
    assert wanted.items() <= yaml.safe_load(path.read_text()).items()


@pytest.mark.parametrize("broken", ["replace", "chmod"])
@pytest.mark.parametrize(
    ("error", "seen"), [(OSError(28, "No space left on device"), LaunchError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_a_write_that_fails_changes_nothing(place, monkeypatch, broken, error, seen):
    (place / "c.yaml").write_text("old")
    monkeypatch.setattr(os, broken, Mock(side_effect=error))
    with pytest.raises(seen) as caught:
        store.write(place / "c.yaml", {"a": 1})
    assert seen is KeyboardInterrupt or "c.yaml cannot be written: No space left on device" in str(caught.value)
    assert (place / "c.yaml").read_text() == "old"
    assert [path.name for path in place.iterdir()] == ["c.yaml"]


def test_places_that_cannot_be_written(place, monkeypatch):
    (place / "file").touch()
    with pytest.raises(LaunchError, match="is no folder that you may write to"):
        store.check_writable(place / "file" / "c.yaml")
    with pytest.raises(LaunchError, match="is a folder or a device; name a file"):
        store.check_writable(place)
    with pytest.raises(LaunchError, match="cannot be written"):
        store.write(place / "file" / "c.yaml", {})
    store.check_writable(place / "new" / "folder" / "c.yaml")
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(LaunchError, match="is no folder that you may write to"):
        store.check_writable(place / "c.yaml")
