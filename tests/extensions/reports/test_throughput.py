"""Throughput, shares of a step, the slow rank; what is compared between replicas, and losses that are no numbers."""

import inspect
import pickle
import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode as get_current_dispatch_mode

from accelerate import Accelerator
from accelerate.extensions.reports.throughput import NAMED, PARTS, ThroughputRow, scored
from accelerate.extensions.same_model.consistency import checksum
from accelerate.optimizer import AcceleratedOptimizer
from cases import cases


def rows(*owns, spread=0.0):
    nothing = (1.0,) * 4
    return [ThroughputRow(rank, own, *nothing, (1.0,), own, spread) for rank, own in enumerate(owns)]


@cases(
    "owns, spread, named",
    ((1.0, 1.3), 0.0, 1),
    ((1.3, 1.0), 0.05, 0),
    ((1.0, 1.02, 0.98, 1.3), 0.02, 3),
    ((1.0, 1.05), 0.0, None),  # less than three times 3 %
    ((1.0, 1.3), 0.2, None),  # chance explains it
    ((1.0,), 0.0, None),
)
def test_a_rank_is_named_by_what_chance_does_not_explain(owns, spread, named):
    scores = [row.score for row in scored(rows(*owns, spread=spread))]
    assert [rank for rank, score in enumerate(scores) if score >= NAMED] == ([] if named is None else [named])


def test_scores_compare_each_rank_with_the_median_of_the_others():
    owns = [1.0, 3.0, 2.0, 2.0, 5.0, 4.0]
    for size in (2, 3, 5, 6):
        for row in scored(rows(*owns[:size], spread=0.5)):
            others = [own for rank, own in enumerate(owns[:size]) if rank != row.rank]
            assert row.score == pytest.approx((row.own - statistics.median(others)) / 0.5)


def test_a_measurement_ends_with_what_was_prepared():
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    accelerator.prepare(model)
    before = get_current_dispatch_mode()
    accelerator.throughput(samples=1)  # counts operations from here on
    assert get_current_dispatch_mode() is not before and model._forward_hooks
    accelerator.free_memory()
    assert get_current_dispatch_mode() is before and not model._forward_hooks and not model._forward_pre_hooks
    assert inspect.ismethod(accelerator.gather) and inspect.ismethod(accelerator.reduce)


@pytest.fixture
def training():
    """A function that trains for some steps, and its Accelerator and optimizer."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def train(steps, **numbers):
        for _ in range(steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(256, 256)).mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.throughput(**numbers)

    yield train, accelerator, optimizer
    accelerator.free_memory()  # which ends the measurement


def test_shares_add_up_to_the_wall_time(training, tmp_path):
    train, accelerator, _ = training
    train(4, samples=8, flops=1e6)
    accelerator.throughput_report()  # with what torch imports at the first step
    start = time.perf_counter()
    train(30, samples=8, flops=1e6)
    wall = time.perf_counter() - start
    report = accelerator.throughput_report(peak_flops=1e9)
    (row,) = report.rows
    assert sum(row.shares) == pytest.approx(1) and 30 * row.step == pytest.approx(wall, rel=0.05)
    shares = dict(zip(PARTS, row.shares, strict=True))
    assert shares["forward"] > 0.1 and shares["backward"] > 0.1 and shares["optimizer"] > 0
    assert shares["checkpoint"] == 0
    assert row.samples * row.step == pytest.approx(8) and row.mfu == pytest.approx(1e6 / row.step / 1e9)
    accelerator.save_state(tmp_path / "state")
    train(1, samples=8, flops=1e6)
    assert accelerator.throughput_report().values()["throughput/share_checkpoint"] > 0
    accelerator.log(report.values(), step=10)
    train(1, samples=8)  # not told any more: the next step counts them
    assert "throughput/mfu" not in accelerator.throughput_report(1e9).values()
    train(2, samples=8)
    assert accelerator.throughput_report(1e9).values()["throughput/mfu"] > 0
    assert "throughput/tokens_per_second" not in report.values() and report.values()["throughput/slowest_rank"] == -1


def test_flops_are_counted_once_and_scaled_by_tokens(training):
    train, accelerator, _ = training
    train(2, tokens=256)  # the first starts the measurement, the second counts
    train(1, tokens=512)
    report = accelerator.throughput_report()
    # Four layers: forward, gradients of the weights, and gradients of the inputs but for the first.
    assert report.rows[0].flops * report.rows[0].step == pytest.approx(2 * 11 * 2 * 256**3)
    assert "MFU: the peak FLOPS of this device are not known" in str(report)
    with pytest.raises(RuntimeError, match="no measured step on rank"):
        accelerator.throughput_report()
    accelerator.throughput()  # begins again, without a step
    with pytest.raises(RuntimeError, match="no measured step on rank"):
        accelerator.throughput_report()
    accelerator.free_memory()
    with pytest.raises(ValueError, match="Call it after `prepare`"):
        accelerator.throughput()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_llama(attention):
    transformers = pytest.importorskip("transformers")
    layers, width, inner, words, rows, length, heads, shared = 2, 64, 176, 500, 2, 128, 4, 2
    settings = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": shared}
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, vocab_size=words, attn_implementation=attention, **settings
    )
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(transformers.LlamaForCausalLM(config))
    ids = torch.randint(0, words, (rows, length))
    for _ in range(3):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        accelerator.throughput(tokens=rows * length)
    report = accelerator.throughput_report()
    weights = layers * (2 * width**2 + 2 * width * width // heads * shared + 3 * width * inner) + width * words
    analytic = rows * length * (6 * weights + 12 * layers * length * width)
    assert report.rows[0].flops * report.rows[0].step == pytest.approx(analytic, rel=0.02)


def test_compiled_models_are_not_counted_and_copies_are_not_measured(training):
    train, accelerator, optimizer = training
    train(3, samples=1)
    assert accelerator.throughput_report().values()["throughput/flops_per_second"] > 0
    copy = pickle.loads(pickle.dumps(accelerator))
    assert copy.extensions.attached == []
    copy.backward(copy._models[0](torch.ones(1, 256)).sum())
    pickle.loads(pickle.dumps(accelerator._models[0]))(torch.ones(1, 256))
    accelerator.free_memory()
    model = accelerator.prepare(torch.compile(nn.Linear(2, 2), backend="eager"))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        accelerator.throughput(samples=1)
    assert "FLOPs were not counted, because the model is compiled" in str(accelerator.throughput_report())


def test_checksums_see_every_bit():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        tensor = torch.randn(300).mul(50).to(dtype)
        bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        before = int(checksum(tensor))
        for bit in range(8 * tensor.element_size() - 1):
            bits[7] ^= 1 << bit
            assert int(checksum(tensor)) != before
            bits[7] ^= 1 << bit
        bits[3] += 1
        bits[4] -= 1  # cancels in a sum
        assert int(checksum(tensor)) != before
    assert int(checksum(torch.ones(3, dtype=torch.bool))) != int(checksum(torch.zeros(3, dtype=torch.bool)))
    assert int(checksum(torch.ones(2, dtype=torch.complex64))) != 0 == int(checksum(torch.ones(0)))


def prepared(monkeypatch, every, modules="", model_last=False, **options):
    monkeypatch.setenv("ACCELERATE_CHECK_EVERY", every)
    monkeypatch.setenv("ACCELERATE_CHECK_MODULES", modules)
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
    loader = torch.utils.data.DataLoader(torch.tensor([[1.0], [2.0], [torch.inf], [3.0], [4.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if model_last:
        optimizer = accelerator.prepare(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def test_without_the_variable_nothing_is_watched(monkeypatch):
    for every in ("", "0"):
        accelerator, _, optimizer, _ = prepared(monkeypatch, every)
        assert type(optimizer) is AcceleratedOptimizer and "backward" not in vars(accelerator)
    monkeypatch.setenv("ACCELERATE_CHECK_EVERY", "often")
    with pytest.raises(ValueError, match="ACCELERATE_CHECK_EVERY is 'often'"):
        Accelerator(cpu=True)


@cases(
    "modules, model_last, words",
    ("", False, "ACCELERATE_CHECK_MODULES=true"),
    ("1", False, "output: '0' (Linear)"),
    ("1", True, "output: '0' (Linear)"),
)
@pytest.mark.filterwarnings("ignore:.*already prepared")
def test_a_loss_that_is_no_number_is_named_with_its_batch(monkeypatch, modules, model_last, words):
    accelerator, model, optimizer, loader = prepared(monkeypatch, "4", modules, model_last)
    pickle.loads(pickle.dumps(optimizer)).zero_grad()
    seen = 0
    with pytest.raises(FloatingPointError) as caught:  # the fourth step finds it
        for x in loader:
            seen += 1
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == 4
    assert "first on rank 0, in its backward pass 2 (batch 2 of epoch 0)" in str(caught.value)
    assert words in str(caught.value)
