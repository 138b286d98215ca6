"""An interview: questions of the option table, their answers, and these as the content of a configuration file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.commands.config import words
from accelerate.commands.config.ask import Asker
from accelerate.config.options import BY_NAME, Option
from accelerate.launch.hardware import Hardware

Values = dict[str, Any]
TRUE_OR_FALSE = ("true", "false")
# Raises ValueError with the reason if a value cannot be used beside the answers so far.
Check = Callable[[Any, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Step:
    """A question about one option.

    Attributes:
        name: the option.
        default: offered where neither an earlier file nor the table has one.
        when: tells from the answers so far whether the question is asked.
        check: refuses a value.
        optional: an empty line leaves the option out.
        choices: the words offered, instead of those of the option.
    """

    name: str
    default: Any = None
    when: Callable[[Mapping[str, Any]], bool] | None = None
    check: Check | None = None
    optional: bool = False
    choices: tuple[str, ...] | None = None


@dataclass
class Interview:
    """The answers of one person so far.

    Attributes:
        asker: asks.
        machine: the devices of this machine.
        previous: option name to value, of the file that is replaced: the defaults.
        values: option name to answer.
    """

    asker: Asker
    machine: Hardware = Hardware("cpu", 0)
    previous: Mapping[str, Any] = field(default_factory=dict)
    values: Values = field(default_factory=dict)

    def yes(self, question: str, default: bool = False, *, was: str | None = None) -> bool:
        """Ask whether a group of questions matters.

        Args:
            question: the question.
            default: the answer to an empty line.
            was: an option; if the earlier file sets it, the default is yes.
        """
        return self.asker.yes(question, default or (was is not None and bool(self.previous.get(was))))

    def all(self, steps: Sequence[Step]) -> None:
        """Ask several questions, each if it matters."""
        for step in steps:
            if step.when is None or step.when(self.values):
                self.ask(step)

    def ask(self, step: Step | str) -> Any:
        """Ask about one option and keep the answer.

        Args:
            step: the question; a name stands for a plain one.

        Returns:
            The answer, None if the option is left out.
        """
        step = Step(step) if isinstance(step, str) else step
        option = BY_NAME[step.name]
        own = option.default if step.default is None else step.default
        default = next((value for value in (self.previous.get(step.name), own) if self._fits(step, value)), None)
        value = self._answer(step, option, default)
        if value is not None:
            self.values[step.name] = value
        return value

    def _answer(self, step: Step, option: Option, default: Any) -> Any:
        question = option.question or option.help
        if words.is_truth(step.name) or step.choices == TRUE_OR_FALSE:
            truth = str(default).lower() == "true"
            return option.parse(self.asker.yes(question, truth, explanation=option.help))
        choices = step.choices or words.accepted(step.name)
        if choices:
            lowered = [word.lower() for word in choices]
            at = lowered.index(str(default).lower()) if str(default).lower() in lowered else 0
            return option.parse(choices[self.asker.choose(question, choices, at, explanation=option.help)])
        if option.type == "strs":
            return self._several(question, option, default)

        def parse(text: str) -> Any:
            value = option.parse(text, "The answer")
            if step.check is not None:
                step.check(value, self.values)
            return value

        return self.asker.text(question, parse, default, explanation=option.help, optional=step.optional)

    def _fits(self, step: Step, default: Any) -> bool:
        """Say whether a default can be offered: what was right in an earlier file need not fit today's answers."""
        if default is None:
            return False
        try:
            if step.check is not None:
                step.check(default, self.values)
        except (ValueError, TypeError):
            return False
        return True

    def _several(self, question: str, option: Option, default: Sequence[str] | None) -> list[str] | None:
        kept = [item for item in default or () if item]
        found: list[str] = []
        if kept and self.asker.yes(f"Keep {', '.join(kept)} for {option.file_key}?", True):
            return kept
        while True:
            answer = self.asker.text(question, str, explanation=option.help, optional=True)
            if answer is None:
                return found or None
            found.append(answer)
            question = "And another one?"


def content(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return answers as the content of a configuration file, under the keys and sections of the option table.

    Args:
        values: option name to value.

    Example:
        >>> content({"num_processes": 2, "dynamo_backend": "inductor"})
        {'num_processes': 2, 'dynamo_config': {'dynamo_backend': 'INDUCTOR'}}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        option = BY_NAME[name]
        if value is None or option.file_key is None:
            continue
        place = found.setdefault(option.section, {}) if option.section else found
        place[option.file_key] = _as_written(name, value)
    return found


def _as_written(name: str, value: Any) -> Any:
    """Return a value as other readers of such files expect it."""
    if value in TRUE_OR_FALSE:
        return value == "true"
    if name == "fsdp_version":
        return int(value)
    if name in ("dynamo_backend", "fp8_backend"):
        return value.upper()
    return list(value) if isinstance(value, tuple) else value


def at_least(least: int) -> Check:
    """Return a check that refuses numbers below `least`."""

    def check(value: Any, values: Mapping[str, Any]) -> None:
        if value < least:
            raise ValueError(f"The answer is {value}; it must be at least {least}.")

    return check


def positive(value: Any, values: Mapping[str, Any]) -> None:
    """Refuse numbers that are not above zero."""
    if not value > 0:
        raise ValueError(f"The answer is {value}; it must be above 0.")


def fraction(value: Any, values: Mapping[str, Any]) -> None:
    """Refuse what is no part of one."""
    if not 0 <= value < 1:
        raise ValueError(f"The answer is {value}; it must be between 0 and 1.")


def whole(value: Any, values: Mapping[str, Any]) -> None:
    """Refuse a text that is no number of at least 1."""
    if not (value.isascii() and value.isdecimal() and int(value)):
        raise ValueError(f"The answer is {value!r}; it must be a whole number of at least 1.")
