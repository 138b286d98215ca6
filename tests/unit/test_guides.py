"""The examples of the guide to checkpoints run, one after the other."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "checkpointing.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert (tmp_path / "runs" / "first" / "checkpoints" / "checkpoint_2" / "accelerate_manifest.json").exists()
