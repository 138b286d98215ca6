"""How functions reach other processes: by name, by value, or not at all."""

import functools
import importlib.util
import linecache
import multiprocessing
import pickle
import sys
import threading
import types

import pytest
import torch

from accelerate.launch.notebook import shipping

LOCK = threading.Lock()


def importable(value):
    return value


def uses_a_lock():
    with LOCK:
        pass


@pytest.fixture
def notebook(monkeypatch):
    """A main program that no other process can import, with a function in it."""
    main = types.ModuleType("__main__")
    main.__spec__ = None
    text = "def in_a_cell(queue):\n    queue.append(helper())\n\ndef helper():\n    return 3\n\nclass Settings:\n    rate = 4\n"
    linecache.cache["cell"] = (len(text), None, text.splitlines(True), "cell")
    exec(compile(text, "cell", "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    yield main
    del linecache.cache["cell"]


def test_forked_processes_have_everything():
    shipment = shipping.fork(function := lambda: None, [1])
    assert (shipment.method, shipment.function, shipment.args) == ("fork", function, (1,))


@pytest.mark.parametrize("function", [importable, functools.partial(importable), print])
def test_importable_functions_go_by_name(function):
    shipment = shipping.spawn(function, (torch.ones(2),))
    assert shipment.method == "spawn"
    assert shipment.function is function


def test_objects_of_multiprocessing_go_as_they_are():
    queue = multiprocessing.get_context("spawn").Queue()
    assert shipping.spawn(importable, (queue,)).function is importable
    queue.close()


def test_functions_of_cells_go_by_value(notebook):
    pytest.importorskip("cloudpickle")
    shipment = shipping.spawn(notebook.in_a_cell, ([],))
    assert shipment.args == ()
    assert shipment.function.__name__ == "in_a_cell"
    assert shipment.function._cells["cell"][2][0] == "def in_a_cell(queue):\n"
    sent = pickle.loads(pickle.dumps(shipment.function))
    sent()  # with a list of its own


def test_classes_of_cells_go_by_value(notebook):
    pytest.importorskip("cloudpickle")
    notebook.Settings.__module__ = "__main__"
    assert shipping.spawn(importable, (notebook.Settings(),)).args == ()


def test_lambdas_go_by_value():
    pytest.importorskip("cloudpickle")
    seen = []
    shipping.spawn(lambda: seen.append(1), ()).function()
    assert seen == []  # it was a copy


def test_without_cloudpickle_the_error_says_what_to_do(notebook, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cloudpickle" else find(name))
    with pytest.raises(
        shipping.CannotSendError, match=r"(?s)in_a_cell cannot be sent.*a cell.*pip install cloudpickle.*\.py file"
    ):
        shipping.spawn(notebook.in_a_cell, ([],))
    assert shipping.spawn(importable, ()).function is importable


def test_what_cannot_be_sent_is_named(notebook):
    pytest.importorskip("cloudpickle")
    lock = threading.Lock()
    with pytest.raises(shipping.CannotSendError, match=r"The reason is lock, a lock"):
        shipping.spawn(lambda: lock.acquire(), ())
    with pytest.raises(shipping.CannotSendError, match=r"The reason is args\[0\], a lock"):
        shipping.spawn(importable, (lock,))
    assert shipping.spawn(uses_a_lock, ()).function is uses_a_lock  # the other process makes its own


def test_main_programs(notebook, monkeypatch):
    assert not shipping.main_is_importable()
    notebook.__file__ = __file__
    assert shipping.main_is_importable()
    notebook.__file__ = "<stdin>"
    assert not shipping.main_is_importable()
    notebook.__spec__ = types.SimpleNamespace(name="module")
    assert shipping.main_is_importable()


def test_a_process_that_imports_its_parents_script(monkeypatch):
    assert not shipping.is_importing_main()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert shipping.is_importing_main()
