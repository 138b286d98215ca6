import hashlib
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
def pack(tmp_path):
    """Write an archive of members, each a name with its content, or a `TarInfo` of some other kind."""

    def write(*members, folder=tmp_path):
        path = folder / "thing-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for member in members:
                if isinstance(member, tarfile.TarInfo):
                    archive.addfile(member)
                    continue
                name, content = member
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(content), 0o755 if name.endswith(".sh") else 0o600
                archive.addfile(info, io.BytesIO(content))
        return path

    return write


def special(name, kind, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_unpack(tool, pack, tmp_path):
    archive = pack(special("top", tarfile.DIRTYPE), ("top/a.py", b"a"), ("top/deep/b.sh", b"b"))
    tool.unpack(archive, tmp_path / "into" / "thing-1.0")
    files = {p.relative_to(tmp_path / "into"): p.read_bytes() for p in (tmp_path / "into").rglob("*") if p.is_file()}
    assert files == {Path("thing-1.0/a.py"): b"a", Path("thing-1.0/deep/b.sh"): b"b"}
    assert (tmp_path / "into/thing-1.0/deep/b.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "into/thing-1.0/a.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "members",
    [
        [("top/a", b""), ("../out", b"")],
        [("top/../../out", b"")],
        [("/out", b"")],
        [("top/a", b""), ("other/b", b"")],
        [("out", b"")],
        [special("top/link", tarfile.SYMTYPE, "/etc")],
        [special("top/link", tarfile.LNKTYPE, "top/a")],
        [special("top/pipe", tarfile.FIFOTYPE)],
        [],
    ],
    ids=["parent", "inner parent", "absolute", "two folders", "no folder", "symlink", "hard link", "pipe", "empty"],
)
def test_an_unsafe_archive_leaves_nothing(tool, pack, tmp_path, members):
    archive, into = pack(*members), tmp_path / "into"
    with pytest.raises(tool.UnsafeArchive, match="thing-1.0.tar.gz"):
        tool.unpack(archive, into / "thing-1.0")
    assert list(into.iterdir()) == [] and not (tmp_path / "out").exists()


def test_an_archive_that_unpacks_to_too_much(tool, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "_LIMIT", 10)
    with pytest.raises(tool.UnsafeArchive, match="more than 10 bytes"):
        tool.unpack(pack(("top/a", b"x" * 11)), tmp_path / "into" / "thing")


def test_fetch_verifies_and_keeps_what_is_there(tool, pack, tmp_path, monkeypatch):
    archive = pack(("top/a.py", b"a"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    asked = []
    monkeypatch.setitem(tool.SOURCES, SOURCE, digest)
    monkeypatch.setattr(tool, "download", lambda *words: asked.append(words[:2]) or archive)
    for _ in range(2):
        assert tool.fetch(SOURCE, tmp_path / "into") == tmp_path / "into" / "transformers-5.23.0"
    assert asked == [(SOURCE, digest)]
    assert (tmp_path / "into/transformers-5.23.0/a.py").read_text() == "a"


def test_another_digest_is_refused(tool, pack, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "download", lambda *words: pack(("top/a.py", b"a")))
    assert tool.main([SOURCE, "--out", str(tmp_path / "into")]) == 1
    assert "Do not use this file" in capsys.readouterr().err
    assert not (tmp_path / "into").exists()


def test_pip_gets_the_digest_and_no_index(tool, tmp_path, monkeypatch):
    seen = []

    def run(command, **options):
        seen.extend(command)
        (tmp_path / "transformers-5.23.0.tar.gz").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tool.subprocess, "run", run)
    assert tool.download(SOURCE, "ab" * 32, tmp_path) == tmp_path / "transformers-5.23.0.tar.gz"
    assert (tmp_path / "requirements.txt").read_text() == f"transformers==5.23.0 --hash=sha256:{'ab' * 32}\n"
    assert "--require-hashes" in seen and "--no-deps" in seen and not [word for word in seen if "://" in word]


def test_pip_fails(tool, tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "no such file")
    monkeypatch.setattr(tool.subprocess, "run", lambda *words, **options: failed)
    assert tool.main([SOURCE, "--out", str(tmp_path / "into")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_an_unknown_name(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["numpy-1.0"])
    assert "'numpy-1.0' is not known" in capsys.readouterr().err
