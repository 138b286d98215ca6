"""Nested tensors: lists, tuples, named tuples and mappings are mapped over, measured, cut and filled up, without communication."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether the argument is a tensor.

    Example:
        >>> from accelerate.utils import is_torch_tensor
        >>> is_torch_tensor(torch.ones(1)), is_torch_tensor([1.0])
        (True, False)
    """
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether the argument looks like an instance of a named tuple: a tuple with field names.

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

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"Unsupported type {type(leaf)} passed to `{getattr(func, '__name__', func)}`: only tensors, and lists, tuples "
                "and mappings of them, can be used here."
            )
        return leaf

    return over_leaves(applied, data)


def over_leaves(
    function: Callable[..., Any], data: Any, *others: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply a function to the corresponding leaves of equal structures, and build the containers again; else ValueError.

    A leaf is anything except a list, tuple or mapping, or a list or tuple that `is_leaf` accepts.
    """
    if isinstance(data, torch.Tensor):  # the usual leaf, spared the questions below
        return function(data, *others)
    if isinstance(data, (tuple, list)) and not (is_leaf and is_leaf(data)):
        rows = zip(data, *others, strict=True)
        return honor_type(data, [over_leaves(function, *row, is_leaf=is_leaf) for row in rows])
    if isinstance(data, Mapping):
        if any(other.keys() != data.keys() for other in others):
            raise ValueError(f"the keys of the first are {list(data)}")
        rows = {key: (value, *(other[key] for other in others)) for key, value in data.items()}
        return like_mapping(data, {key: over_leaves(function, *row, is_leaf=is_leaf) for key, row in rows.items()})
    return function(data, *others)


def leaves(data: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield the leaves of a structure, from left to right; `is_leaf` works as in `over_leaves`."""
    if isinstance(data, (tuple, list)) and not (is_leaf and is_leaf(data)):
        for item in data:
            yield from leaves(item, is_leaf)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from leaves(item, is_leaf)
    else:
        yield data


TENSOR = "\0"  # stands for a tensor in an outline


def outline(data: Any, tensors: list[torch.Tensor], operation: str | None = None) -> str:
    """Return a structure in words, and append its tensors to a list; TypeError for other leaves where an operation exchanges it."""
    if isinstance(data, torch.Tensor):
        tensors.append(data)
        return TENSOR
    if isinstance(data, (tuple, list)):
        return f"[{', '.join([outline(item, tensors, operation) for item in data])}]"
    if isinstance(data, Mapping):
        return f"{{{', '.join([f'{key!r}: {outline(item, tensors, operation)}' for key, item in data.items()])}}}"
    if operation is None:
        return type(data).__name__
    raise TypeError(
        f"Unsupported type {type(data)} passed to `{operation}`: only tensors, and lists, tuples and mappings of them, can be "
        "exchanged. `gather_object` takes anything."
    )


def filled(outline: str, words: Iterable[str]) -> str:
    """Put words for the tensors into an outline."""
    for word in words:
        outline = outline.replace(TENSOR, word, 1)
    return outline


def rebuild(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Put other tensors into a structure, from left to right."""
    supply = iter(tensors)
    return recursively_apply(lambda _: next(supply), data)


def send_to_device(
    tensor: Any,
    device: int | str | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move everything in a nested structure that has a `to` method to a device.

    Not a collective.

    Args:
        tensor: nested tensors, or other objects with a method `to(device)`. Other objects stay as they are.
        device: the target.
        non_blocking: return before copies from pinned memory have finished.
        skip_keys: keys of mappings, at any depth, whose values stay where they are.

    Returns:
        The structure with its types kept. Tensors that are on the device already are not copied.

    Example:
        >>> send_to_device({"x": torch.ones(2), "text": "kept"}, "cpu")
        {'x': tensor([1., 1.]), 'text': 'kept'}
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def sent(item: Any) -> Any:
        # Before the containers: a batch class may know best how to move itself.
        if hasattr(item, "to"):
            try:
                return item.to(device, non_blocking=non_blocking)
            except TypeError:  # a class whose `to` knows no such argument
                return item.to(device)
        if isinstance(item, (tuple, list)):
            return honor_type(item, map(sent, item))
        if isinstance(item, Mapping):
            items = {key: value if key in skipped else sent(value) for key, value in item.items()}
            return like_mapping(item, items)
        return item

    return sent(tensor)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a tensor; TypeError for a strided `torch.nested` one, which has none."""
    if tensor.is_nested and tensor.layout == torch.strided:  # torch raises an internal error
        raise TypeError(
            "A nested tensor has rows of different sizes and no shape; convert it with `to_padded_tensor(0.0)`."
        )
    return tensor.shape


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first tensor in a nested structure.

    Not a collective.

    Raises:
        IndexError: the tensor is a scalar.
        TypeError: the first leaf is no tensor.
        ValueError: there are no leaves.

    Example:
        >>> find_batch_size({"x": torch.ones(4, 2)})
        4
    """
    if isinstance(data, (tuple, list, Mapping)):
        if len(data) == 0:
            raise ValueError(f"Cannot find the batch size of an empty {type(data).__name__}.")
        return find_batch_size(next(iter(data.values() if isinstance(data, Mapping) else data)))
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors, not of {type(data)}.")
    if data.ndim == 0:
        raise IndexError("Cannot find the batch size of a scalar tensor; it has no dimensions.")
    return data.size(0)  # strided nested tensors have no `shape`


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate the tensors at the same places of several nested structures.

    Not a collective.

    Args:
        data: structures of the same form. The leaves of a single one may be anything.
        dim: along which dimension.

    Raises:
        TypeError: a leaf of several structures is no tensor.
        ValueError: the structures differ.

    Example:
        >>> concatenate([{"a": torch.ones(1)}, {"a": torch.zeros(1)}])
        {'a': tensor([1., 0.])}
    """

    def joined(first: Any, *others: Any) -> Any:
        if isinstance(first, torch.Tensor):
            return torch.cat([first, *others], dim)
        if others:
            raise TypeError(f"Can only concatenate tensors, not {type(first)}.")
        return first

    return over_leaves(joined, *data)


def padded(tensor: torch.Tensor, dim: int, length: int, value: Any, first: bool) -> torch.Tensor:
    """Return the tensor with `value` filled in until it is `length` long along `dim`."""
    missing = length - shape_of(tensor)[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    blank = tensor.new_full(shape, value)
    return torch.cat([blank, tensor] if first else [tensor, blank], dim)


# -- one piece for each process


def bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the piece of a rank starts and ends; the first ranks take one more where it does not divide."""
    share, extra = divmod(length, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def _piece(value: Any, length: int, rank: int, world_size: int, padded: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _piece(item, length, rank, world_size, padded) for key, item in value.items()}
    start, end = bounds(length, rank, world_size)
    missing = -(-length // world_size) - (end - start) if padded and length else 0
    if isinstance(value, (list, tuple)):
        return value[start:end] + value[-1:] * missing
    if isinstance(value, torch.Tensor) and value.ndim:
        piece = value[start:end]
        return torch.cat([piece, *[value[-1:]] * missing]) if missing else piece
    # The caller who holds a Dataset has imported the library.
    if isinstance(value, _dataset_type()):
        return value.select([*range(start, end), *[length - 1] * missing])
    return value


def _dataset_type() -> Any:
    return getattr(sys.modules.get("datasets"), "Dataset", ())


def _lengths(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path and length of each value of a nested dictionary that is divided, and of what else its top level holds."""
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _lengths(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            if value.ndim:
                yield name, len(value)
        elif isinstance(value, (list, tuple, _dataset_type())) or (
            not path and hasattr(value, "__len__") and not isinstance(value, (str, bytes))
        ):
            yield name, len(value)


def piece(inputs: Any, rank: int, world_size: int, padded: bool) -> Any:
    """Return the piece of the inputs that belongs to a rank; ValueError if values of a dictionary differ in length.

    Lists, tuples, tensors and `datasets.Dataset` are divided, also in nested dictionaries; everything else goes to every
    rank unchanged. `padded` repeats the last element until all pieces are as long as the first.
    """
    if world_size == 1:
        return inputs
    if not isinstance(inputs, Mapping):
        return _piece(inputs, len(inputs), rank, world_size, padded)
    lengths = dict(_lengths(inputs))
    if len(set(lengths.values())) > 1:
        raise ValueError(f"All values in the dictionary must have the same length, but their lengths are {lengths}.")
    return _piece(inputs, next(iter(lengths.values()), 0), rank, world_size, padded)
