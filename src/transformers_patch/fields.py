"""Adds one keyword field to an existing dataclass and all its subclasses, and removes it again.

`dataclasses` writes a separate `__init__` for each class. So a field added to the base reaches neither the constructors nor
`dataclasses.fields` of existing subclasses. Later subclasses collect it like every field.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def add(base: type, field: "dataclasses.Field[Any]", undo: ExitStack) -> None:
    """Give a dataclass and its present subclasses a keyword-only field whose default is a class attribute.

    Args:
        base: the dataclass.
        field: a finished field, taken from another dataclass; it must have a plain default and be keyword-only.
        undo: takes what restores every class exactly.

    Example:
        >>> @dataclasses.dataclass
        ... class Options:
        ...     rate: float = 0.1
        >>> @dataclasses.dataclass
        ... class More:
        ...     loud: bool = dataclasses.field(default=True, kw_only=True)
        >>> with ExitStack() as undo:
        ...     add(Options, dataclasses.fields(More)[0], undo)
        ...     Options(0.2, loud=False).loud, Options().loud
        (False, True)
        >>> hasattr(Options, "loud")
        False
    """
    _set(base, field.name, field.default, undo)
    _put(vars(base).get("__annotations__") or base.__annotations__, field.name, field.type, undo)
    for cls in _tree(base):
        fields = vars(cls).get("__dataclass_fields__")
        if fields is not None and field.name not in fields:
            _put(fields, field.name, field, undo)
        if "__init__" in vars(cls) and not _accepts(cls.__init__, field.name):
            _set(cls, "__init__", _with_keyword(cls.__init__, field), undo)


def _tree(base: type) -> set[type]:
    return {base}.union(*map(_tree, base.__subclasses__()))


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    # One with **options passes unknown ones to its base class, whose constructor is also replaced.
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _with_keyword(original: Callable[..., None], field: "dataclasses.Field[Any]") -> Callable[..., None]:
    signature = inspect.signature(original)
    kind = inspect.Parameter.KEYWORD_ONLY
    keyword = inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # Set before the rest runs, because __post_init__ reads it. If it is omitted, the class attribute holds, or the value that
        # the constructor of a subclass has set before it called this one.
        if field.name in kwargs:
            vars(self)[field.name] = kwargs.pop(field.name)
        original(self, *args, **kwargs)

    __init__.__signature__ = signature.replace(parameters=[*signature.parameters.values(), keyword])  # type: ignore[attr-defined]
    return __init__


def _set(cls: type, name: str, value: Any, undo: ExitStack) -> None:
    back = (setattr, cls, name, vars(cls)[name]) if name in vars(cls) else (delattr, cls, name)
    undo.callback(*back)
    setattr(cls, name, value)


def _put(mapping: dict[str, Any], key: str, value: Any, undo: ExitStack) -> None:
    # A class made in between may have copied the field; only the attributes set here are removed.
    back = (mapping.__setitem__, key, mapping[key]) if key in mapping else (mapping.pop, key, None)
    undo.callback(*back)
    mapping[key] = value
