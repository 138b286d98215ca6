import enum

import pytest

from accelerate.config.options.schema import to_bool, to_enum, to_int, to_names


class Colour(enum.Enum):
    RED = 1
    BLUE = "azure"


@pytest.mark.parametrize("word", [True, "true", "YES", "1", 1, "on", "T"])
def test_words_for_true(word):
    assert to_bool(word, "flag") is True


@pytest.mark.parametrize("word", [False, "False", "no", "0", 0, "off"])
def test_words_for_false(word):
    assert to_bool(word, "flag") is False


def test_other_words_are_refused_by_name():
    with pytest.raises(ValueError, match="flag is 'maybe'"):
        to_bool("maybe", "flag")


@pytest.mark.parametrize(("value", "number"), [("3", 3), (3, 3), (2.0, 2)])
def test_whole_numbers(value, number):
    assert to_int(value, "size") == number


@pytest.mark.parametrize("value", ["x", 2.5, None, "1.5"])
def test_no_whole_number(value):
    with pytest.raises(ValueError, match="size is"):
        to_int(value, "size")


@pytest.mark.parametrize("value", [Colour.RED, "red", "RED", 1, "1", "crimson"])
def test_members_by_member_name_value_and_alias(value):
    assert to_enum(Colour, value, "colour", {"CRIMSON": Colour.RED}) is Colour.RED


def test_unknown_member_lists_the_known():
    with pytest.raises(ValueError, match="colour is 'green'; choose one of BLUE, RED"):
        to_enum(Colour, "green", "colour")


@pytest.mark.parametrize("value", ["A, B", ["A", "B"], ("A", "B"), "A,B,"])
def test_names(value):
    assert to_names(value) == ["A", "B"]
