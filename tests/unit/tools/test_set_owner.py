"""The git address is one variable, which a maintainer sets once."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("set_owner", ROOT / "tools/set_owner.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_every_file_gets_the_address_and_can_get_another(tmp_path):
    for path in tool.files(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text("utf-8"), "utf-8")
    before = tool.current(ROOT)
    changed = tool.set_owner(tmp_path, "acme/speed.up")
    names = {path.name for path in changed}
    assert {"README.md", "setup.py", "mkdocs.yml", "index.md"} <= names
    assert tool.current(tmp_path) == "acme/speed.up"
    texts = {path: path.read_text("utf-8") for path in tool.files(tmp_path)}
    assert not [path for path, text in texts.items() if re.search(re.escape(before), text)]
    assert "git+https://github.com/acme/speed.up.git" in texts[tmp_path / "README.md"]
    tool.set_owner(tmp_path, before)
    for path in tool.files(ROOT):
        assert (tmp_path / path.relative_to(ROOT)).read_text("utf-8") == path.read_text("utf-8")


def test_an_address_that_is_none_is_refused_and_nothing_else_is_named():
    assert tool.strangers(ROOT) == []
    with pytest.raises(ValueError, match="OWNER/NAME"):
        tool.set_owner(ROOT, "https://github.com/acme/accelerate")
