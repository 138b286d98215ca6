"""Attention within packed documents equals attention with a mask of rows and columns, whatever places a rank has."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from accelerate.extensions.sequence.documents import Documents

LENGTH = 32
ROWS = [[5, 1, 14, 12], [20, 12]]


def dealt(ranks, balanced):
    """The places of each rank: parts in turn, or one of the front and one of the back."""
    if not balanced:
        return np.split(np.arange(LENGTH), ranks)
    parts = np.split(np.arange(LENGTH), 2 * ranks)
    return [np.concatenate((parts[rank], parts[2 * ranks - 1 - rank])) for rank in range(ranks)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, balanced", [(1, False), (2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])  # one row of positions stands for all
def test_each_document_is_alone(causal, ranks, balanced, rows):
    positions = np.stack([np.concatenate([np.arange(count) for count in row]) for row in rows])
    numbers = torch.from_numpy(np.cumsum(positions == 0, axis=1))[:, None]
    mask = numbers[..., :, None] == numbers[..., None, :]
    if causal:
        mask = mask & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, *shape) for shape in ((4, LENGTH, 8), (2, LENGTH, 8), (2, LENGTH, 6)))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    places = dealt(ranks, balanced)
    gathered = torch.from_numpy(np.concatenate(places))  # keys come in the order of ranks
    for mine in places:
        documents = Documents.find(positions, mine, gathered.argsort())
        inputs = query[:, :, mine], key[:, :, gathered], value[:, :, gathered]
        out = documents.attend(*inputs, causal, scale=0.3, enable_gqa=True)
        assert (out - expected[:, :, mine]).abs().max() < 1e-6
    assert documents.longest == (20 if len(rows) > 1 else 14)
