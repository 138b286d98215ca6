"""Reading weights ahead of the modules that need them."""

import contextlib
import copy
import gc
import logging
import os
import pickle
import signal
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accelerate.big_modeling import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.offload import lanes, prefetch
from accelerate.offload.init_device import init_empty_weights
from accelerate.offload.lanes import HostLane, Lane, PageLane, Ready, StreamLane
from accelerate.offload.prefetch import Prefetcher, Unit, prefetch_budget

WIDTH = 16
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


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
    monkeypatch.setattr(PageLane, "smallest", 0)
    monkeypatch.setattr(HostLane, "smallest", 0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return _Stack().eval()


@pytest.fixture
def inputs():
    return torch.randn(3, WIDTH)


def _prefetcher(model):
    return model._hf_hook.leads


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
    assert torch.equal(model(inputs), plain)
    prefetcher = _prefetcher(model)
    # The learned order is used within the first forward already: after the first layer comes the second, the last time.
    first = prefetcher.hits
    assert torch.equal(model(inputs), plain)
    assert prefetcher.hits - first == 5 and prefetcher.ahead == 0
    before = prefetcher.misses
    assert torch.equal(model(inputs), plain) and prefetcher.misses == before


def test_another_way_through_the_model_is_read_as_it_comes(model, inputs, tmp_path):
    orders = [None, [3, 2, 1, 0], [0, 0, 0], None, [1, 1, 2]]
    plain = [model(inputs, order) for order in orders]
    disk_offload(model, tmp_path)
    for _ in range(3):
        for order, expected in zip(orders, plain, strict=True):
            assert torch.equal(model(inputs, order), expected)
    assert _prefetcher(model).misses > 0


def test_parts_called_on_their_own_and_encoders_before_decoders(inputs, tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = _Stack(2), _Stack(3)

        def forward(self, x, steps=2):
            memory = self.encoder(x)
            for _ in range(steps):
                x = self.decoder(x) + memory
            return x

    model = Pair().eval()
    plain, encoded = [model(inputs, steps) for steps in (1, 3)], model.encoder(inputs)
    disk_offload(model, tmp_path)
    for _ in range(2):
        assert torch.equal(model.encoder(inputs), encoded)
        assert [
            torch.equal(model(inputs, steps), expected) for steps, expected in zip((1, 3), plain, strict=True)
        ] == [True] * 2
    assert _prefetcher(model).hits > 0


@settings(derandomize=True, deadline=None, max_examples=25)
@given(budget=st.integers(0, 6 * LAYER_BYTES), order=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_never_more_than_the_budget_is_ahead(budget, order):
    asked = []

    class Counting(Lane):
        delivers = False
        smallest = 0

        def bring(self, weights):
            asked.append(weights)

    class Hook:
        pass

    hooks = [Hook() for _ in range(4)]
    sizes = [LAYER_BYTES, 3 * LAYER_BYTES, 10, LAYER_BYTES // 2]
    units = [Unit(hook, Counting(), dict, size) for hook, size in zip(hooks, sizes, strict=True)]
    prefetcher = Prefetcher(units, budget)
    for _ in range(3):
        prefetcher.begin()
        for number in order:
            prefetcher.enter(hooks[number])
            assert prefetcher.ahead <= budget
        prefetcher.end()
        assert prefetcher.ahead == 0
    assert prefetcher.most_ahead <= budget
    prefetcher.close()


def test_budgets_follow_the_largest_module_and_false_is_off(model, tmp_path):
    disk_offload(model, tmp_path)
    assert _prefetcher(model).budget == prefetch._PAGES_AHEAD
    remove_hook_from_submodules(model)
    disk_offload(model, tmp_path, prefetch=False)
    assert _prefetcher(model) is None and model.layers[0]._hf_hook.prefetcher is None
    remove_hook_from_submodules(model)
    disk_offload(model, tmp_path, prefetch=LAYER_BYTES)
    assert _prefetcher(model).budget == LAYER_BYTES
    remove_hook_from_submodules(model)
    # Weights in host memory that compute there are nowhere to be read from.
    assert _prefetcher(cpu_offload(model, "cpu")) is None


def _as_bfloat16(model, folder):
    """A checkpoint in bfloat16, dispatched to the disk for a model in float32."""
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    with init_empty_weights():
        empty = _Stack().eval()
    return empty


def test_weights_are_cast_ahead(model, inputs, tmp_path):
    empty = _as_bfloat16(model, tmp_path)
    load_checkpoint_and_dispatch(empty, tmp_path, {"": "disk"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    plain = model(inputs)
    for _ in range(3):
        assert torch.equal(empty(inputs), plain)
    prefetcher = _prefetcher(empty)
    assert isinstance(prefetcher._units[id(empty.layers[0]._hf_hook)].lane, HostLane)
    assert prefetcher.budget == LAYER_BYTES and prefetcher.hits > 0
    # Copies are not kept: that would be the memory that offloading saves.
    assert not any(layer._hf_hook._kept for layer in empty.layers)


def test_weights_that_are_changed_between_forwards_are_seen(model, inputs, monkeypatch):
    _through_streams(monkeypatch)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, "cpu", state_dict=state)
    model(inputs)
    model(inputs)
    assert _prefetcher(model).hits > 0
    for tensor in state.values():
        tensor.data.zero_()  # without a new version
    assert not model(inputs).any()
    for name in state:
        state[name] = torch.ones_like(state[name])
    expected = _Stack().eval()
    expected.load_state_dict(state)
    assert torch.equal(model(inputs), expected(inputs))


def test_weights_that_are_changed_after_they_were_read_are_read_again():
    class Hook:
        pass

    hooks, tensors = [Hook(), Hook()], [torch.ones(2), torch.ones(2)]
    units = [
        Unit(hook, HostLane(), lambda tensor=tensor: {"w": (tensor, torch.float64)}, 16)
        for hook, tensor in zip(hooks, tensors, strict=True)
    ]
    prefetcher = Prefetcher(units, 64)
    for _ in range(2):
        prefetcher.begin()
        for hook in hooks:
            ready = prefetcher.enter(hook)
    assert ready.tensors()["w"].dtype is torch.float64
    prefetcher.enter(hooks[0])
    prefetcher._requests[0].done.wait()
    tensors[1].add_(1)
    assert prefetcher.enter(hooks[1]) is None
    prefetcher.close()


class _Stream:
    """The names of torch.cuda that a lane uses, on the CPU, with a record of the calls."""

    def __init__(self):
        self.calls = []
        outer = self

        class Event:
            def record(self, stream):
                outer.calls.append("record")

            def synchronize(self):
                outer.calls.append("synchronize")

        class Stream:
            def __init__(self, device=None):
                outer.calls.append(f"stream {device}")

            def wait_event(self, event):
                outer.calls.append("wait")

        self.Event, self.Stream = Event, Stream
        self._current = Stream("current")

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append("enter")
        yield
        self.calls.append("exit")

    def current_stream(self, device):
        self.calls.append(f"current {device}")
        return self._current


def _through_streams(monkeypatch, staging_bytes=256):
    """Have weights travel as they would to an accelerator."""
    namespace = _Stream()
    monkeypatch.setattr(StreamLane, "_pinned", lambda self: torch.empty(self._staging_bytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: namespace.calls.append("keep"))
    monkeypatch.setattr(
        prefetch, "_lane", lambda device, casts, known: StreamLane(torch.device("cpu"), namespace, staging_bytes)
    )
    monkeypatch.setattr(prefetch, "_is_at_home", lambda *arguments: False)
    return namespace


@pytest.mark.parametrize("staging_bytes", [64, 256, 4096])
def test_weights_travel_through_two_buffers_on_a_stream_of_their_own(staging_bytes, monkeypatch):
    namespace = _Stream()
    monkeypatch.setattr(StreamLane, "_pinned", lambda self: torch.empty(self._staging_bytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: namespace.calls.append("keep"))
    lane = StreamLane(torch.device("cpu"), namespace, staging_bytes)
    weights = {
        "w": (torch.randn(7, 9), torch.float32),
        "strided": (torch.randn(6, 4).t(), torch.bfloat16),
        "scalar": (torch.tensor(3.0), torch.float64),
        "none": (torch.zeros(0, 3), torch.float32),
    }
    ready = lane.bring(weights)
    assert isinstance(ready, Ready) and namespace.calls.count("stream cpu") == 1
    sent = namespace.calls.count("record")
    # The end of all copies is recorded behind them, and a buffer is not filled again before it has arrived.
    assert namespace.calls[-1] == "record" and namespace.calls.count("synchronize") == max(0, sent - 1 - 2)
    assert namespace.calls.count("enter") == namespace.calls.count("exit") == 4
    arrived = ready.tensors()
    assert namespace.calls.count("wait") == 1 and namespace.calls.count("keep") == 4
    # Of the weights' device, which need not be the current one.
    assert namespace.calls.count("current cpu") == 1 and arrived["strided"].stride() == weights["strided"][0].stride()
    for name, (tensor, dtype) in weights.items():
        assert torch.equal(arrived[name], tensor.to(dtype)) and arrived[name].dtype is dtype
    assert namespace.calls.count("stream cpu") == 1


@pytest.mark.parametrize("home", ["memory", "disk"])
def test_a_model_through_streams_gives_the_same_bits(home, model, inputs, tmp_path, monkeypatch):
    plain = [model(inputs), model(inputs, [3, 1])]
    namespace = _through_streams(monkeypatch)
    cpu_offload(model, "cpu") if home == "memory" else disk_offload(model, tmp_path)
    for _ in range(3):
        assert torch.equal(model(inputs), plain[0]) and torch.equal(model(inputs, [3, 1]), plain[1])
    assert _prefetcher(model).hits > 0 and "wait" in namespace.calls
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), OSError("the disk is gone")])
def test_a_reader_that_fails_leaves_it_to_the_hook(error, model, inputs, tmp_path, monkeypatch, caplog):
    plain, others = model(inputs), set(threading.enumerate())

    def fails(self, weights):
        raise error

    monkeypatch.setattr(PageLane, "bring", fails)
    disk_offload(model, tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert torch.equal(model(inputs), plain)
        _prefetcher(model).close()
        for thread in set(threading.enumerate()) - others:
            thread.join(5)
    said = [record for record in caplog.records if "ahead ran out of memory" in record.message]
    assert len(said) == isinstance(error, torch.OutOfMemoryError)


def test_a_model_that_goes_takes_its_thread_along(inputs, tmp_path):
    model = _Stack().eval()
    disk_offload(model, tmp_path)
    model(inputs), model(inputs)
    threads = [thread for thread in threading.enumerate() if thread.name == "accelerate-prefetch"]
    assert threads and all(thread.daemon for thread in threads)
    gone = weakref.ref(_prefetcher(model))
    remove_hook_from_submodules(model)
    gc.collect()  # models of other tests, whose threads were counted above
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    gc.collect()
    assert gone() is None


def test_copies_and_pickles_read_when_they_need(model, inputs, tmp_path):
    plain = model(inputs)
    disk_offload(model, tmp_path)
    model(inputs)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(inputs), plain) and copied._hf_hook.leads is None
    again = pickle.loads(pickle.dumps(model.layers[0]._hf_hook))
    assert isinstance(again, AlignDevicesHook) and again.prefetcher is None and again._kept == {}
    layer = add_hook_to_module(nn.Linear(WIDTH, WIDTH), again)
    assert torch.equal(layer(inputs), model.layers[0](inputs))


def test_pages_are_read_where_the_kernel_cannot_be_asked(monkeypatch):
    from accelerate.offload import mapped

    touched = []
    monkeypatch.setattr(mapped, "_madvise", lambda: None)
    monkeypatch.setattr(mapped, "_strided_read", lambda tensor: touched.append(tensor.nbytes))
    PageLane().bring({"w": (torch.ones(4), torch.float32), "none": (torch.ones(0), torch.float32)})
    assert touched == [16] and lanes.STAGING_BYTES > 0
    monkeypatch.undo()
    mapped._strided_read(torch.ones(5000, dtype=torch.bool))
    mapped.read_pages(torch.ones(5000))


def test_hooks_that_are_appended_keep_reading_ahead(model, inputs, tmp_path):
    plain = model(inputs)
    disk_offload(model, tmp_path)
    prefetcher = _prefetcher(model)
    for module in (model, model.layers[1]):
        add_hook_to_module(module, ModelHook(), append=True)
    for _ in range(3):
        assert torch.equal(model(inputs), plain) and prefetcher.ahead == 0
    assert prefetcher.hits > 8 and model.layers[1]._hf_hook.hooks[0].prefetcher is prefetcher


def test_small_modules_are_left_to_their_hooks(model, tmp_path, monkeypatch):
    monkeypatch.setattr(PageLane, "smallest", LAYER_BYTES + 1)
    disk_offload(model, tmp_path)
    assert _prefetcher(model) is None


def test_a_model_without_data_has_nothing_to_read(model, tmp_path):
    disk_offload(model, tmp_path, execution_device=torch.device("meta"))
    assert _prefetcher(model) is None


class _Hook:
    pass


def _learned(lane, count=2):
    """A prefetcher that knows the order of some hooks, the first of which runs now."""
    hooks, tensors = [_Hook() for _ in range(count)], [torch.ones(2) for _ in range(count)]
    units = [
        Unit(hook, lane, lambda number=number: {"w": (tensors[number], torch.float64)}, 16)
        for number, hook in enumerate(hooks)
    ]
    prefetcher = Prefetcher(units, 64)
    for _ in range(2):
        prefetcher.begin()
        for hook in hooks:
            prefetcher.enter(hook)
    prefetcher.begin()
    prefetcher.enter(hooks[0])
    return prefetcher, hooks, tensors


def test_another_tensor_at_the_same_address_is_another_tensor():
    prefetcher, hooks, tensors = _learned(HostLane())
    request = prefetcher._requests[0]
    request.done.wait()
    tensors[1] = tensors[1].detach()
    tensors[1].data.fill_(7)
    assert prefetcher.enter(hooks[1]) is None
    prefetcher.close()


class _Panic(BaseException):
    """As those of Rust, which are no `Exception`."""


def test_a_reader_that_panics_reads_on():
    class Panics(HostLane):
        times = 0

        def bring(self, weights):
            self.times += 1
            raise _Panic

    lane = Panics()
    prefetcher, hooks, _ = _learned(lane)
    assert prefetcher.enter(hooks[1]) is None
    before = lane.times
    prefetcher.enter(hooks[0])
    assert prefetcher.enter(hooks[1]) is None and lane.times > before
    prefetcher.close()


def test_without_another_thread_weights_are_read_when_they_are_needed(model, inputs, tmp_path, monkeypatch, caplog):
    def fails(self):
        raise RuntimeError("can't start new thread")

    plain = model(inputs)
    disk_offload(model, tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", fails)
        for _ in range(3):
            assert torch.equal(model(inputs), plain)
    assert caplog.text.count("cannot be started: can't start new thread") == 1
    assert torch.equal(model(inputs), plain) and _prefetcher(model).hits == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent():
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(HostLane):
        def bring(self, weights):
            begun.set()
            goes_on.wait(60)
            return super().bring(weights)

    goes_on.set()
    prefetcher, hooks, _ = _learned(Slow())
    prefetcher.drop()
    begun.clear(), goes_on.clear()
    prefetcher.enter(hooks[0])
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if prefetcher.enter(hooks[1]) is None else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    goes_on.set()
    prefetcher.close()


def test_weights_that_are_gone_are_the_hooks_affair(model, inputs, monkeypatch):
    _through_streams(monkeypatch)
    cpu_offload(model, "cpu")
    model(inputs), model(inputs)
    hook, weights = model.layers[2]._hf_hook, {"weight": torch.ones(WIDTH, WIDTH)}
    model.layers[1]._old_forward = lambda x: (setattr(hook, "weights_map", weights), x)[1]
    with pytest.raises(RuntimeError, match="meta"):  # its bias is nowhere
        model(inputs)


def test_weights_that_are_changed_while_they_are_read_are_read_again():
    class Meanwhile(HostLane):
        def bring(self, weights):
            ready = super().bring(weights)
            weights["w"][0].add_(1)
            return ready

    prefetcher, hooks, _ = _learned(Meanwhile())
    assert prefetcher.enter(hooks[1]) is None
    prefetcher.close()
