"""One more field for dataclasses that exist already."""

import dataclasses
import inspect
from contextlib import ExitStack
from typing import get_type_hints

import pytest

from transformers_patch import fields


@dataclasses.dataclass
class Loud:
    loud: bool = dataclasses.field(default=True, kw_only=True, metadata={"help": "how"})


LOUD = dataclasses.fields(Loud)[0]


def family():
    @dataclasses.dataclass
    class Base:
        rate: float = 0.1

        def __post_init__(self):
            self.seen = getattr(self, "loud", "absent")

    @dataclasses.dataclass
    class Child(Base):
        size: int = 1

    class Open(Child):
        def __init__(self, **options):
            super().__init__(**options)

    class Closed(Child):
        def __init__(self, rate):
            super().__init__(rate=rate, size=7)

    return Base, Child, Open, Closed


def test_every_kind_of_subclass_takes_the_keyword_before_post_init_runs():
    classes = family()
    with ExitStack() as undo:
        fields.add(classes[0], LOUD, undo)
        for cls in classes:
            assert cls(rate=0.2, loud=False).seen is False and cls(rate=0.2).seen is True, cls
            with pytest.raises(TypeError, match="quiet"):
                cls(rate=0.2, quiet=True)
        assert classes[1](0.3, 4).size == 4
        assert classes[3](0.5).size == 7


def test_the_field_is_one_of_dataclasses():
    base, child, *_ = family()
    with ExitStack() as undo:
        fields.add(base, LOUD, undo)
        for cls in (base, child):
            assert [f.name for f in dataclasses.fields(cls)][-1] == "loud"
            assert dataclasses.asdict(cls(loud=False))["loud"] is False
            assert dataclasses.replace(cls(), loud=False).loud is False
            assert get_type_hints(cls)["loud"] is bool
            assert inspect.signature(cls).parameters["loud"].kind is inspect.Parameter.KEYWORD_ONLY


def test_a_class_made_afterwards_collects_it_and_outlives_the_undo():
    base, *_ = family()
    with ExitStack() as undo:
        fields.add(base, LOUD, undo)

        @dataclasses.dataclass
        class Late(base):
            extra: int = 2

        assert Late(0.3, 5, loud=False) == Late(0.3, 5, loud=False) and Late(0.3, 5).extra == 5
    assert Late(loud=False).loud is False and Late().loud is True
