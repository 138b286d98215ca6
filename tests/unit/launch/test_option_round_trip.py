"""The option table in full: every option through every door, one order of precedence, and the same value at the worker."""

import argparse
import itertools
import json
import os

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelerate.commands.launch import launch_command_parser
from accelerate.config.options import BY_NAME, OPTIONS
from accelerate.config.options.schema import ON, ONE
from accelerate.extensions.configure.interview import as_text
from accelerate.launch import plan as launcher
from accelerate.launch.plan import Resolved, Source
from accelerate.launch.resolve import merge

PARSER = launch_command_parser()
DOORS = (Source.COMMAND_LINE, Source.ENVIRONMENT, Source.FILE)
# The file to read is chosen before the layers are merged.
SETTABLE = [option for option in OPTIONS if option.name != "config_file"]
examples = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))

_words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
_texts = _words.filter(lambda text: text.strip())
_kinds = {
    "str": _texts,
    "int": st.integers(1, 10**6),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "strs": st.lists(_texts, min_size=1, max_size=3),
    "bools": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "json": st.dictionaries(_texts, _texts, max_size=2).map(json.dumps),
}


# What only the reader of files knows about a value.
_FILE_CHOICES = {"compute_environment": ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")}


def choices_of(option):
    """The words that an option takes, without those that stand for others; None for any."""
    choices = option.choices or _FILE_CHOICES.get(option.name)
    return choices and [choice for choice in choices if choice not in option.corrections]


def values_of(option):
    """A strategy of the values that an option can have."""
    return st.sampled_from(choices_of(option)) if choices_of(option) else _kinds[option.type]


def doors_of(option, value):
    """The layers that can set an option to a value."""
    doors = []
    if option.spellings and not (option.switch and not value and option.negation is None):
        doors.append(Source.COMMAND_LINE)
    if (option.env or option.env_names) and not (option.style in (ON, ONE) and not value):
        doors.append(Source.ENVIRONMENT)
    if option.file_key:
        doors.append(Source.FILE)
    return doors


def on_command_line(option, value):
    flag = next(flag for flag in option.spellings if flag.startswith("--"))
    if option.switch:
        return [flag if value else option.negation]
    return [f"{flag}={as_text(item)}" for item in (value if isinstance(value, list) else [value])]


def in_file(option, value):
    content = {option.file_key: list(value) if isinstance(value, tuple) else value}
    return {option.section: content} if option.section else content


def in_environment(option, value):
    if option.style in (ON, ONE):
        return {option.env: as_text(value)}
    return option.encode(value)


def merged(place, option, layers):
    """Set an option in some layers, and return what it resolves to next to all others."""
    words, variables = ["train.py"], {}
    if Source.COMMAND_LINE in layers:
        words = [*on_command_line(option, layers[Source.COMMAND_LINE]), *words]
    if Source.ENVIRONMENT in layers:
        variables = in_environment(option, layers[Source.ENVIRONMENT])
    if Source.FILE in layers:
        path = place / "config.yaml"
        path.write_text(yaml.safe_dump(in_file(option, layers[Source.FILE]), allow_unicode=True), encoding="utf-8")
        words = ["--config_file", str(path), *words]
    return merge(PARSER.parse_args(words), {"HF_HOME": str(place), **variables})[0]


@examples
@given(data=st.data())
def test_a_value_comes_through_every_door(place, data):
    for option in SETTABLE:
        value = data.draw(values_of(option), option.name)
        for door in doors_of(option, value):
            resolved = merged(place, option, {door: value})[option.name]
            assert (resolved.value, type(resolved.value)) == (value, type(value)), (option.name, door)
            assert resolved.source is door, option.name


@examples
@given(data=st.data())
def test_the_worker_reads_what_was_resolved(data):
    for option in SETTABLE:
        value = data.draw(values_of(option), option.name)
        resolved = {row.name: Resolved(row.default) for row in OPTIONS} | {option.name: Resolved(value)}
        if option.exported_if_several is not None:
            resolved[option.exported_if_several] = Resolved(2)
        variables = launcher.exports(resolved)
        if option.feature is not None:
            variables |= launcher.exports(resolved, option.feature)
        assert all(isinstance(text, str) and "\0" not in text for text in variables.values()), option.name
        if option.style in (ON, ONE):  # no variable is how a switch says no
            assert bool(option.read(variables)) is value, option.name
        elif option.env or option.env_names:
            assert option.read(variables) == value, option.name
        # And a launch inside the worker starts from the same value.
        if doors_of(option, value).count(Source.ENVIRONMENT):
            again = merge(argparse.Namespace(), {"HF_HOME": os.devnull, **variables})[0][option.name]
            assert (again.value, again.source) == (value, Source.ENVIRONMENT), option.name


def test_a_blank_variable_says_nothing():
    for option in (option for option in SETTABLE if option.env or option.env_names):
        blank = dict.fromkeys((option.env,) if option.env else option.env_names, "")
        assert option.read(blank) is None, option.name
        source = merge(argparse.Namespace(), {"HF_HOME": os.devnull, **blank})[0][option.name].source
        assert source is Source.DEFAULT, option.name


def test_precedence(place):
    option, values = BY_NAME["mixed_precision"], dict(zip(DOORS, ("no", "fp16", "bf16"), strict=True))
    for count in (1, 2, 3):
        for layers in itertools.combinations(DOORS, count):
            resolved = merged(place, option, {door: values[door] for door in layers})[option.name]
            assert (resolved.value, resolved.source) == (values[layers[0]], layers[0]), layers
