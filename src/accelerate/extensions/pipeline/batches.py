"""The arguments and outputs of a model that is traced: how a batch of any number of samples becomes micro-batches, and outputs one."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.runtime.torch_private import pytree

# Types of inputs and outputs besides tensors; such values are part of the traced graph.
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _label(path: Sequence[Any]) -> str:
    """Name a value in nested arguments: ``attention_mask`` or ``states[0]``."""
    first = path[0] if path else ""
    name = getattr(first, "key", getattr(first, "idx", getattr(first, "name", first)))
    return f"{name}{pytree.keystr(tuple(path[1:]))}"


@dataclass
class _Leaf:
    """A value in the example or the output: shape and dtype of a tensor of one micro-batch, or a constant."""

    name: str
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    value: Any = None

    def __str__(self) -> str:
        kind = f"={self.value!r}" if self.shape is None else f" of shape {self.shape}, {self.dtype}"
        return f"{self.name}{kind}"


def _leaf(name: str, value: Any) -> _Leaf:
    if isinstance(value, torch.Tensor):
        return _Leaf(name, tuple(value.shape), value.dtype)
    return _Leaf(name, None, type(value), value)  # 1, 1.0 and True are equal, but other constants


class Inputs:
    """The arguments (of `rows` samples) that a model is traced with; brings those of a batch into their form."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._owner = type(model).__name__
        self._signature = inspect.signature(model.forward)
        values, self._structure = self._flat(args, kwargs, "`example_args` and `example_kwargs`")
        self.leaves = [_leaf(name, value) for name, value in values]
        for leaf in self.leaves:
            if leaf.shape is None and not isinstance(leaf.value, _CONSTANTS):
                raise ValueError(
                    f"{leaf.name} of the example is a {type(leaf.value).__name__}, which a pipeline cannot cut into "
                    "micro-batches. Omit it, or give tensors, numbers, strings, and lists, tuples and dictionaries of them."
                )
        self.rows = next((leaf.shape[0] for leaf in self.leaves if leaf.shape), 0)
        if not self.rows:
            raise ValueError(
                "No tensor of `example_args` and `example_kwargs` has a batch dimension with a sample in it (seen: "
                f"{', '.join(str(leaf) for leaf in self.leaves) or 'no values'}). Give tensors whose first dimension is the batch."
            )
        self._example = [value for _, value in values if isinstance(value, torch.Tensor)]

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any], called: str) -> tuple[list[tuple[str, Any]], Any]:
        """Return the values in some arguments, each with its name, and the structure around them."""
        try:
            arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{called} do not fit {self._owner}.forward{self._signature}: {error}.") from None
        paths, structure = pytree.tree_flatten_with_path(arguments)
        return [(_label(path), value) for path, value in paths], structure

    def traced(self) -> tuple[torch.Tensor, ...]:
        """Return the example's tensors as the traced graph takes them, once: all have a dimension to cut."""
        example, self._example = self._example, []
        # Tensors that are one object in the example would be one input of the graph.
        return tuple(tensor.detach().reshape(tensor.shape or (1,)) for tensor in example)

    def call(self, forward: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Call a forward with the example's arguments, but other tensors, in the form that `traced` returns."""
        remaining = iter(tensors)
        values = [
            leaf.value if leaf.shape is None else next(remaining) if leaf.shape else next(remaining).reshape(())
            for leaf in self.leaves
        ]
        bound = inspect.BoundArguments(self._signature, pytree.tree_unflatten(values, self._structure))
        return forward(*bound.args, **bound.kwargs)

    def match(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, list[tuple[torch.Tensor, bool]]]:
        """Return the samples of a batch, and each tensor with whether it holds them; refuse other arguments."""
        values, structure = self._flat(args, kwargs, "The arguments on the first process")
        rows = next((value.shape[0] for _, value in values if isinstance(value, torch.Tensor) and value.dim()), 0)
        if not rows:
            raise ValueError(
                f"The first process got no sample (arguments: {', '.join(str(_leaf(*value)) for value in values) or 'none'}). "
                "Give the model its inputs there: tensors whose first dimension is the batch."
            )
        if structure != self._structure:
            raise ValueError(
                f"The pipeline was traced with {', '.join(leaf.name for leaf in self.leaves)}, and is called with "
                f"{', '.join(name for name, _ in values)}. Give the arguments of the example, or call `prepare_pippy` again."
            )
        return rows, [
            self._compared(leaf, _leaf(*value), value[1], rows)
            for leaf, value in zip(self.leaves, values, strict=True)
            if leaf.shape is not None or _leaf(*value) != leaf
        ]

    def _compared(self, leaf: _Leaf, batch_leaf: _Leaf, value: Any, rows: int) -> tuple[torch.Tensor, bool]:
        """Return a tensor of a batch, and whether it holds the samples; another one is the same for every micro-batch."""
        if leaf.shape is not None and batch_leaf.dtype == leaf.dtype:
            if leaf.shape[:1] == (self.rows,) and batch_leaf.shape == (rows, *leaf.shape[1:]):
                return value, True
            if batch_leaf.shape == leaf.shape:
                return value.reshape(leaf.shape or (1,)), False
        raise ValueError(
            f"{batch_leaf} in a batch of {rows}, but the pipeline was traced with {leaf} for a micro-batch of {self.rows}. Only the "
            "number of samples may differ: convert or pad it, or call `prepare_pippy` again with an example like this."
        )

    def cut(
        self, tensors: Sequence[tuple[torch.Tensor, bool]], start: int, count: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Return `count` micro-batches from a sample on, all in one, on a device; the last sample fills the last of them."""
        rows = count * self.rows
        pieces = []
        for tensor, holds_samples in tensors:
            if holds_samples:
                piece = tensor[start : start + rows]
                if piece.shape[0] < rows:
                    piece = torch.cat([piece, piece[-1:].expand(rows - piece.shape[0], *piece.shape[1:])])
            else:
                piece = torch.cat([tensor] * count)
            pieces.append(piece.to(device))
        return tuple(pieces)


class Outputs:
    """The output of a model: its structure, and for each tensor in it the number of rows per sample."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._structure: Any = None
        self._leaves: list[_Leaf] = []

    def record(self, output: Any) -> tuple[torch.Tensor, ...]:
        """Note the structure of one micro-batch's output; return its tensors. ValueError if one has no samples."""
        paths, self._structure = pytree.tree_flatten_with_path(output)
        self._leaves = [_leaf(_label(path) or "it", self._constant(_label(path), value)) for path, value in paths]
        for leaf in self._leaves:
            if leaf.shape is not None and (not leaf.shape or leaf.shape[0] % self._rows):
                raise ValueError(
                    f"The model returns {leaf.name} of shape {leaf.shape} for a micro-batch of {self._rows}: there is no batch "
                    "dimension. Remove its inputs (such as `labels`), or return a value for each sample."
                )
        return tuple(value for _, value in paths if isinstance(value, torch.Tensor))

    @staticmethod
    def _constant(name: str, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, *_CONSTANTS)):
            return value
        if not hasattr(value, "get_seq_length"):
            raise ValueError(
                f"The model returns a {type(value).__name__} ({name}), which cannot be divided. Return tensors in lists, "
                "tuples, dictionaries or dataclasses that `torch.export.register_dataclass` knows."
            )
        return None  # a cache of transformers

    def joined(self, pieces: Sequence[Sequence[torch.Tensor]], samples: int) -> Any:
        """Return the model's output for a batch, from the tensors of each run of the schedule."""
        columns = [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*pieces, strict=True)]
        shapes = self._shapes(samples)
        return self.built([column[: shape[0]] for column, (shape, _) in zip(columns, shapes, strict=True)])

    def _shapes(self, samples: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        leaves = [leaf for leaf in self._leaves if leaf.shape is not None]
        return [((leaf.shape[0] // self._rows * samples, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]

    def tensors(self, output: Any, samples: int, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of an output, to be sent; where it is None, room for those of so many samples, to be received."""
        if output is None:
            return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._shapes(samples)]
        return [leaf.contiguous() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return tensors in the structure of the model's output."""
        remaining = iter(tensors)
        values = [leaf.value if leaf.shape is None else next(remaining) for leaf in self._leaves]
        return pytree.tree_unflatten(values, self._structure)
