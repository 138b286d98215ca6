"""Packed documents: their positions in the rows of a batch, and attention within each of them only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerate.runtime import torch_private


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, and the keys that this rank's queries see. Every rank has all keys.

    Attributes:
        bounds: the beginnings of each row's documents, and the row's length; one row stands for all.
        pieces: per row, runs of queries in one document: the slice, the document's begin, the run's end, the document's end.
        order: [length], the index of each position's key; None if the keys are in the order of the row.
    """

    bounds: tuple[tuple[int, ...], ...]
    pieces: list[list[tuple[slice, int, int, int]]]
    order: Tensor | None = None

    @classmethod
    def find(cls, positions: np.ndarray, places: np.ndarray, order: Tensor | None = None) -> "Documents":
        """Return those of rows: a document begins where a position, of [batch, length], does not follow the one before it.

        `places` in the row are those of this rank's queries, in their order.
        """
        starts = [np.flatnonzero(np.diff(row) != 1) + 1 for row in positions]
        bounds = tuple((0, *row.tolist(), positions.shape[-1]) for row in starts)
        return cls(bounds, [_pieces(row, places) for row in bounds], order)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return max(int(np.diff(row).max()) for row in self.bounds)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, **options: Any) -> Tensor:
        """Return attention in which a query sees only the keys of its document.

        A document costs as much as in a row without others. A mask of rows and columns is only made for a document within which the
        queries begin. Tensors are [batch, heads, queries or length, width]; `options` are those of
        `scaled_dot_product_attention` except masks.

        Not a collective.
        """
        if self.order is not None:
            key, value = (tensor.index_select(-2, self.order) for tensor in (key, value))
        rows = []
        for number, pieces in enumerate(self.pieces):
            row, parts = slice(number, number + 1) if len(self.pieces) > 1 else slice(None), []
            for queries, start, seen, stop in pieces:
                keys = slice(start, seen if causal else stop)
                inputs = query[row, :, queries], key[row, :, keys], value[row, :, keys]
                count, of_keys, mask = inputs[0].shape[-2], inputs[1].shape[-2], None
                if causal and count != of_keys:  # the last query sees all keys
                    mask = torch.ones(count, of_keys, dtype=torch.bool, device=query.device).tril(of_keys - count)
                how = {"attn_mask": mask, "is_causal": causal and mask is None, **options}
                parts.append(torch_private.scaled_dot_product_attention(*inputs, **how))
            rows.append(torch.cat(parts, dim=-2))
        return torch.cat(rows)


def _pieces(bounds: Sequence[int], places: np.ndarray) -> list[tuple[slice, int, int, int]]:
    pieces = []
    runs = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    for begin, end in pairwise(runs):
        first = int(places[begin])
        for start, stop in pairwise(bounds):
            low, high = max(start, first), min(stop, first + end - begin)
            if low < high:
                pieces.append((slice(begin + low - first, begin + high - first), start, high, stop))
    return pieces
