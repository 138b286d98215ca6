"""Maps over nested structures: lists, tuples, named tuples and mappings whose leaves are tensors."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def is_torch_tensor(tensor: Any) -> bool:
    """Say whether the argument is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Say whether the argument looks like an instance of a named tuple: a tuple with field names.

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    fields = getattr(data, "_fields", None)
    return isinstance(data, tuple) and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a sequence of the same type as another one.

    Args:
        obj: a list, tuple or named tuple (or a subclass).
        generator: the new elements.

    Example:
        >>> honor_type((1, 2), (x + 1 for x in [1, 2]))
        (2, 3)
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def like_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Build a mapping of the same type as another one, from new items."""
    if type(data) is dict:
        return items
    try:
        return type(data)(items)
    except TypeError:
        # Such as `defaultdict`, whose constructor takes something else first.
        twin = copy.copy(data)
        twin.update(items)
        return twin


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every leaf of a nested structure that passes a test.

    Args:
        func: called with the leaf, `args` and `kwargs`.
        data: lists, tuples, named tuples and mappings, nested at will. Their types are kept.
        args: passed on to `func`.
        test_type: which leaves to apply `func` to; tensors by default.
        error_on_other_type: refuse other leaves; otherwise they stay as they are.
        kwargs: passed on to `func`.

    Returns:
        A structure of the same form with the results.

    Raises:
        TypeError: a leaf is of another type and `error_on_other_type` is set.

    Example:
        >>> recursively_apply(lambda tensor: tensor + 1, {"a": torch.ones(1), "b": "text"})
        {'a': tensor([2.]), 'b': 'text'}
    """
    if isinstance(data, (tuple, list)):
        return honor_type(
            data,
            (
                recursively_apply(
                    func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
                )
                for item in data
            ),
        )
    if isinstance(data, Mapping):
        return like_mapping(
            data,
            {
                key: recursively_apply(
                    func, item, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
                )
                for key, item in data.items()
            },
        )
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"Unsupported type {type(data)} passed to `{getattr(func, '__name__', func)}`: only tensors, and lists, tuples "
            "and mappings of them, can be used here."
        )
    return data


def leaves(data: Any) -> Iterator[Any]:
    """Yield everything that is not a list, tuple or mapping, from left to right."""
    if isinstance(data, (tuple, list)):
        for item in data:
            yield from leaves(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from leaves(item)
    else:
        yield data


def flatten(data: Any, operation: str) -> tuple[list[torch.Tensor], Any]:
    """Take a nested structure of tensors apart.

    Args:
        data: the structure; every leaf must be a tensor.
        operation: whose argument it is, for the message.

    Returns:
        The tensors from left to right, and a hashable description of the structure (None for a bare tensor).

    Raises:
        TypeError: a leaf is no tensor.
    """
    if isinstance(data, torch.Tensor):
        return [data], None
    tensors: list[torch.Tensor] = []
    return tensors, _take_apart(data, operation, tensors)


def _take_apart(data: Any, operation: str, tensors: list[torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return None
    if isinstance(data, (tuple, list)):
        return ("sequence", *[_take_apart(item, operation, tensors) for item in data])
    if isinstance(data, Mapping):
        return ("mapping", *[(key, _take_apart(item, operation, tensors)) for key, item in data.items()])
    raise TypeError(
        f"Unsupported type {type(data)} passed to `{operation}`: only tensors, and lists, tuples and mappings of them, can be "
        "exchanged. `gather_object` takes anything."
    )


def rebuild(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Put a structure together again, with other tensors in the places of its own.

    Args:
        data: the structure that `flatten` took apart.
        tensors: the new leaves, from left to right.
    """
    supply = iter(tensors)
    return recursively_apply(lambda _: next(supply), data)
