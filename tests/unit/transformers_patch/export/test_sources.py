import pytest

from transformers_patch.export.sources import SourceTree, UnrecognisedSource


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "src" / "thing"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.dev0"\n', "utf-8")
    return tmp_path


def test_package_and_version_come_from_the_tree(folder):
    tree = SourceTree(folder)
    assert (tree.package, tree.version) == ("thing", "1.2.dev0")


def test_a_folder_without_a_version_beside_the_package_does_not_count(folder):
    (folder / "src" / "helper").mkdir()
    (folder / "src" / "helper" / "__init__.py").write_text("", "utf-8")
    assert SourceTree(folder).package == "thing"


@pytest.mark.parametrize("others, found", [([], "none"), (["one", "two"], "one, two")])
def test_a_tree_of_no_or_of_several_packages_is_refused(tmp_path, others, found):
    for name in others:
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "__init__.py").write_text('__version__ = "1"\n', "utf-8")
    with pytest.raises(UnrecognisedSource, match=f"found {found}"):
        SourceTree(tmp_path).package  # noqa: B018


def test_no_folder(tmp_path):
    with pytest.raises(UnrecognisedSource, match="nowhere.* is not a folder"):
        SourceTree(tmp_path / "nowhere")


def test_read_keeps_every_character(folder):
    text = "one\n\ttwo\f\u2028three é"
    (folder / "file.py").write_bytes(text.encode("utf-8"))
    tree = SourceTree(folder)
    assert tree.exists("file.py") and not tree.exists("other.py")
    assert tree.read("file.py") == text


@pytest.mark.parametrize(
    "content, said",
    [(None, "it is not there"), (b"caf\xe9", "is not UTF-8"), (b"one\r\ntwo\r\n", "carriage returns.*autocrlf")],
)
def test_what_cannot_be_patched_is_refused(folder, content, said):
    if content is not None:
        (folder / "file.py").write_bytes(content)
    with pytest.raises(UnrecognisedSource, match=f"(?s)file.py.*{said}"):
        SourceTree(folder).read("file.py")


def test_the_executable_bit(folder):
    path = folder / "run.py"
    path.write_text("", "utf-8")
    path.chmod(0o755)
    tree = SourceTree(folder)
    assert tree.executable("run.py") and not tree.executable("src/thing/__init__.py") and not tree.executable("none")
