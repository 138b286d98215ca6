"""Asking one question until the answer can be used."""

import getpass
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from accelerate.commands.config import keys, menu

T = TypeVar("T")


class Asker:
    """Asks at the terminal, or through `input` where there is none.

    An answer is checked at once; one that cannot be used is answered with the reason and asked for again. Enter alone takes the
    default, which is shown, and `?` explains the question.

    All methods raise `EOFError` when the input ends, and `KeyboardInterrupt` for Ctrl-C.
    """

    def say(self, text: str) -> None:
        """Print a line between two questions."""
        print(text)

    def text(
        self,
        question: str,
        parse: Callable[[str], T],
        default: T | None = None,
        *,
        explanation: str = "",
        optional: bool = False,
    ) -> T | None:
        """Ask for a line of text.

        Args:
            question: ends with a question mark or a colon.
            parse: turns the text into the answer; raises `ValueError` with the reason if it cannot.
            default: the answer to an empty line.
            explanation: what `?` prints.
            optional: an empty line without a default is an answer, None.
        """
        shown = f" [{_shown(default)}]" if default is not None else " [none]" if optional else ""
        while True:
            answer = self._line(f"{question}{shown} ").strip()
            if answer == "?":
                self.say(f"  {explanation or 'There is no more to say about it.'}")
            elif answer:
                try:
                    return parse(answer)
                except ValueError as error:
                    self.say(f"  {error}")
            elif default is not None or optional:
                return default
            else:
                self.say("  There is no default; please type an answer.")

    def yes(self, question: str, default: bool = False, *, explanation: str = "") -> bool:
        """Ask a question that is answered with yes or no.

        Args:
            question: the question.
            default: the answer to an empty line.
            explanation: what `?` prints.
        """
        hint = "YES/no" if default else "yes/NO"
        while True:
            answer = self._line(f"{question} [{hint}] ").strip().lower()
            if not answer:
                return default
            if answer in ("y", "yes", "true", "t", "1", "on"):
                return True
            if answer in ("n", "no", "false", "f", "0", "off"):
                return False
            if answer == "?":
                self.say(f"  {explanation or 'There is no more to say about it.'}")
            else:
                self.say(f"  {answer[:80]!r} is neither yes nor no.")

    def choose(self, question: str, choices: Sequence[str], default: int = 0, *, explanation: str = "") -> int:
        """Ask for one of several lines.

        Args:
            question: the question.
            choices: the lines.
            default: the index of the line that Enter takes.
            explanation: what `?` prints where one answers by number.

        Returns:
            The index of the chosen line.
        """
        if keys.capable():
            return menu.run(question, choices, default)
        self.say(question)
        for number, choice in enumerate(choices, 1):
            self.say(f"  {number}. {choice}")

        def parse(answer: str) -> int:
            words = [choice.lower() for choice in choices]
            if answer.lower() in words:
                return words.index(answer.lower()) + 1
            if answer.isascii() and answer.isdecimal() and len(answer) < 5 and 1 <= int(answer) <= len(choices):
                return int(answer)
            raise ValueError(f"{answer[:80]!r} is none of them; type a number from 1 to {len(choices)}.")

        number = self.text("Number:", parse, default + 1, explanation=explanation)
        return number - 1

    def secret(self, question: str) -> str:
        """Ask for something that must not be seen; it is not shown while it is typed.

        Args:
            question: the question.
        """
        if sys.stdin is not None and sys.stdin.isatty():
            return getpass.getpass(f"{question} ").strip()
        return self._line(f"{question} ").strip()

    def _line(self, prompt: str) -> str:
        if sys.stdin is None or sys.stdout is None:  # closed before this process began
            raise EOFError
        print(prompt, end="", flush=True)
        keys.wait()
        return input()


def _shown(default: Any) -> str:
    if isinstance(default, (list, tuple)):
        return ",".join(map(_shown, default))
    return str(default).lower() if isinstance(default, bool) else str(default)
