"""Parsing and encoding of single values."""

import pytest

from accelerate.config.options import BY_NAME
from accelerate.config.options.schema import BIT, LOWER, ON, ONE, UPPER, Option, both_spellings


def option(**rest):
    return Option(name="some_name", group="g", help="Help.", **rest)


def test_spellings_and_file_key():
    assert option().spellings == ("--some_name", "--some-name")
    assert option(flags=("-t", "--tee")).spellings == ("-t", "--tee")
    assert option(flags=()).spellings == ()
    assert both_spellings(["-a_b", "--c_d", "--e"]) == ("-a_b", "--c_d", "--c-d", "--e")
    assert (option().file_key, option(key="other").file_key, option(key="").file_key) == ("some_name", "other", None)


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        *[("str", True, "true"), ("str", 5, "5"), ("int", "5", 5), ("float", "0.5", 0.5)],
        *[("bool", "no", False), ("bool", "1", True), ("str", None, None)],
        *[("strs", "a", ["a"]), ("strs", ("a", 1), ["a", "1"])],
        ("bools", "true,false,TRUE", (True, False, True)),
        ("bools", "(false, false, true)", (False, False, True)),
        ("bools", [True, False, False], (True, False, False)),
    ],
)
def test_parse(kind, raw, value):
    assert option(type=kind).parse(raw) == value


@pytest.mark.parametrize(("kind", "raw"), [("int", "x"), ("float", "x"), ("bool", "maybe"), ("bools", "true,false")])
def test_parse_names_the_source_and_the_value(kind, raw):
    with pytest.raises(ValueError, match=f"VARIABLE is '{raw}'"):
        option(type=kind).parse(raw, "VARIABLE")


def test_choices():
    row = option(choices=("no", "fp16"))
    assert row.parse("FP16") == "fp16"
    assert row.parse(False) == "no"  # an unquoted `no` in YAML
    with pytest.raises(ValueError, match="some_name is 'x'; choose one of no, fp16"):
        row.parse("x")
    assert option(choices=("teh", "the"), corrections={"teh": "the"}).parse("TEH") == "the"


@pytest.mark.parametrize(
    ("style", "value", "text"),
    [
        *[("plain", True, "True"), (LOWER, True, "true"), (UPPER, "eager", "EAGER")],
        *[(BIT, False, "0"), (ON, True, "true"), (ONE, True, "1")],
    ],
)
def test_encode(style, value, text):
    assert option(env="NAME", style=style).encode(value) == {"NAME": text}


def test_encode_says_nothing_and_several_variables():
    for style, value in ((ON, False), (ONE, False), (ON, None), ("plain", None)):
        assert option(env="NAME", style=style).encode(value) == option().encode(value) == {}
    row = option(type="bools", env_names=("A", "B", "C"))
    assert row.encode((True, False, True)) == {"A": "1", "B": "0", "C": "1"}


def test_a_wrong_variable_is_named():
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION is 'fp17'; choose one of no, fp16, bf16, fp8"):
        BY_NAME["mixed_precision"].read({"ACCELERATE_MIXED_PRECISION": "fp17"})
