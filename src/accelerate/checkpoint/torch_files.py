"""Files of torch's pickle format and of safetensors, written whole, and read without running code from them."""

import codecs
import collections
import contextlib
import functools
import importlib
import logging
import os
import pickle
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch

from accelerate.modules.unwrap import clean_state_dict_for_safetensors, shared_tensor_names
from accelerate.process import PartialState
from accelerate.runtime.durable import written_whole

logger = logging.getLogger("accelerate.utils.other")  # the public path

Path = str | os.PathLike[str]

_multiarray = (np._core if hasattr(np, "_core") else np.core).multiarray  # numpy 2 renamed the package

# What numpy's random state pickles to, for `torch.serialization.safe_globals`. `load` needs none of it, and trusts it less.
TORCH_SAFE_GLOBALS = [_multiarray._reconstruct, np.ndarray, codecs.encode, np.dtype, np.dtypes.UInt32DType]


class _DtypeRecord:
    """Takes the place of a dtype in a file: its name and byte order. The rest, such as fields, could lead to any address."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[?bBhHiIlLqQefdFD]|[biufcSU]\d{1,9}", name):
            raise pickle.UnpicklingError(f"it has values of numpy's dtype {name!r:.80}; numbers and texts are read")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        _, order, *more = state
        # Only a text's length stands in its name and, once more, among the sizes.
        if order not in ("<", ">", "=", "|") or not {type(None)}.issuperset(map(type, more[:3])):
            raise pickle.UnpicklingError(
                "it has values of numpy with fields or shapes of their own; numbers and texts are read"
            )
        self.dtype = self.dtype.newbyteorder(order)


class _ArrayRecord(np.ndarray):
    """Takes the place of an array while a file is read, and of numpy's function that builds them, empty until their state comes."""

    def __new__(cls, kind: Any = None, *_: Any) -> "_ArrayRecord":
        if kind is not cls:  # `numpy.ndarray` itself would take any memory for an array
            raise pickle.UnpicklingError("it calls numpy.ndarray, where numpy's own pickles call _reconstruct")
        _built.append(super().__new__(cls, (0,), "b"))
        return _built[-1]

    def __setstate__(self, state: Any) -> None:
        version, shape, record, *data = state
        super().__setstate__((version, shape, _dtype_of(record), *data))


def _dtype_of(record: Any) -> np.dtype:
    if type(record) is not _DtypeRecord:
        raise pickle.UnpicklingError(f"it has a {type(record).__name__} for numpy's dtype")
    return record.dtype


def _scalar(record: Any, data: bytes) -> Any:
    return _multiarray.scalar(_dtype_of(record), data)


_RECORDS = {"numpy.dtype": _DtypeRecord, "numpy.ndarray": _ArrayRecord, "_codecs.encode": codecs.encode}
for _name in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _RECORDS |= {f"{_name}._reconstruct": _ArrayRecord, f"{_name}.scalar": _scalar}
# Values of the standard library, whose constructors do no more than to build them; collections of defaults have types, too.
_VALUES = {
    "builtins": "bool bytes dict float frozenset int list range slice str tuple",
    "collections": "defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": "PosixPath PurePosixPath PureWindowsPath WindowsPath",
    "uuid": "UUID",
}
_loading = threading.Lock()  # what torch allows is the same for all threads
_built: list[_ArrayRecord] = []  # by the load that holds the lock


@functools.cache
def _buildable() -> dict[str, Any]:
    """Return the classes that a file may build in addition to torch's, by path; cached, because only a load imports some modules."""
    values = {
        (module, name): getattr(importlib.import_module(module), name)
        for module, names in _VALUES.items()
        for name in names.split()
    }
    # Python 3.13 writes another module of paths.
    paths = {f"pathlib._local.{name}": kind for (module, name), kind in values.items() if module == "pathlib"}
    return _RECORDS | {f"{module}.{name}": kind for (module, name), kind in values.items()} | paths


@contextlib.contextmanager
def _values_allowed(classes: Mapping[str, Any]) -> Iterator[None]:
    """Let torch build values of the standard library, numpy's arrays and numbers from records, and more classes by their paths.

    What else is allowed stays, also what another thread allows meanwhile.
    """
    ours = {**_buildable(), **classes}
    with _loading:
        former = _exchange(ours, [(kind, path) for path, kind in ours.items()])
        try:
            yield
        finally:
            _built.clear()
            _exchange(ours, former)


def _exchange(paths: Collection[str], allowed: list[Any]) -> list[Any]:
    """Let torch build some objects in place of those that have these paths, which are returned."""
    others, former = list[Any](), list[Any]()
    for entry in torch.serialization.get_safe_globals():
        path = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        (former if path in paths else others).append(entry)
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *allowed])
    return former


_CHANGED = (dict, list, collections.deque)
_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


def _with_arrays(value: Any, known: dict[int, Any]) -> Any:
    """Return a value in which arrays are numpy's own; dicts, lists and deques are changed where they are."""
    if id(value) in known:
        return known[id(value)]
    if type(value) is tuple:
        if _PLAIN.issuperset(map(type, value)):  # the state of a generator is hundreds of numbers
            return value
        made = [one if type(one) in _PLAIN else _with_arrays(one, known) for one in value]
        return tuple(made) if list(map(id, made)) != list(map(id, value)) else value
    left = [value] if isinstance(value, _CHANGED) else []
    known[id(value)] = value
    while left:
        held = left.pop()
        for key, one in list(held.items() if isinstance(held, dict) else enumerate(held)):
            if id(one) in known:
                held[key] = known[id(one)]
            elif isinstance(one, _CHANGED):
                known[id(one)] = one
                left.append(one)
            elif type(one) is tuple:
                held[key] = _with_arrays(one, known)
    return value


def save(obj: Any, f: Path | BinaryIO, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object to a file, on the main process only. All ranks may call it; the others return at once.

    Not a collective.

    Args:
        obj: What to save; with ``safe_serialization`` a flat dict of names and tensors, of which tied ones are written
            under their first name and all others as they are.
        f: A path, or a binary file when ``safe_serialization`` is off.
        save_on_each_node: Write on the main process of each node, for folders that the nodes do not share.
        safe_serialization: Write safetensors instead of torch's pickle format.

    Example:
        >>> save({"weight": torch.ones(2)}, "weights.bin")  # doctest: +SKIP
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        from safetensors.torch import save_file

        if not isinstance(f, (str, os.PathLike)):
            raise TypeError(
                f"safe_serialization=True needs a path, but got a {type(f).__name__}: safetensors opens the file itself. "
                "Pass a path, or safe_serialization=False."
            )
        tensors = obj
        if isinstance(obj, Mapping):
            tensors = clean_state_dict_for_safetensors(obj)
            _warn_of_shared_tensors(obj, tensors)
        with written_whole(f) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
    elif isinstance(f, (str, os.PathLike)):
        with written_whole(f) as temporary:
            torch.save(obj, temporary)
    else:
        torch.save(obj, f)


def _warn_of_shared_tensors(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    removed = [name for name in state if name not in saved]
    copied = [name for names in shared_tensor_names({name: state[name] for name in saved}) for name in names[1:]]
    text = [f"Removed shared tensor {', '.join(removed)}, which the file has under its first name."] if removed else []
    text += [f"Copied shared tensor {', '.join(copied)}, which is another part of the same memory."] if copied else []
    if text:
        logger.warning(
            "%s Tensors that share memory are separate after loading, unless a model ties them.", " ".join(text)
        )


def load(f: Path | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that ``save`` wrote in torch's format, without running code from the file.

    Not a collective.

    Args:
        f: A path or a binary file.
        map_location: Where tensors go; see ``torch.load``.
        **kwargs: Passed to ``torch.load``. ``weights_only=False`` accepts any pickle, and runs what it says: use it
            only for files that you trust.

    Example:
        >>> import tempfile
        >>> from accelerate.utils import load, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"epoch": 3}, f"{folder}/state.bin")
        ...     load(f"{folder}/state.bin")
        {'epoch': 3}

    Source:
        https://docs.pytorch.org/docs/stable/generated/torch.load.html
    """
    return load_each([f], map_location, **kwargs)[0]


def load_each(
    files: Iterable[Path | BinaryIO],
    map_location: Any = None,
    classes: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Load several objects as `load` does. What torch may build is the same for all threads, so it is set once for all files.

    `classes` are further ones that the files may build, by the paths that they name; not by `torch.serialization.safe_globals`, which
    a load in another thread would undo.
    """
    options = {"weights_only": True, "map_location": map_location, **kwargs}
    found = []
    with _values_allowed(classes or {}) if options["weights_only"] else contextlib.nullcontext():
        for file in files:
            value = torch.load(file, **options)
            if options["weights_only"] and _built:  # otherwise it is another thread's
                value = _with_arrays(value, {id(one): np.array(one) for one in _built})
                _built.clear()
            found.append(value)
    return found
