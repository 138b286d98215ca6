"""What is found inside a dataset, and described so that ranks can compare it."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from accelerate.extensions.same_data import contents
from accelerate.extensions.same_data.contents import Arrangements, digest
from cases import cases

datasets = pytest.importorskip("datasets")


class Items(Dataset):
    def __init__(self, items):
        self.items, self.unrelated = items, [1] * 7

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def described(dataset):
    return [(each.name, each.decides) for each in Arrangements(dataset).describe()]


def test_digest_depends_on_the_order_and_not_on_the_kind_of_index():
    numbers = [3, 1, 2]
    same = {digest(kind) for kind in (numbers, np.array(numbers), torch.tensor(numbers), iter(numbers))}
    assert len(same) == 1 and digest([1, 3, 2]) not in same
    assert digest(["a", "b"]) != digest(["b", "a"]) and digest([b"a"]) == digest(["a"])
    assert digest([("a", 1), ("b", 2)]) != digest([("b", 2), ("a", 1)])
    assert digest([object()]) is None and digest([]) is None and digest([1.5]) is None


@cases(
    "dataset, found",
    (range(5), []),
    (["a", "b"], [("the list", True)]),
    (Items(["a", "b"]), [("Items.items", True)]),
    (Items([5, 4, 3, 2]), [("Items.items", False)]),
    (Items(torch.randperm(4)), [("Items.items", False)]),
    (Items(torch.randn(4)), []),
    (Items([0.5, 0.25]), []),
    (Subset(Items(["a", "b", "c"]), [2, 0]), [("Subset.indices", True), ("Items.items", True)]),
    (ConcatDataset([Subset(range(9), range(0, 9, 2))]), [("Subset.indices", True)]),
    (SimpleNamespace(part=Items(["a", "b"])), [("Items.items", True)]),
    (datasets.Dataset.from_dict({"a": [1, 2]}), []),
    (datasets.Dataset.from_dict({"a": list(range(9))}).shuffle(seed=0), [("the index table of a Dataset", True)]),
)
def test_sequences_with_an_item_for_each_sample_are_found(dataset, found):
    assert described(dataset) == found


def test_rows_of_pandas_are_compared_without_their_index():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"name": [f"file {number}" for number in range(40)]})
    for values in (table, table["name"]):
        first, second = (
            Arrangements(Items(values.sample(frac=1, random_state=seed).reset_index(drop=True))).describe()[0]
            for seed in (0, 1)
        )
        assert first.decides and first.order != second.order


def test_new_order_of_an_epoch_is_described():
    items = Items(["a", "b", "c"])
    arrangements = Arrangements(items)
    before = arrangements.describe()[0].order
    items.items.reverse()
    assert arrangements.describe()[0].order != before


def test_rows_of_tables_are_probed_as_they_are_stored():
    table = datasets.Dataset.from_dict({"a": list(range(40))})
    table.set_transform(lambda batch: {"a": [random.random() for _ in batch["a"]]})
    assert contents.tables({"web": [Items(table)]}) == [table]
    assert contents.probe(table) == contents.probe(table) and contents.probe(table.select([]))[0] == 0
    length, rows = contents.probe(table)
    _, turned = contents.probe(table.select(range(39, -1, -1)))
    half, part = contents.probe(table.shard(2, 1))
    assert (length, half) == (40, 20) and rows.decides
    assert rows.order != turned.order and (rows.items, rows.sketch) == (turned.items, turned.sketch)
    assert part.items != rows.items and len(part.sketch) == 20
    large = datasets.Dataset.from_dict({"a": list(range(20_000))})
    assert contents.probe(large)[1][2:] == (None, [], False)


def test_states_of_shuffled_streams_differ_by_their_seed():
    stream = datasets.Dataset.from_dict({"a": list(range(8))}).to_iterable_dataset(num_shards=2)
    states = [contents.shuffles(stream.shuffle(seed=seed).map(lambda row: row)) for seed in (1, 1, 2)]
    assert states[0] == states[1] != states[2] and contents.shuffles(stream) is None
