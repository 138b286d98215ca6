"""The reference has every public name, and is what the docstrings say."""

import importlib.util
import pathlib

import accelerate

ROOT = pathlib.Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("api_reference", ROOT / "tools/api_reference.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_the_page_has_every_public_name_and_is_up_to_date():
    listed = {name for modules in tool.SECTIONS.values() for name in modules.get("accelerate", "").split()}
    assert listed == {name for name in accelerate.__all__ if not name.startswith("__")}
    assert tool.page() == tool.PAGE.read_text("utf-8"), "run python tools/api_reference.py"
