"""Answers for an interview: from a list, or at random."""

import random

import pytest

from accelerate.extensions.configure.interview import Asker
from accelerate.launch import hardware
from accelerate.launch.hardware import Hardware
from unit.commands.conftest import clean

__all__ = ["clean"]


class Silent(Asker):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


class Scripted(Silent):
    """Types the given lines; menus are answered by number, as without a terminal."""

    def __init__(self, *lines):
        super().__init__()
        self.lines, self.asked = list(lines), []

    def _line(self, prompt):
        self.asked.append(prompt.strip())
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


class AtRandom(Silent):
    """Answers everything somehow; what is refused is tried again."""

    def __init__(self, seed, path):
        super().__init__()
        self.random, self.path = random.Random(seed), str(path)

    def text(self, question, parse, default=None, *, optional=False):
        words = "1 2 4 8 16 0.5 29500 10.0.0.7 main all 0,1 true,false,true ml.p3.2xlarge eu-west-1 word"
        guesses = [*words.split(), self.path]
        for _ in range(500):
            if self.random.random() < 0.3 and (default is not None or optional):
                return default
            try:
                return parse(self.random.choice(guesses))
            except ValueError as error:
                assert "\n" not in str(error)
        if default is not None:
            return default
        raise AssertionError(f"nothing is accepted for {question}")

    def yes(self, question, default=False):
        return self.random.random() < 0.5

    def choose(self, question, choices, default=0):
        assert 0 <= default < len(choices)
        return self.random.randrange(len(choices))


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def at_random(place):
    (place / "a.json").write_text("{}")
    return lambda seed: AtRandom(seed, place / "a.json")


@pytest.fixture
def machine(monkeypatch):
    def have(device="cpu", count=0, **rest):
        monkeypatch.setattr(hardware, "detect", lambda environ: Hardware(device, count, **rest))

    return have
