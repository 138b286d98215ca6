"""The interview: the questions of the option table, their answers, and the configuration file that holds the answers.

`check` finds answers that contradict each other; `accelerate config validate` uses it for files.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from accelerate.config.options import NEEDS_DEVICES, OPTIONS, Option
from accelerate.config.options.schema import TRUE_OR_FALSE, Chapter, conditions_met, existing_file, json_file, to_bool
from accelerate.launch.config_file import FileSettings, Problem, nearest
from accelerate.launch.hardware import Hardware

T = TypeVar("T")


class Asker:
    """Asks one question until the answer can be used: with `questionary` in a terminal that has it, else line by line.

    Enter without input takes the default, which is shown. All methods raise EOFError when the input ends.
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
        """Ask for text until `parse` raises no ValueError; an empty line takes the default, None if optional."""
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

    def yes(self, question: str, default: bool = False) -> bool:
        """Ask a question that is answered with yes or no."""

        def parse(answer: str) -> bool:
            try:
                return to_bool(answer, question)
            except ValueError:
                raise ValueError(f"{answer[:80]!r} is neither yes nor no.") from None

        return self.text(question, parse, default, shown="YES/no" if default else "yes/NO")

    def choose(self, question: str, choices: Sequence[str], default: int = 0) -> int:
        """Ask for one of several lines and return its index; `default` is the index that Enter takes."""
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

        return self.text("Number:", parse, default, shown=str(default + 1))

    def _line(self, prompt: str) -> str:
        if _questionary() is not None:
            # Characters typed before the menu are in its library's buffer, which `input` does not read.
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
    """Return a value as a person would type it; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Interview:
    """The answers of one person so far.

    Attributes:
        previous: option name to value, of the file that is replaced; these are the defaults.
        options: the rows whose questions are asked.
        values: option name to answer; options that have a value are not asked about.
        facts: further answers that conditions of questions refer to, such as the answers about full chapters.
    """

    asker: Asker
    machine: Hardware = Hardware("cpu", 0)
    previous: Mapping[str, Any] = field(default_factory=dict)
    options: Sequence[Option] = tuple(OPTIONS)
    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def hold(self, chapter: Chapter) -> None:
        """Ask the questions of a chapter, each if it matters."""
        if not conditions_met(self._answers, chapter.when):
            return
        if chapter.question is not None:
            default = self.previous.get(chapter.was or "") not in (None, False, "", "no")
            self.facts[chapter.name] = self.asker.yes(chapter.question, default)
            if not self.facts[chapter.name]:
                return
        asked = [option for option in self.options if option.chapter == chapter.name and option.file_key]
        for option in asked:
            matters = option.name not in self.values and conditions_met(self._answers, option.when)
            if matters and len(option.offered(self._answers)) != 1:  # a single word leaves no choice
                self.ask(option.name)

    def ask(self, name: str, offer: Any = None) -> Any:
        """Ask about one option and keep the answer; `offer` is the default where the earlier file has none."""
        option = next(option for option in self.options if option.name == name)
        offers = (self.previous.get(name), offer, option.offer, option.default)
        default = next((value for value in offers if value is not None and not self._fault(option, value)), None)
        value = self._answer(option, default)
        if value is not None:
            self.values[name] = value
        return value

    def content(self) -> dict[str, Any]:
        """Return the answers as the content of a configuration file, under the keys and sections of the table."""
        content: dict[str, Any] = {}
        for option in self.options:
            value = self.values.get(option.name)
            if value is None or option.file_key is None:
                continue
            place = content.setdefault(option.section, {}) if option.section else content
            place[option.file_key] = _as_written(option.name, value)
        return content

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
        """Say why a value contradicts the answers so far; None if it does not."""
        try:
            if option.check is not None and (fault := option.check(value)):
                return f"The answer is {repr(value)[:80]}; {fault}."
            return dict(contradictions({**self.values, option.name: value})).get(option.name)
        except TypeError as error:  # an earlier file may hold anything
            return str(error)

    def _several(self, option: Option, default: Sequence[str] | None) -> list[str] | None:
        if default and self.asker.yes(f"Keep {', '.join(default)} for {option.file_key}?", True):
            return list(default)
        answers: list[str] = []
        while answer := self.asker.text("And another one?" if answers else option.help, str, optional=True):
            answers.append(answer)
        return answers or None


def _as_written(name: str, value: Any) -> Any:
    """Return a value as other readers of such files expect it."""
    if value in TRUE_OR_FALSE:
        return value == "true"
    if name == "fsdp_version":
        return int(value)
    if name in ("dynamo_backend", "fp8_backend"):
        return value.upper()
    return list(value) if isinstance(value, tuple) else value


# -- contradictions between values ------------------------------------------------------------------------------------


def check(settings: FileSettings) -> tuple[list[Problem], list[str]]:
    """Return the problems of a configuration file, and notes."""
    values = settings.values
    faults = [*_faults_of_values(values)]
    if settings.elsewhere is None:
        faults += contradictions(values)
        if values.get("num_machines", 1) > 1 and values.get("main_process_ip") is None:
            count = values["num_machines"]
            text = f"num_machines is {count}, and main_process_ip, the address of machine 0, is missing."
            faults.append(("num_machines", text))
    problems = [*settings.problems, *(Problem(text, settings.lines.get(name), fatal=False) for name, text in faults)]
    missing = "distributed_type is missing; NO is taken for it, but other readers of such files insist on it."
    notes = [*settings.notes, *([] if "distributed_type" in settings.content else [missing])]
    return sorted(problems, key=lambda problem: problem.line or 0), notes


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that others rule out, each with the reason; the interview refuses such answers."""
    machines, processes = values.get("num_machines", 1), values.get("num_processes")
    for name, devices in NEEDS_DEVICES.items():
        if values.get(name) and values.get("cpu"):
            yield "cpu", f"use_cpu is true, and distributed_type asks for {devices}; MULTI_CPU is the type for CPUs."
    rank = values.get("machine_rank", 0)
    if machines > 1 and not 0 <= rank < machines:
        yield "machine_rank", f"machine_rank is {rank}, and num_machines is {machines}; ranks start at 0."
    port = values.get("main_process_port")
    if port is not None and not 0 <= port <= 65535:
        yield "main_process_port", f"main_process_port is {port}; ports are numbers from 0 to 65535."
    ids = [part.strip() for part in str(values.get("gpu_ids", "all")).split(",")]
    if ids != ["all"] and len(set(ids)) < len(ids):
        yield "gpu_ids", f"gpu_ids is {values['gpu_ids']!r}; it names a device twice."
    elif ids != ["all"] and processes is not None and not values.get("cpu") and len(ids) * machines < processes:
        yield "gpu_ids", f"gpu_ids names {len(ids)} devices for {processes // machines} processes of a machine."
    if processes is not None and processes % machines:
        yield "num_processes", f"num_processes is {processes}, which {machines} machines cannot share evenly."
    needed = parallel_size(values)
    if processes is not None and processes % needed:
        yield "num_processes", f"num_processes is {processes}, and the sizes in parallelism_config need {needed}."


def parallel_size(values: Mapping[str, Any]) -> int:
    """Return how many processes the sizes of the parallelism need; a run has as many, or a multiple."""
    return math.prod(
        max(value, 1) for name, value in values.items() if re.fullmatch("parallelism_config_.*_size", name)
    )


def _faults_of_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        value = values.get(option.name)
        if value in (None, ""):
            continue
        opens = option.check in (existing_file, json_file)
        fault = option.check(value) if opens else _fault_of_word(option, str(value))
        if fault:
            key = f"{option.section}.{option.file_key}" if option.section else option.file_key
            yield option.name, f"{key} is {str(value)[:80]!r}; {fault}"


def _fault_of_word(option: Option, value: str) -> str | None:
    if not option.words or option.allow_other or option.choices:
        return None
    if option.words == TRUE_OR_FALSE:
        return None if value.lower() in ("true", "false", "1", "0", "yes", "no") else "write true or false."
    if value.upper() in [word.upper() for word in option.words]:
        return None
    if option.feature == "fsdp" and value.isdecimal() and 1 <= int(value) <= len(option.words):
        return None  # older releases wrote the number of the word
    near = nearest(value, option.words)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(option.words)}."
