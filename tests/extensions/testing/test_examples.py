"""Comparison of example scripts."""

import pytest

from accelerate.extensions.testing.examples import clean_lines, compare_against_test, get_function_contents_by_name

BASE = "import x\n\ndef training_function(\n    a,\n):\n    # why\n    one()\n\n    two()\n\ndef main():\n    parse()\n\nmain()\n"


def test_function_contents():
    lines = BASE.splitlines(keepends=True)
    body = clean_lines(get_function_contents_by_name(lines, "training_function"))
    assert body == ["def training_function(\n", "    a,\n", "):\n", "    one()\n", "    two()\n"]
    assert clean_lines(get_function_contents_by_name(lines, "main")) == ["def main():\n", "    parse()\n"]
    assert get_function_contents_by_name([], "main") == []
    with pytest.raises(ValueError, match="name is 'other'; choose one of main, training_function"):
        get_function_contents_by_name(lines, "other")


def test_compare(tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "feature.py").write_text(BASE.replace("    two()", "    extra()\n    two()"))
    paths = [str(tmp_path / name) for name in ("base.py", "feature.py")]
    assert compare_against_test(*paths, parser_only=False) == ["extra()"]
    assert compare_against_test(*paths, parser_only=True) == []
    (tmp_path / "complete.py").write_text(BASE.replace("    one()", "    one()\n    extra()"))
    assert compare_against_test(*paths, False, str(tmp_path / "complete.py")) == []
    assert compare_against_test(*paths, False, str(tmp_path / "base.py")) == ["extra()"]
