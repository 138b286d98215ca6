"""Programs of the pages that are about several processes run on two."""

import pytest

from distributed.conftest import done, launch_command, plain_environment
from unit.tools.test_pages import blocks, is_part

# What is in the programs, and what they print.
PAGES = {
    "docs/learn/two-processes.md": ("steps an epoch", "epoch 2: "),
    "docs/learn/training-loop.md": ("", "epoch 2: "),
    "docs/learn/resume.md": ("latest=True", "epoch 2: 0.1773"),
    "docs/switch.md": ("", "files of weights: 1"),
    "docs/learn/your-loop.md": ("Accelerator(", "accuracy 0.9"),
    "docs/guides/experts.md": ("", "norm "),
    "docs/guides/long-sequences.md": ("", ""),
    "docs/guides/pipeline-training.md": ("", "loss "),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_on_two_processes(page, tmp_path):
    word, printed = PAGES[page]
    whole = [block for block in blocks(page, "python") if not is_part(block) and word in block]
    # Of content tabs, the first is the one with the Accelerator; the other programs of a page continue the first.
    (tmp_path / "page.py").write_text(whole[0] if "Accelerator(" in whole[0] else "\n".join(whole))
    command = [*launch_command(2, cpu=True), "page.py"]
    ended = done(command, cwd=tmp_path, env=plain_environment(tmp_path, OMP_NUM_THREADS="1"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert printed in ended.stdout
