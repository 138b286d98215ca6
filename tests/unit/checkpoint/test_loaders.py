"""Where loaders stand."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.checkpoint import files, loaders
from accelerate.data import resume
from accelerate.data.loader import DataLoaderShard
from accelerate.data.skip import skip_first_batches


class Stateful:
    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.fixture
def rank(monkeypatch):
    def set_rank(index):
        state = type("State", (), {"is_main_process": index == 0, "is_local_main_process": index == 0})
        monkeypatch.setattr(files, "PartialState", state)
        return index

    return set_rank


def test_loaders_that_cannot_tell_have_no_file(tmp_path):
    loader = DataLoader([1, 2])
    loaders.write(loader, tmp_path, 0, 0)
    assert os.listdir(tmp_path) == [] and loaders.read(loader, tmp_path, 0, 0, None) is None
    assert loaders.positions([loader]) == [None]
    loaders.restore(loader, None, None)


def test_each_rank_finds_its_own_state_and_a_new_one_the_shared_one(tmp_path, rank):
    for index in (0, 1):
        loaders.write(Stateful(index * 10), tmp_path, 2, rank(index))
    assert sorted(os.listdir(tmp_path)) == ["dl_state_dict_2.bin", "rank1_dl_state_dict_2.bin"]
    read = [loaders.read(Stateful(), tmp_path, 2, index, None)["position"] for index in (0, 1, 2)]
    assert read == [0, 10, 0]
    loader = Stateful()
    loaders.restore(loader, {"position": 3}, None)
    assert loader.position == 3


def test_an_epoch_is_drawn_again_from_its_beginning():
    torch.manual_seed(0)
    loader = DataLoaderShard(list(range(6)), batch_size=1, shuffle=True)
    reader = iter(loader)
    begun = [next(reader).item() for _ in range(2)]
    (position,) = loaders.positions([loader])
    assert position["batches"] == 2
    again = DataLoaderShard(list(range(6)), batch_size=1, shuffle=True)
    loaders.restore(again, None, position)
    assert begun + [batch.item() for batch in again] == begun + [batch.item() for batch in reader]
    again.continue_after_load = False
    loaders.restore(again, None, position)
    order = [batch.item() for batch in skip_first_batches(again, 2)]
    assert sorted(begun + order) == list(range(6)), "the same order, for those who leave out by themselves"
    assert resume.KEY not in position


def test_a_loop_that_was_left_begins_anew():
    torch.manual_seed(0)
    loader = DataLoaderShard(list(range(6)), batch_size=1, shuffle=True)
    for _ in zip(range(2), loader, strict=False):
        pass
    (position,) = loaders.positions([loader])
    states = torch.get_rng_state()
    assert position["batches"] and not position["running"]
    want = [batch.item() for batch in loader]
    again = DataLoaderShard(list(range(6)), batch_size=1, shuffle=True)
    loaders.restore(again, None, position)
    torch.set_rng_state(states)
    assert [batch.item() for batch in again] == want


def test_a_stateful_loader_begins_anew_too_where_that_was_asked_for():
    pytest.importorskip("torchdata.stateful_dataloader")

    def stateful(length):
        return DataLoaderShard(list(range(length)), batch_size=1, use_stateful_dataloader=True)

    loader = stateful(6)
    reader = iter(loader)
    next(reader), next(reader)
    (position,), state = loaders.positions([loader]), loader.state_dict()
    state.pop(resume.KEY)
    again = stateful(6)
    loaders.restore(again, dict(state), position)
    assert [batch.item() for batch in again] == [2, 3, 4, 5]
    anew = stateful(7)  # other data, which only a loader that goes on has to refuse
    anew.continue_after_load = False
    loaders.check(anew, position, 0)
    loaders.restore(anew, dict(state), position)
    assert [batch.item() for batch in anew] == list(range(7))
