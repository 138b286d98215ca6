"""Reading weights ahead of the modules that need them."""

import copy
import logging
import pickle
import queue
import sys
import threading
from unittest import mock

import pytest
import torch
from torch import nn

from accelerate.big_modeling import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.extensions.big_models import prefetch
from accelerate.extensions.big_models.prefetch import HostTransfer, Prefetcher, StreamTransfer, Unit, prefetch_budget
from accelerate.hooks import add_hook_to_module
from offload_samples import arrivals

WIDTH = 16


class _Stack(nn.Module):
    """Layers, of which the first runs twice."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x, order=None):
        for number in order or [0, 1, 0, *range(2, len(self.layers))]:
            x = torch.relu(self.layers[number](x))
        return x


@pytest.fixture(autouse=True)
def small_modules_too(monkeypatch):
    """Have the thread read modules of these tests' size."""
    monkeypatch.setattr(prefetch, "SMALLEST_ON_CPU", 0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return _Stack().eval()


@pytest.fixture
def inputs():
    return torch.randn(3, WIDTH)


@pytest.mark.parametrize(
    ("value", "budget"),
    [(True, None), (False, 0), (0, 0), (4096, 4096), ("2MiB", 2 * 2**20), ("yes", None), ("off", 0), ("4096", 4096)],
)
def test_budgets_are_read_from_arguments_and_the_environment(value, budget, monkeypatch):
    assert prefetch_budget(value) == budget
    monkeypatch.setenv("ACCELERATE_OFFLOAD_PREFETCH", str(value))
    assert prefetch_budget(None) == budget and prefetch_budget(7) == 7


def test_a_budget_that_is_none_is_named_before_anything_is_changed(model, tmp_path, monkeypatch):
    for call in (
        lambda: cpu_offload(model, prefetch="much"),
        lambda: disk_offload(model, tmp_path, prefetch=-1),
        lambda: dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, prefetch="much"),
        lambda: load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, prefetch="1 parsec"),
    ):
        with pytest.raises(ValueError, match="prefetch="):
            call()
    monkeypatch.setenv("ACCELERATE_OFFLOAD_PREFETCH", "fast")
    with pytest.raises(ValueError, match="ACCELERATE_OFFLOAD_PREFETCH='fast'"):
        prefetch_budget(None)
    monkeypatch.setenv("ACCELERATE_OFFLOAD_PREFETCH", "")
    assert prefetch_budget(None) is None
    assert list(tmp_path.iterdir()) == [] and "_hf_hook" not in model.__dict__


def test_the_order_is_learned_in_the_first_forward(model, inputs, tmp_path):
    plain = model(inputs)
    disk_offload(model, tmp_path)
    with arrivals() as read_ahead:
        for _ in range(3):
            assert torch.equal(model(inputs), plain)
    assert read_ahead == [False] * 5 + [True] * 10
    # A part that is called directly reads when it needs, and so do copies.
    with arrivals() as read_ahead:
        model.layers[1](inputs)
    assert not any(read_ahead)


def test_another_way_through_the_model_is_read_as_it_comes(model, inputs, tmp_path):
    disk_offload(model, tmp_path)
    model(inputs, [0, 1, 2, 3])
    # A model that leaves layers out or repeats them is followed again from the next one that is known.
    with arrivals() as read_ahead:
        model(inputs, [0, 2, 3, 2, 3])
    assert read_ahead == [True, False, True, False, True]


class _Device:
    """Computes what it is given when the test allows it; it notes what the reading thread does."""

    def __init__(self):
        self.given, self.noted = [], queue.SimpleQueue()

    def mark(self):
        number, event = len(self.given), threading.Event()
        self.given.append(event)
        return mock.Mock(synchronize=lambda: (self.noted.put(f"waits for {number}"), event.wait(60)))

    def bring(self, weights):
        self.noted.put(f"reads {next(iter(weights))}")
        return dict(weights), None

    def receive(self, tensors, event):
        return tensors


def test_a_host_ahead_of_its_device_reads_no_further_than_the_budget_from_there():
    device = _Device()
    hooks = [mock.Mock(weights_map={str(number): torch.ones(2)}) for number in range(4)]
    units = [Unit(hook, device, {str(number): torch.float32}, 8) for number, hook in enumerate(hooks)]
    prefetcher = Prefetcher(units, budget=8)
    for forward in range(2):  # the order is known in the second one
        device.given.clear()
        prefetcher.begin()
        for number, hook in enumerate(hooks):
            prefetcher.enter(hook)
            if forward and number < 3:
                seen = [device.noted.get(timeout=60) for _ in range(2)]
                assert seen == [f"reads {number}", f"waits for {number}"]
                device.given[number].set()
        prefetcher.end()
    prefetcher.close()


def test_pages_are_read_whatever_the_kernel_can(model, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "elsewhere")
    plain = model(inputs)
    disk_offload(model, tmp_path)
    with arrivals() as read_ahead:
        assert all(torch.equal(model(inputs), plain) for _ in range(2))
    assert all(read_ahead[5:])
    HostTransfer().bring({"bool": (torch.ones(5000, dtype=torch.bool), torch.bool), "0": (torch.ones(0), torch.half)})


@pytest.mark.parametrize("staging_bytes", [64, 256, 4096])
def test_weights_travel_through_two_buffers_on_a_stream_of_their_own(staging_bytes, monkeypatch):
    namespace, empty, kept = mock.MagicMock(), torch.empty, []  # the names of torch.cuda that a transfer uses
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream))
    transfer = StreamTransfer(torch.device("cpu"), namespace, staging_bytes)
    weights = {
        "w": (torch.randn(7, 9), torch.float32),
        "strided": (torch.randn(6, 4).t(), torch.bfloat16),
        "scalar": (torch.tensor(3.0), torch.float64),
        "none": (torch.zeros(0, 3), torch.float32),
    }
    sent_tensors, event = transfer.bring(weights)
    # The end of all copies is recorded behind them, and a buffer is not filled again before it has arrived.
    sent = event.record.call_count - 1
    assert namespace.mock_calls[-1][0] == "Event().record" and event.synchronize.call_count == sent > 0
    block, stream = namespace.stream.return_value, namespace.current_stream.return_value
    assert block.__enter__.call_count == block.__exit__.call_count == 4
    arrived = transfer.receive(sent_tensors, event)
    stream.wait_event.assert_called_once_with(event)
    # Of the weights' device, which need not be the current one.
    namespace.current_stream.assert_called_once_with(torch.device("cpu"))
    assert kept == 4 * [stream] and arrived["strided"].stride() == weights["strided"][0].stride()
    for name, (tensor, dtype) in weights.items():
        assert torch.equal(arrived[name], tensor.to(dtype)) and arrived[name].dtype is dtype
    assert transfer.bring(weights)
    namespace.Stream.assert_called_once_with(device=torch.device("cpu"))  # one stream serves all


class _Panic(BaseException):
    """As those of Rust, which are no `Exception`."""


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), OSError("the disk is gone"), _Panic()])
def test_a_reader_that_fails_leaves_it_to_the_hook(error, model, inputs, tmp_path, monkeypatch, caplog):
    plain = model(inputs)

    def fails(self, weights):
        raise type(error)(*error.args)  # one that is kept keeps what raised it

    monkeypatch.setattr(HostTransfer, "bring", fails)
    disk_offload(model, tmp_path)
    with caplog.at_level(logging.WARNING), arrivals() as read_ahead:
        for _ in range(4):
            assert torch.equal(model(inputs), plain)
    assert not any(read_ahead)
    said = [record for record in caplog.records if "ahead ran out of memory" in record.message]
    assert len(said) == isinstance(error, torch.OutOfMemoryError)


def test_a_thread_that_cannot_start_is_named_and_weights_are_read_in_place(
    model, inputs, tmp_path, monkeypatch, caplog
):
    def start(thread):
        raise RuntimeError("can't start new thread")

    plain = model(inputs)
    disk_offload(model, tmp_path)
    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING), arrivals() as read_ahead:
        assert all(torch.equal(model(inputs), plain) for _ in range(3))
    assert not any(read_ahead) and caplog.text.count("can't start new thread") == 1


def test_copies_and_pickles_read_when_they_need(model, inputs, tmp_path):
    plain = model(inputs)
    disk_offload(model, tmp_path)
    limit = len(pickle.dumps(model.layers[0]._hf_hook)) + model.layers[0].weight.nbytes
    model(inputs)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(inputs), plain) and copied._hf_hook.leads is None
    pickled = pickle.dumps(model.layers[0]._hf_hook)
    again = pickle.loads(pickled)
    assert again.prefetcher is None and len(pickled) < limit, "no weight of the forward is in a copy"
    layer = add_hook_to_module(nn.Linear(WIDTH, WIDTH), again)
    assert torch.equal(layer(inputs), model.layers[0](inputs))
