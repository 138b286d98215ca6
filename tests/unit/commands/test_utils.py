"""What the commands share."""

import pytest

from accelerate.commands.utils import CustomArgumentGroup, CustomArgumentParser, make_parser, or_exit
from accelerate.launch.errors import LaunchError


def test_parser_and_group_take_both_spellings():
    parser = CustomArgumentParser()
    CustomArgumentGroup(parser, "heading").add_argument("--some_name")
    parser.add_argument("--other_name")
    assert parser.parse_args(["--some-name", "1", "--other-name", "2"]).other_name == "2"


def test_make_parser():
    parser = make_parser("name", "What it does.", func=print)
    assert parser.prog == "accelerate name"
    assert parser.parse_args([]).func is print


@pytest.mark.parametrize(
    "error", [LaunchError("no"), FileNotFoundError("no"), NotImplementedError("no"), ValueError("no")]
)
def test_user_errors_become_one_line(capsys, error):
    def fail():
        raise error

    with pytest.raises(SystemExit, match="2"):
        or_exit("accelerate x", fail)
    assert capsys.readouterr().err == "accelerate x: error: no\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        or_exit("accelerate x", lambda: 1 / 0)
    assert or_exit("accelerate x", max, 1, 2) == 2
