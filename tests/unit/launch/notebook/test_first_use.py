"""Who used a device first."""

import functools
import os
import sys
import types

import pytest
import torch

from accelerate.launch.notebook import first_use

pytestmark = pytest.mark.usefixtures("forgotten")


class Namespace:
    """A module such as `torch.cuda`, in which the first use calls what was left for it."""

    def __init__(self):
        self.used, self.later, self.spoiled = False, [], False

    def _lazy_call(self, function):
        self.later.append(function)

    def is_initialized(self):
        return self.used

    def _is_in_bad_fork(self):
        return self.spoiled


# A frame of torch's.
TORCH = {}
TEXT = (
    "def in_torch(namespace):\n    namespace.used = True\n    for function in namespace.later:\n        function()\n"
)
exec(compile(TEXT, os.path.join("site-packages", "torch", "cuda", "__init__.py"), "exec"), TORCH)
in_torch = TORCH["in_torch"]


@pytest.fixture
def forgotten(monkeypatch):
    monkeypatch.setattr(first_use, "_stacks", {})
    monkeypatch.setattr(first_use, "_watched", set())


@pytest.fixture
def namespace(monkeypatch):
    namespace = Namespace()
    monkeypatch.setattr(torch, "cuda", namespace)
    return namespace


@pytest.fixture
def device(namespace):
    return types.SimpleNamespace(type="cuda", namespace=lambda: namespace)


def library():
    """Return a module of an installed library that uses the device in its second line."""
    module = types.ModuleType("greedy")
    path = os.path.join("elsewhere", "site-packages", "greedy", "core.py")
    exec(compile("def load(use):\n    use()\n", path, "exec"), vars(module))
    return module


def test_the_library_and_the_users_line_are_named(namespace):
    first_use.watch(("cuda",))
    library().load(functools.partial(in_torch, namespace))
    told = first_use.culprit("cuda")
    assert "first used by greedy/core.py, line 2, in load" in told
    assert "That was called by" in told
    assert f"{__file__}, line" in told and "library().load(functools" in told


def test_the_users_own_line_is_named_once(namespace):
    first_use.watch(("cuda",))
    in_torch(namespace)
    told = first_use.culprit("cuda")
    assert "That was called" not in told and "in_torch(namespace)" in told


def test_only_the_first_use_counts(namespace):
    first_use.watch(("cuda",))
    library().load(functools.partial(in_torch, namespace))
    in_torch(namespace)
    assert "greedy" in first_use.culprit("cuda")


def test_watching_twice_leaves_one_call(namespace):
    first_use.watch(("cuda",))
    first_use.watch(("cuda", "xpu", "no_such_device"))
    assert len(namespace.later) == 1


def test_a_device_in_use_is_not_watched(namespace):
    namespace.used = True
    first_use.watch(("cuda",))
    assert namespace.later == []


def test_torch_of_this_version_keeps_a_list_to_call():
    first_use.watch()
    first_use.watch()
    assert sum(getattr(call, "func", None) is first_use._remember for call, _ in torch.cuda._queued_calls) >= 1
    assert first_use._watched == {"cuda", "xpu"}


def test_what_happened_before_is_guessed(monkeypatch):
    main = types.ModuleType("__main__")
    main.weights, main.number, main._hidden = torch.ones(1, device="meta"), 3, torch.ones(1, device="meta")
    main.model = torch.nn.Linear(1, 1, device="meta")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    told = first_use.culprit("meta")
    assert "Variables that lie on it: weights, model." in told
    assert "bitsandbytes" in told
    assert "import accelerate first" in told


def test_cells_that_mention_a_device(monkeypatch):
    cells = [
        "",
        "import torch",
        "model.cuda()",
        "x = x.to('cuda:0')",
        "device_map = 'auto'",
        "y.to(device)",
        "model.cuda()",
    ]
    shell = types.SimpleNamespace(user_ns={"In": cells})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert "Cells that mention it: In[2], In[3], In[4] and 1 more." in first_use.culprit("cuda")


def test_the_file_of_a_cell_is_its_number(monkeypatch):
    shell = types.SimpleNamespace(user_ns={}, compile=types.SimpleNamespace(_filename_map={"ipykernel/1.py": 7}))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert first_use._readable("ipykernel/1.py") == "cell In[7]"


@pytest.mark.parametrize(
    ("used", "spoiled", "survives"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_whether_a_fork_would_work(device, namespace, used, spoiled, survives):
    namespace.used, namespace.spoiled = used, spoiled
    assert first_use.is_used(device) is used
    assert first_use.survives_fork(device) is survives


def test_the_processor_survives():
    from accelerate.devices import row

    assert first_use.survives_fork(row("cpu"))
    assert not first_use.is_used(row("cpu"))


def test_a_fault_of_ours_does_not_take_the_device_away(namespace, monkeypatch):
    first_use.watch(("cuda",))
    monkeypatch.setattr(first_use.traceback, "walk_stack", lambda frame: [][1])
    in_torch(namespace)
    assert namespace.used
