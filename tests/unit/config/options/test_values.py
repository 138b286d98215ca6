"""Reading what users write: truth values, whole numbers, members, names."""

import enum

import pytest

from accelerate.config.options.schema import to_bool, to_enum, to_int, to_names


class Colour(enum.Enum):
    RED = 1
    BLUE = "azure"


def colour(value, name):
    return to_enum(Colour, value, name, {"CRIMSON": Colour.RED})


@pytest.mark.parametrize(
    ("read", "expected", "values"),
    [
        (to_bool, True, [True, "true", "YES", "1", 1, " on"]),
        (to_bool, False, [False, "False", "no", "0", 0, "off"]),
        (to_int, 3, ["3", 3, 3.0]),
        (colour, Colour.RED, [Colour.RED, "red", "RED", 1, "1", "crimson"]),
        (lambda value, name: to_names(value), ["A", "B"], ["A, B", ["A", "B"], ("A", "B"), "A,B,"]),
    ],
)
def test_spellings(read, expected, values):
    assert [read(value, "name") for value in values] == [expected] * len(values)


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (to_bool, "maybe", "name is 'maybe'; write true or false"),
        *((to_int, value, "name is .*integer") for value in ("x", 2.5, None)),
        (colour, "green", "name is 'green'; choose one of BLUE, CRIMSON, RED"),
    ],
)
def test_refusals_name_the_source(read, value, message):
    with pytest.raises(ValueError, match=message):
        read(value, "name")
