"""The page "Write an extension": its extension, installed as another package, in its program on two processes."""

from distributed.conftest import done, launch_command, plain_environment
from unit.tools.test_pages import blocks

PAGE = "docs/guides/extensions.md"


def install(folder, name: str, text: str) -> None:
    """Put a module into a folder as pip does, with a distribution that has an entry point."""
    metadata = folder / f"{name}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[accelerate.extensions]\n{name} = {name}:SPEC\n")


def test_the_extension_of_the_page_measures_on_two_processes(tmp_path):
    extension, program = blocks(PAGE, "python")
    install(tmp_path / "site", "gradient_noise", extension)
    (tmp_path / "train.py").write_text(program)
    paths = plain_environment(tmp_path, PYTHONPATH=str(tmp_path / "site"), OMP_NUM_THREADS="1")
    command = [*launch_command(2, cpu=True), "train.py"]
    ended = done(command, cwd=tmp_path, env={**paths, "GRADIENT_NOISE": "1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert 0 < float(ended.stdout.partition("noise ")[2]) < 1
    without = done(command, cwd=tmp_path, env=paths)
    assert without.returncode != 0 and "list index out of range" in without.stderr
