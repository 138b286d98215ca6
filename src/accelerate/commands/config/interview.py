"""The interview: questions of the option table, their answers, and these as the content of a configuration file."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from accelerate.commands.config.rules import contradictions
from accelerate.config.options import OPTIONS, Option
from accelerate.config.options.schema import TRUE_OR_FALSE, Chapter, agree, to_bool
from accelerate.launch.hardware import Hardware

T = TypeVar("T")


class Asker:
    """Asks one question until the answer can be used: with `questionary` in a terminal that has it, else line by line.

    An answer is checked at once; one that cannot be used is answered with the reason and asked for again. Enter alone takes the
    default, which is shown.

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
        optional: bool = False,
        shown: str | None = None,
    ) -> T | None:
        """Ask for a line of text.

        Args:
            question: ends with a question mark or a colon.
            parse: turns the text into the answer; raises `ValueError` with the reason if it cannot.
            default: the answer to an empty line.
            optional: an empty line without a default is an answer, None.
            shown: how the default is shown.
        """
        shown = shown or (as_text(default) if default is not None else "none" if optional else "")
        while True:
            answer = self._line(f"{question} [{shown}] " if shown else f"{question} ").strip()
            if answer:
                try:
                    return parse(answer)
                except ValueError as error:
                    self.say(f"  {error}")
            elif default is not None or optional:
                return default
            else:
                self.say("  There is no default; please type an answer.")

    def yes(self, question: str, default: bool = False, **rest: Any) -> bool:
        """Ask a question that is answered with yes or no.

        Args:
            question: the question.
            default: the answer to an empty line.
            rest: as in `text`.
        """

        def parse(answer: str) -> bool:
            try:
                return to_bool(answer, question)
            except ValueError:
                raise ValueError(f"{answer[:80]!r} is neither yes nor no.") from None

        return self.text(question, parse, default, shown="YES/no" if default else "yes/NO", **rest)

    def choose(self, question: str, choices: Sequence[str], default: int = 0, **rest: Any) -> int:
        """Ask for one of several lines.

        Args:
            question: the question.
            choices: the lines.
            default: the index of the line that Enter takes.
            rest: as in `text`, where one answers by number.

        Returns:
            The index of the chosen line.
        """
        questionary = _questionary()
        if questionary is not None:
            lines = [questionary.Choice(choice, value=at) for at, choice in enumerate(choices)]
            return questionary.select(question, lines, default=lines[default], use_shortcuts=True).unsafe_ask()
        self.say(question)
        for number, choice in enumerate(choices, 1):
            self.say(f"  {number}. {choice}")

        answers = {str(at + 1): at for at in range(len(choices))}
        answers |= {choice.lower(): at for at, choice in enumerate(choices)}

        def parse(answer: str) -> int:
            if answer.lower() not in answers:
                raise ValueError(f"{answer[:80]!r} is none of them; type a number from 1 to {len(choices)}.")
            return answers[answer.lower()]

        return self.text("Number:", parse, default, shown=str(default + 1), **rest)

    def _line(self, prompt: str) -> str:
        if _questionary() is not None:
            # What is typed ahead of a menu is with its library, which `input` does not ask.
            from prompt_toolkit import prompt as ask

            return ask(prompt)
        print(prompt, end="", flush=True)
        return input()


def _questionary() -> Any:
    """Return the library for menus; None without a terminal whose cursor moves, or if it is not installed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    if os.name != "nt" and os.environ.get("TERM", "") in ("", "dumb"):
        return None
    try:
        import questionary
    except ImportError:
        return None
    return questionary


def as_text(value: Any) -> str:
    """Return a value as a person would type it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Interview:
    """The answers of one person so far.

    Attributes:
        asker: asks.
        machine: the devices of this machine.
        previous: option name to value, of the file that is replaced: the defaults.
        options: the rows whose questions are asked.
        values: option name to answer; an option that is in here already is not asked about.
        facts: what else the conditions of questions may ask for, such as the answers about whole chapters.
    """

    asker: Asker
    machine: Hardware = Hardware("cpu", 0)
    previous: Mapping[str, Any] = field(default_factory=dict)
    options: Sequence[Option] = OPTIONS
    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def hold(self, chapter: Chapter) -> None:
        """Ask the questions of a chapter, each if it matters."""
        if not agree(self._answers, chapter.when):
            return
        if chapter.question is not None:
            default = self.previous.get(chapter.was or "") not in (None, False, "", "no")
            self.facts[chapter.name] = self.asker.yes(chapter.question, default)
            if not self.facts[chapter.name]:
                return
        asked = [option for option in self.options if option.chapter == chapter.name and option.file_key]
        for option in asked:
            matters = option.name not in self.values and agree(self._answers, option.when)
            if matters and len(option.offered(self._answers)) != 1:  # a single word leaves no choice
                self.ask(option.name)

    def ask(self, name: str, offer: Any = None) -> Any:
        """Ask about one option and keep the answer.

        Args:
            name: the option.
            offer: the default where the earlier file has none, instead of the table's.

        Returns:
            The answer, None if the option is left out.
        """
        option = next(option for option in self.options if option.name == name)
        offers = (self.previous.get(name), offer, option.offer, option.default)
        default = next((value for value in offers if value is not None and not self._fault(option, value)), None)
        value = self._answer(option, default)
        if value is not None:
            self.values[name] = value
        return value

    def content(self) -> dict[str, Any]:
        """Return the answers as the content of a configuration file, under the keys and sections of the table."""
        found: dict[str, Any] = {}
        for option in self.options:
            value = self.values.get(option.name)
            if value is None or option.file_key is None:
                continue
            place = found.setdefault(option.section, {}) if option.section else found
            place[option.file_key] = _as_written(option.name, value)
        return found

    @property
    def _answers(self) -> dict[str, Any]:
        return {**self.facts, **self.values}

    def _answer(self, option: Option, default: Any) -> Any:
        words = option.offered(self._answers)
        if option.is_truth:
            return option.parse(self.asker.yes(option.help, str(default).lower() == "true"))
        if words:
            lowered = [word.lower() for word in words]
            at = lowered.index(str(default).lower()) if str(default).lower() in lowered else 0
            return option.parse(words[self.asker.choose(option.help, words, at)])
        if option.type == "strs":
            return self._several(option, default)

        def parse(text: str) -> Any:
            value = option.parse(text, "The answer")
            if fault := self._fault(option, value):
                raise ValueError(fault)
            return value

        return self.asker.text(option.help, parse, default, optional=option.optional)

    def _fault(self, option: Option, value: Any) -> str | None:
        """Say why a value cannot be used beside the answers so far; None if it can."""
        try:
            if option.check is not None and (fault := option.check(value)):
                return f"The answer is {repr(value)[:80]}; {fault}."
            ruled_out = dict(contradictions({**self.values, option.name: value}))
            return ruled_out.get(option.name)
        except TypeError as error:  # an earlier file may hold anything
            return str(error)

    def _several(self, option: Option, default: Sequence[str] | None) -> list[str] | None:
        if default and self.asker.yes(f"Keep {', '.join(default)} for {option.file_key}?", True):
            return list(default)
        found: list[str] = []
        while answer := self.asker.text("And another one?" if found else option.help, str, optional=True):
            found.append(answer)
        return found or None


def _as_written(name: str, value: Any) -> Any:
    """Return a value as other readers of such files expect it."""
    if value in TRUE_OR_FALSE:
        return value == "true"
    if name == "fsdp_version":
        return int(value)
    if name in ("dynamo_backend", "fp8_backend"):
        return value.upper()
    return list(value) if isinstance(value, tuple) else value
