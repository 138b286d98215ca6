import importlib.util
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = "transformers-5.23.0"


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("fetch_sources", ROOT / "tools" / "fetch_sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip(tool, monkeypatch):
    """Let pip leave an archive of one member; the commands that were run are returned."""
    commands = []

    def leave(member):
        def run(command, **options):
            commands.append(command)
            folder, info = Path(command[-1]), tarfile.TarInfo(member)
            with tarfile.open(folder / f"{SOURCE}.tar.gz", "w:gz") as archive:
                info.size = 1
                archive.addfile(info, io.BytesIO(b"a"))
            commands.append((folder / "requirements.txt").read_text())
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(tool.subprocess, "run", run)
        return commands

    return leave


def test_fetch_asks_for_the_digest_and_keeps_what_is_there(tool, pip, tmp_path):
    commands = pip(f"{SOURCE}/a.py")
    for _ in range(2):
        assert tool.fetch(SOURCE, tmp_path / "into") == tmp_path / "into" / SOURCE
    command, requirements = commands
    assert requirements == f"transformers==5.23.0 --hash=sha256:{tool.SOURCES[SOURCE]}\n"
    assert {"--require-hashes", "--no-deps"} <= set(command) and not [word for word in command if "://" in word]
    assert (tmp_path / "into" / SOURCE / "a.py").read_text() == "a"


@pytest.mark.parametrize("member", ["../out", "/out", "other/a.py"])
def test_an_archive_that_is_another_one_leaves_nothing(tool, pip, tmp_path, member, capsys):
    pip(member)
    assert tool.main([SOURCE, "--out", str(tmp_path / "into")]) == 1
    assert SOURCE in capsys.readouterr().err
    assert list((tmp_path / "into").iterdir()) == [] and not (tmp_path / "out").exists()


def test_pip_fails(tool, tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "no such file")
    monkeypatch.setattr(tool.subprocess, "run", lambda *words, **options: failed)
    assert tool.main([SOURCE, "--out", str(tmp_path / "into")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_an_unknown_name(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["numpy-1.0"])
    assert "'numpy-1.0' is not known" in capsys.readouterr().err
