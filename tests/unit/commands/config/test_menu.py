"""The menu, without a terminal."""

import pytest

from accelerate.commands.config import keys
from accelerate.commands.config.ask import Asker
from accelerate.commands.config.menu import Menu, cut


def press(menu, *pressed):
    return [menu.press(key) for key in pressed][-1]


@pytest.mark.parametrize(
    ("pressed", "at"),
    [
        ([keys.DOWN], 1),
        ([keys.UP], 11),
        ([keys.DOWN] * 12, 0),
        ([keys.LAST, keys.UP], 10),
        ([keys.LAST, keys.FIRST], 0),
        (["3"], 2),
        (["1", "2"], 11),
        (["1", "3"], 2),
        (["1", keys.DOWN, "2"], 1),
        (["0"], 0),
        (["x", "", "²"], 0),
    ],
)
def test_keys(pressed, at):
    menu = Menu([str(number) for number in range(12)])
    assert press(menu, *pressed) is False
    assert menu.at == at
    assert menu.press(keys.ENTER) is True


def test_lines_fit_any_window():
    menu = Menu(["a" * 100, "b" * 5, "c"], at=1)
    for columns in range(1, 120):
        assert all(len(line) < columns for line in menu.draw(columns, 24) if columns > 1)
    assert menu.draw(20, 24) == ["  1. aaaaaaaaaaa...", "> 2. bbbbb", "  3. c"]
    assert menu.draw(0, 0)[1] == "> 2. bbbbb"


def test_a_low_window_shows_the_part_around_the_mark():
    menu = Menu([f"line {number}" for number in range(1, 12)])
    for at in range(11):
        menu.at = at
        lines = menu.draw(80, 6)
        assert len(lines) == 4
        assert [line for line in lines if line.startswith(">")] == [f"> {at + 1:>2}. line {at + 1}"]
    assert len(menu.draw(80, 1)) == 1


def test_cut():
    assert [cut("abcdefghij", width) for width in (10, 9, 3, 0, -1)] == ["abcdefghij", "abcdef...", "abc", "", ""]


class Typed(Asker):
    def __init__(self, *lines):
        self.lines = list(lines)
        self.said = []

    def say(self, text):
        self.said.append(text)

    def _line(self, prompt):
        self.prompt = prompt
        return self.lines.pop(0)


def test_a_number_without_a_terminal():
    asker = Typed("0", "4", "x", "99999999", "?", "²", "2")
    assert asker.choose("Which?", ["a", "b", "c"], explanation="So.") == 1
    assert asker.said[:4] == ["Which?", "  1. a", "  2. b", "  3. c"]
    assert sum("type a number from 1 to 3" in line for line in asker.said) == 5
    assert "  So." in asker.said
    assert Typed("").choose("Which?", ["a", "b"], 1) == 1
    assert Typed("B").choose("Which?", ["a", "b"]) == 1


def test_text():
    asker = Typed("", "x", "3")
    assert asker.text("How many?", int) == 3
    assert "There is no default" in asker.said[0]
    assert "invalid literal" in asker.said[1]
    assert Typed("").text("How many?", int, 5) == 5
    assert Typed("").text("How many?", int, optional=True) is None
    asker = Typed("")
    asker.text("Which?", str, (True, False))
    assert asker.prompt == "Which? [true,false] "


@pytest.mark.parametrize(("typed", "answer"), [("", True), ("y", True), ("NO", False), ("0", False), ("on", True)])
def test_yes_or_no(typed, answer):
    assert Typed(typed).yes("Really?", True) is answer


def test_a_secret_is_not_echoed(monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("getpass.getpass", lambda prompt: "hidden ")
    assert Typed().secret("Key?") == "hidden"


@pytest.mark.parametrize("broken", [None, object(), "closed"])
def test_no_terminal_is_no_error(monkeypatch, broken):
    if broken == "closed":
        broken = open(0, closefd=False)  # noqa: SIM115
        broken.close()
    monkeypatch.setattr("sys.stdin", broken)
    assert keys.capable() is False
