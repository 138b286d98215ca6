"""Batches by a budget of tokens: what is in them, what ranks do together, and continuing."""

from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.data_loader import PackingCollator, TokenBudgetSampler, prepare_data_loader, skip_first_batches
from cases import cases


def lengths(count, longest=50):
    return np.random.default_rng(count).integers(1, longest + 1, count)


@cases("count, budget, ranks", (1000, 128, 1), (997, 128, 4), (50, 50, 8), (9, 400, 8), (33, 64, 16))
@pytest.mark.parametrize("packed", [False, True])
def test_batches_keep_the_budget_and_have_each_sample_once(count, budget, ranks, packed):
    known = lengths(count)
    sampler = TokenBudgetSampler(known, budget, ranks, packed=packed)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) and len(batches) % ranks == 0
        tokens = [known[batch].sum() if packed else len(batch) * known[batch].max() for batch in batches]
        assert all(0 < number <= budget for number in tokens)
        assert sorted(sum(batches, [])) == list(range(count))
        # The ranks of a step have as many samples, but for one, of similar length.
        for step in [] if packed else range(0, len(batches), ranks):
            sizes = [len(batch) for batch in batches[step : step + ranks]]
            assert max(sizes) - min(sizes) <= 1


def test_little_is_padded_and_ranks_work_alike():
    known = lengths(20_000, 1000)
    batches = list(TokenBudgetSampler(known, 16_000, 8))
    padded = np.array([len(batch) * known[batch].max() for batch in batches])
    assert known.sum() / padded.sum() > 0.9  # 0.53 of random batches of 16
    steps = padded.reshape(-1, 8)
    assert steps.mean() / steps.max(axis=1).mean() > 0.95


def test_orders_are_of_the_seed_and_the_epoch():
    known = lengths(300)
    sampler, other = TokenBudgetSampler(known, 200, 2, seed=1), TokenBudgetSampler(known, 200, 2, seed=2)
    first = list(sampler)
    assert list(sampler) == first != list(other)
    sampler.set_epoch(1)
    assert list(sampler) != first and len(list(sampler)) == len(first)
    plain = TokenBudgetSampler(known, 200, shuffle=False)
    longest = [known[batch].max() for batch in plain]
    assert longest == sorted(longest, reverse=True)


def test_samples_that_fill_a_batch_each_are_repeated_where_ranks_would_have_none():
    batches = list(TokenBudgetSampler([10] * 5, 10, 2))
    assert [len(batch) for batch in batches] == [1] * 6 and set(sum(batches, [])) == set(range(5))


def test_lengths_of_any_integer_type():
    wanted = list(TokenBudgetSampler([3, 9, 4], 12))
    assert list(TokenBudgetSampler(np.array([3, 9, 4], dtype=np.uint8), 12)) == wanted


@cases(
    "options, said",
    ({"lengths": [3, 9], "max_tokens": 8}, "Sample 1 has 9 tokens, and max_tokens is 8"),
    ({"lengths": [], "max_tokens": 8}, "lengths is empty"),
    ({"lengths": [1], "max_tokens": 0}, "max_tokens is 0"),
    ({"lengths": [1], "max_tokens": 1, "ranks": 0}, "ranks is 0"),
)
def test_refusals(options, said):
    with pytest.raises(ValueError, match=said):
        TokenBudgetSampler(**options)


def test_a_loader_among_other_ranks_is_refused():
    loader = DataLoader(range(20), batch_sampler=TokenBudgetSampler([1] * 20, 4, ranks=3))
    with pytest.raises(ValueError, match="ranks=3, and its loader is prepared among 2 ranks.*Pass ranks=2"):
        prepare_data_loader(loader, num_processes=2, process_index=0)


def test_packed_rows_are_full_and_cost_ranks_alike():
    known = np.minimum(np.random.default_rng(0).lognormal(6, 1, 20_000).astype(int) + 1, 8192)
    sampler = TokenBudgetSampler(known, 8192, 8, packed=True)
    batches = list(sampler)
    assert known.sum() / 8192 / len(batches) > 0.99  # 0.5 of rows that are filled up in order
    costs = np.array([(known[batch] ** 2).sum() for batch in batches]).reshape(-1, 8)
    assert costs.mean() / costs.max(axis=1).mean() > 0.97
    sampler.set_epoch(1)
    assert len(sampler) == len(batches) and list(sampler) != batches
    assert [len(batch) for batch in TokenBudgetSampler([10] * 5, 10, 2, packed=True)] == [1] * 6
    # None comes a third time before all come twice.
    for ranks, expected in ((8, [1, 1, 2, 2, 2]), (12, [2, 2, 2, 3, 3])):
        found = Counter(place for batch in TokenBudgetSampler([10] * 5, 10, ranks, packed=True) for place in batch)
        assert sorted(found.values()) == expected


def test_a_packed_row():
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": np.array([8, 9]), "labels": [-100, 9]}, {"input_ids": [4]}]
    row = PackingCollator(8, pad_token_id=3)(samples)
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 3, 3]]
    assert row["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    with pytest.raises(ValueError, match=r"6 tokens, and max_tokens is 5.*packed=True"):
        PackingCollator(5)(samples)


def test_a_packed_row_is_what_transformers_makes_of_it():
    collators = pytest.importorskip("transformers.data.data_collator")
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    theirs = collators.DataCollatorWithFlattening()(samples)
    ours = PackingCollator(5)(samples)
    assert {name: value.tolist() for name, value in theirs.items()} == {n: value.tolist() for n, value in ours.items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_prepared_loaders_give_each_rank_its_batches_in_each_epoch(ranks):
    known = lengths(100)
    sampler = TokenBudgetSampler(known, 120, ranks)

    def loaders():
        made = TokenBudgetSampler(known, 120, ranks)
        loader = DataLoader(range(100), batch_sampler=made)
        return [prepare_data_loader(loader, num_processes=ranks, process_index=rank) for rank in range(ranks)]

    prepared = loaders()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wanted = list(sampler)
        for rank, loader in enumerate(prepared):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == wanted[rank::ranks]
            assert len(loader) == len(wanted) // ranks


@pytest.mark.parametrize("packed", [False, True])
def test_an_interrupted_epoch_goes_on(tmp_path, packed):
    known = lengths(200)

    def loader():
        return DataLoader(range(200), batch_sampler=TokenBudgetSampler(known, 100, packed=packed))

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(loader())
    list(prepared)  # an epoch, so that the next one is another
    batches, rest = iter(prepared), None
    for _ in range(3):
        next(batches)
    accelerator.save_state(tmp_path / "saved")
    wanted = [batch.tolist() for batch in batches]
    accelerator.free_memory()
    again = Accelerator(cpu=True)
    prepared = again.prepare(loader())
    again.load_state(tmp_path / "saved")
    rest = [batch.tolist() for batch in prepared]
    assert rest == wanted and rest
    assert [batch.tolist() for batch in skip_first_batches(loader(), 2)] == [batch.tolist() for batch in loader()][2:]
