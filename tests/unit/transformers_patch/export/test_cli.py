import argparse
import subprocess
import sys

import pytest

from transformers_patch.export import cli, recipe
from transformers_patch.export.recipe import Recipe
from transformers_patch.export.sources import UnrecognisedSource

AUTHOR, DATE = "Ada Lovelace <ada@example.org>", "2026-01-31T12:00:00+00:00"


def call(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(words)))


def export(folder, out, *words):
    options = words or ("--author", AUTHOR, "--date", DATE)
    return call("--package", "transformers", "--source", str(folder), "--out", str(out), *options)


@pytest.fixture
def made_up(monkeypatch):
    """Replace the recipe of transformers by one that adds two files, and needs no libcst."""

    def use(**changes):
        parts = {
            "package": "transformers",
            "slug": "one-two",
            "subject": "Add two files",
            "body": lambda tree: f"for {tree.version}\n",
            "edit": lambda tree: {"src/transformers/new.py": "new\n", "tests/here/test_new.py": "test\n"},
        }
        monkeypatch.setattr(cli, "load", lambda package: Recipe(**{**parts, **changes}))

    use()
    return use


def test_what_is_written(make_tree, tmp_path, made_up, capsys):
    out = tmp_path / "out"
    assert export(make_tree(), out) == 0
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert files == ["0001-one-two.patch", "PULL_REQUEST.md", "tests/here/test_new.py"]
    assert (out / "PULL_REQUEST.md").read_text("utf-8") == "for 7.0\n"
    assert (out / "tests/here/test_new.py").read_text("utf-8") == "test\n"
    patch = (out / "0001-one-two.patch").read_text("utf-8")
    assert f"From: {AUTHOR}\nDate: Sat, 31 Jan 2026 12:00:00 +0000\nSubject: [PATCH] Add two files\n" in patch
    said = capsys.readouterr().out
    assert "transformers 7.0: Add two files" in said and "git am" in said
    assert [path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("new.py")] == []


def test_a_refusal_writes_nothing(make_tree, tmp_path, made_up, capsys):
    def refuse(tree):
        raise UnrecognisedSource("looked for a thing and found none")

    for part in ("edit", "body"):
        made_up(**{part: refuse})
        assert export(make_tree() if part == "edit" else tmp_path / "tree", tmp_path / "out") == 2
        assert "looked for a thing and found none" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        (("--author", "nobody", "--date", DATE), "author='nobody' is not of the form"),
        (("--author", AUTHOR, "--date", "yesterday"), "--date 'yesterday' is neither ISO 8601"),
    ],
)
def test_options_that_cannot_be_read(make_tree, tmp_path, made_up, capsys, words, said):
    assert export(make_tree(), tmp_path / "out", *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("date", [DATE, "2026-01-31T12:00:00", "Sat, 31 Jan 2026 12:00:00 +0000"])
def test_dates(make_tree, tmp_path, made_up, date):
    assert export(make_tree(), tmp_path / "out", "--author", AUTHOR, "--date", date) == 0
    assert "Date: Sat, 31 Jan 2026 12:00:00 +0000\n" in (tmp_path / "out/0001-one-two.patch").read_text("utf-8")


def test_the_author_is_who_git_says(make_tree, tmp_path, made_up, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Grace Hopper")
    monkeypatch.setenv("GIT_AUTHOR_EMAIL", "grace@example.org")
    assert export(make_tree(), tmp_path / "out", "--date", DATE) == 0
    assert "From: Grace Hopper <grace@example.org>\n" in (tmp_path / "out/0001-one-two.patch").read_text("utf-8")


def test_nobody_is_the_author(make_tree, tmp_path, made_up, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_git_setting", lambda name: "")
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"):
        monkeypatch.delenv(name, raising=False)
    assert export(make_tree(), tmp_path / "out", "--date", DATE) == 2
    assert '--author "Name <address>"' in capsys.readouterr().err


def test_a_source_that_is_not_there(tmp_path, made_up, capsys):
    assert export(tmp_path / "nowhere", tmp_path / "out") == 2
    assert "is not a folder" in capsys.readouterr().err


def test_a_tree_of_another_package(make_tree, tmp_path, made_up, capsys):
    assert export(make_tree(package="other"), tmp_path / "out") == 2
    assert "found 'other' 7.0" in capsys.readouterr().err


def test_a_package_without_a_recipe():
    with pytest.raises(ValueError, match="'numpy' is not known; known are accelerate, transformers"):
        recipe.load("numpy")


def test_libcst_is_missing(make_tree, tmp_path):
    program = (
        "import sys\nsys.modules['libcst'] = None\nfrom transformers_patch.export import cli\nimport argparse\n"
        "p = argparse.ArgumentParser()\ncli.add_arguments(p)\nsys.exit(cli.run(p.parse_args(sys.argv[1:])))"
    )
    words = ["--package", "transformers", "--source", str(make_tree()), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words, "--author", AUTHOR], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert 'libcst, which is not installed: pip install "accelerate[export]"' in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_line_needs_no_libcst():
    program = "import sys; import transformers_patch.export.cli; sys.exit('libcst' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
