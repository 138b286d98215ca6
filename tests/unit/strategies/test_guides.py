"""The examples of the guides to strategies run, one after the other, in one process."""

import re
from pathlib import Path

import pytest

from accelerate.state import AcceleratorState

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


@pytest.mark.parametrize("guide", ["fsdp", "fsdp2-migration", "weights", "tensor-parallel", "sharded-models"])
def test_the_examples_run(process_group, guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / f"{guide}.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    names: dict[str, object] = {"__name__": guide}
    for block in blocks:
        if block.startswith("# Given:"):
            continue
        if "Accelerator(" in block:  # as a separate program; what was built above lives on
            AcceleratorState._reset_state()
        exec(compile(block, guide, "exec"), names)


def test_every_option_of_the_plugin_has_a_row():
    from accelerate import FullyShardedDataParallelPlugin

    table = (GUIDES / "fsdp2-migration.md").read_text("utf-8").split("## Each option")[1].split("\n## ")[0]
    missing = [name for name in FullyShardedDataParallelPlugin.__dataclass_fields__ if f"`{name}" not in table]
    assert missing == ["fsdp_version"]
