import email
import shutil
import subprocess
from datetime import datetime, timedelta, timezone

import pytest

from transformers_patch.export import mail
from transformers_patch.export.sources import SourceTree

DATE = datetime(2026, 1, 31, 12, 30, tzinfo=timezone(timedelta(hours=2)))
WORDS = {
    "subject": "Change it",
    "message": "Why it is changed.\n",
    "author": "Ada Lovelace <ada@example.org>",
    "date": DATE,
}
OLD = "".join(f"line {number}\n" for number in range(40))


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "tree" / "src" / "thing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1"\n', "utf-8")
    (package / "code.py").write_text(OLD, "utf-8")
    (package / "open.py").write_bytes(b"no end of line")
    (package / "run.py").write_text("#!/usr/bin/env python\n", "utf-8")
    (package / "run.py").chmod(0o755)
    return tmp_path / "tree"


def changes():
    return {
        "src/thing/code.py": OLD.replace("line 3\n", "line three\n").replace(
            "line 30\n", "line 30\nmore: é\u2028\f\n"
        ),
        "src/thing/open.py": "no end of line\nand none again",
        "src/thing/run.py": "#!/usr/bin/env python\nprint()\n",
        "src/thing/new.py": "new\n",
        "tests/deep/test_new.py": "-- \n--- a\n+++ b\n",
    }


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_am_makes_exactly_these_files(folder, tmp_path):
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "base")
    words = {
        **WORDS,
        "author": "Zoë Ångström <zoe@example.org>",
        "message": "Why.\n\nFrom é on, and more.\n".replace("From", "from"),
    }
    patch = tmp_path / "0001.patch"
    patch.write_bytes(mail.patch(SourceTree(folder), changes(), **words).encode("utf-8"))
    git(folder, "apply", "--check", str(patch))
    git(folder, "am", "--quiet", str(patch))
    for path, text in changes().items():
        assert (folder / path).read_bytes() == text.encode("utf-8"), path
    assert git(folder, "status", "--porcelain") == ""
    shown = git(folder, "log", "-1", "--format=%an|%ae|%aI|%s|%b").strip()
    assert shown == "Zoë Ångström|zoe@example.org|2026-01-31T12:30:00+02:00|Change it|Why.\n\nfrom é on, and more."
    assert "100755" in git(folder, "ls-files", "--stage", "src/thing/run.py")
    # git itself names the same blobs, so `git am --3way` finds what the patch was written against.
    index = [line for line in patch.read_text("utf-8").split("\n") if line.startswith("index ")]
    wanted = git(folder, "show", "--format=", "--full-index", "HEAD").split("\n")
    assert sorted(index) == sorted(line for line in wanted if line.startswith("index "))


def test_it_is_a_mail(folder):
    read = email.message_from_string(mail.patch(SourceTree(folder), changes(), **WORDS))
    assert read["From"] == "Ada Lovelace <ada@example.org>"
    assert read["Date"] == "Sat, 31 Jan 2026 12:30:00 +0200"
    assert read["Subject"] == "[PATCH] Change it"
    lines = read.get_payload().split("\n")
    assert lines[:2] == ["Why it is changed.", "---"]
    assert " 5 files changed, 9 insertions(+), 2 deletions(-)" in lines
    assert " create mode 100644 src/thing/new.py" in lines
    assert lines[-4:] == ["-- ", "transformers_patch", "", ""]


def test_equal_arguments_give_equal_text(folder):
    tree = SourceTree(folder)
    assert mail.patch(tree, changes(), **WORDS) == mail.patch(tree, dict(reversed(changes().items())), **WORDS)


def test_an_unchanged_file_is_left_out(folder):
    text = mail.patch(SourceTree(folder), {"src/thing/code.py": OLD, "new.py": "x\n"}, **WORDS)
    assert "code.py" not in text and " 1 file changed, 1 insertion(+)\n" in text


@pytest.mark.parametrize(
    "words, said",
    [
        ({"subject": "two\nlines"}, "one line of ASCII"),
        ({"subject": "é"}, "one line of ASCII"),
        ({"message": "text\n--- a cut\n"}, "starts with '--- '"),
        ({"message": "diff --git a b\n"}, "starts with 'diff -'"),
        ({"message": "From here on\n"}, "starts with 'From '"),
        ({"author": "nobody"}, 'not of the form "Name'),
        ({"author": "a@b.org"}, 'not of the form "Name'),
        ({"date": DATE.replace(tzinfo=None)}, "has no time zone"),
    ],
)
def test_what_git_would_misread_is_refused(folder, words, said):
    with pytest.raises(ValueError, match=said):
        mail.patch(SourceTree(folder), changes(), **{**WORDS, **words})


def test_no_change_is_refused(folder):
    with pytest.raises(ValueError, match="nothing changes"):
        mail.patch(SourceTree(folder), {"src/thing/code.py": OLD}, **WORDS)
