"""What a launcher of functions refuses, and by which name."""

import functools

import pytest

from accelerate.launch.notebook.request import Request, check, name_of


def train(rate, steps=1):
    pass


async def train_later():
    pass


def train_bit_by_bit():
    yield


class Callable:
    def __call__(self, rate):
        pass


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (train, (1,)),
        (train, [1, 2]),
        (functools.partial(train, 1), ()),
        (Callable(), (1,)),
        (print, ("a", "b")),
        (lambda: None, ()),
        (dict, ()),
    ],
)
def test_what_is_fine(function, args):
    check(Request(function, args))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "function is None, which cannot be called. Pass the function itself", {"function": None}),
        (TypeError, "function is 'train', which cannot be called", {"function": "train"}),
        (TypeError, "function is train_later, a coroutine function", {"function": train_later, "args": ()}),
        (TypeError, "function is train_bit_by_bit, a generator", {"function": train_bit_by_bit, "args": ()}),
        (TypeError, "a coroutine function", {"function": functools.partial(train_later), "args": ()}),
        (TypeError, r"args is 5; give a tuple of the function's arguments, as in args=\(5,\)", {"args": 5}),
        (TypeError, "args is 'ab'; give a tuple", {"args": "ab"}),
        (TypeError, "args is {'rate': 1}; give a tuple", {"args": {"rate": 1}}),
        (TypeError, r"args is \(\), which does not fit train\(rate, steps=1\): missing a required", {"args": ()}),
        (TypeError, r"does not fit train\(rate, steps=1\): too many positional", {"args": (1, 2, 3)}),
        (ValueError, "num_processes is 0; it must be at least 1", {"num_processes": 0}),
        (ValueError, "num_processes is -1", {"num_processes": -1}),
        (TypeError, "num_processes is '2'; give an integer", {"num_processes": "2"}),
        (TypeError, "num_processes is True", {"num_processes": True}),
        (ValueError, "mixed_precision is 'fp17'; choose one of no, fp16, bf16, fp8", {"mixed_precision": "fp17"}),
        (ValueError, "mixed_precision is None; choose one of no, fp16, bf16, fp8", {"mixed_precision": None}),
        (ValueError, "num_nodes is 0", {"num_nodes": 0}),
        (ValueError, "node_rank is -1", {"node_rank": -1}),
        (ValueError, "node_rank is 2, and num_nodes is 2: machines are numbered", {"node_rank": 2, "num_nodes": 2}),
        (ValueError, "node_rank is 1, and num_nodes is 1", {"node_rank": 1}),
        (ValueError, "max_restarts is -1", {"max_restarts": -1}),
        (ValueError, "monitor_interval is 0;", {"monitor_interval": 0}),
        (ValueError, "monitor_interval is 'x'", {"monitor_interval": "x"}),
        (ValueError, "use_port is 'abc'", {"use_port": "abc"}),
        (ValueError, "use_port is 65536", {"use_port": 65536}),
        (ValueError, "use_port is '-1'", {"use_port": "-1"}),
        (ValueError, "rdzv_backend is 'x'; choose one of static, c10d", {"rdzv_backend": "x"}),
        (ValueError, "rdzv_backend is 'etcd', which is for several machines", {"rdzv_backend": "etcd"}),
        (TypeError, "rdzv_conf is 'timeout=1'; give a dictionary", {"rdzv_conf": "timeout=1"}),
        (ValueError, "rdzv_endpoint is 'there'; give host:port", {"rdzv_endpoint": "there"}),
        (ValueError, "rdzv_endpoint is ':1'; give host:port", {"rdzv_endpoint": ":1"}),
        (ValueError, "use_port is '0', and num_nodes is 2: several machines must", {"use_port": "0", "num_nodes": 2}),
        (ValueError, "master_addr is 'no such host'", {"master_addr": "no such host", "num_nodes": 2}),
        (ValueError, "rdzv_endpoint is '.x:1'", {"rdzv_endpoint": ".x:1", "num_nodes": 2}),
    ],
)
def test_what_is_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        check(Request(**{"function": train, "args": (1,), **arguments}))


def test_long_arguments_are_cut():
    with pytest.raises(TypeError) as caught:
        check(Request(train, "x" * 10_000))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("port", "number"), [("29501", 29501), (29501, 29501), ("29500", 0), ("", 0), ("0", 0), (None, 0)]
)
def test_the_port_is_a_free_one_unless_somebody_chose(port, number):
    assert Request(train, use_port=port).chosen_port == number


def test_where_machines_meet():
    assert Request(train, master_addr="a", use_port=3).endpoint == "a:3"
    assert Request(train, master_addr="a").endpoint == "a:29500"
    assert Request(train, master_addr="a", rdzv_endpoint="b:4").endpoint == "b:4"
    assert Request(train, rdzv_endpoint="127.0.0.1:29500").chosen_port == 29500


def test_precision_in_any_spelling():
    assert Request(train, mixed_precision="BF16").precision == "bf16"


def test_names():
    assert name_of(train) == "train"
    assert name_of(functools.partial(train, 1)) == "train"
    assert name_of(Callable()) == "Callable"
