"""A choice among a few lines: with the arrow keys in a terminal, else by number."""

import shutil
import sys
from collections.abc import Sequence

from accelerate.commands.config import keys

_HIDE, _SHOW, _CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"
HINT = "(arrow keys or a number, then Enter)"


class Menu:
    """The lines of a choice and the one that is marked.

    Args:
        choices: the lines.
        at: the index of the line that is marked first.
    """

    def __init__(self, choices: Sequence[str], at: int = 0) -> None:
        self.choices = list(choices)
        self.at = at
        self._typed = ""

    def press(self, key: str) -> bool:
        """Take one key, as `keys.reading` names it.

        Digits go to the line of that number; a second digit makes the number longer where there are so many lines.

        Returns:
            True if the choice is made.
        """
        last = len(self.choices) - 1
        typed, self._typed = self._typed, ""
        if key == keys.ENTER:
            return True
        if key == keys.UP:
            self.at = last if self.at == 0 else self.at - 1
        elif key == keys.DOWN:
            self.at = 0 if self.at == last else self.at + 1
        elif key == keys.FIRST:
            self.at = 0
        elif key == keys.LAST:
            self.at = last
        elif key.isdecimal() and key.isascii():
            for number in (typed + key, key):
                if 1 <= int(number) <= last + 1:
                    self.at, self._typed = int(number) - 1, number
                    break
        return False

    def draw(self, columns: int, rows: int) -> list[str]:
        """Return the lines to show in a window of this size: each fits, and the marked one is among them.

        Args:
            columns: the width; 0 is taken for unknown.
            rows: the height.
        """
        columns = columns if columns > 0 else 80
        shown = max(1, min(len(self.choices), rows - 2 if rows > 0 else len(self.choices)))
        first = max(0, min(self.at - shown // 2, len(self.choices) - shown))
        width = len(str(len(self.choices)))
        lines = []
        for index in range(first, first + shown):
            mark = ">" if index == self.at else " "
            lines.append(cut(f"{mark} {index + 1:>{width}}. {self.choices[index]}", columns - 1))
        return lines


def cut(line: str, width: int) -> str:
    """Return a line that is no longer than `width`, with dots where something is missing."""
    if len(line) <= width:
        return line
    return f"{line[: width - 3]}..." if width > 6 else line[: max(width, 0)]


def run(title: str, choices: Sequence[str], default: int = 0) -> int:
    """Ask for one of the choices in the terminal; `keys.capable` must have said that it can.

    Args:
        title: the question.
        choices: the lines.
        default: the index of the line that is marked first.

    Returns:
        The index of the chosen line.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
        EOFError: the terminal was closed, or Ctrl-D was pressed.
    """
    menu = Menu(choices, default)
    out = sys.stdout
    drawn: list[str] = []
    try:
        with keys.reading() as read:
            out.write(f"{title} {HINT}\n{_HIDE}")
            while True:
                drawn = _redraw(menu, drawn)
                if menu.press(read()):
                    break
    finally:
        out.write(f"{_up(drawn)}{_CLEAR_BELOW}{_SHOW}")
        out.flush()
    out.write(f"  {menu.choices[menu.at]}\n")
    out.flush()
    return menu.at


def _redraw(menu: Menu, drawn: list[str]) -> list[str]:
    size = shutil.get_terminal_size()
    lines = menu.draw(size.columns, size.lines)
    sys.stdout.write(f"{_up(drawn)}{_CLEAR_BELOW}" + "".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return lines


def _up(drawn: Sequence[str]) -> str:
    # A window that was made narrower has wrapped the lines that stand there.
    columns = max(1, shutil.get_terminal_size().columns)
    rows = sum(max(1, -(-len(line) // columns)) for line in drawn)
    return f"\r\x1b[{rows}A" if rows else ""
