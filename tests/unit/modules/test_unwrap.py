"""Taking models out of their wrappers."""

import functools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.modules import unwrap
from accelerate.modules.unwrap import extract_model_from_parallel, is_compiled_module
from cases import cases


def test_compilation_is_kept_or_taken_off(process_group):
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.ReLU(), nn.ReLU()]), "head": nn.Linear(1, 1)})
    whole = torch.compile(net, backend="eager")
    again = torch.compile(DistributedDataParallel(whole), backend="eager")
    for wrapped, compiled in [(whole, whole), (DistributedDataParallel(whole), whole), (again, whole)]:
        assert extract_model_from_parallel(wrapped) is compiled
        assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is net


def test_a_compiled_wrapper_stays_usable(process_group):
    net = nn.Linear(1, 1)
    wrapped = DistributedDataParallel(net)
    compiled = torch.compile(wrapped, backend="eager")
    inner = extract_model_from_parallel(compiled)
    assert is_compiled_module(inner) and inner._orig_mod is net
    assert compiled._orig_mod is wrapped, "the model in use still synchronises gradients"
    assert torch.equal(inner(torch.ones(1, 1)), net(torch.ones(1, 1)))


def test_a_wrapper_that_was_compiled_comes_off_a_submodule(process_group):
    net = nn.Linear(1, 1)
    wrapped = DistributedDataParallel(net)
    outer = nn.ModuleDict({"part": torch.compile(wrapped, backend="eager"), "same": wrapped})
    extract_model_from_parallel(outer, recursive=True)
    assert is_compiled_module(outer["part"]) and outer["part"]._orig_mod is net
    assert outer["same"] is net
    wrapped.forward = None
    assert torch.equal(outer["part"](torch.ones(1, 1)), net(torch.ones(1, 1))), "the wrapper does not run any more"


def test_a_module_of_ones_own_called_module_is_no_wrapper(process_group):
    own = nn.Module()
    own.module = nn.Linear(1, 1)
    outer = nn.Sequential(DistributedDataParallel(own))
    assert extract_model_from_parallel(own, recursive=True) is own
    assert extract_model_from_parallel(outer, recursive=True)[0] is own


def test_a_forward_that_was_on_the_instance_goes_back_there():
    net = nn.Linear(1, 1)
    net.forward = net._original_forward = functools.partial(nn.Linear.forward, net)
    hooked, net.forward = net.forward, None
    for _ in range(2):  # there is none to take off the second time
        extract_model_from_parallel(net, keep_fp32_wrapper=False)
        assert net.__dict__["forward"] is hooked


def test_a_replaced_forward_is_kept_or_taken_off():
    net = nn.Linear(1, 1)
    net._original_forward = net.forward
    net.forward = lambda x: "wrapped"
    assert extract_model_from_parallel(net)(None) == "wrapped"
    assert extract_model_from_parallel(net, keep_fp32_wrapper=False) is net
    assert "forward" not in net.__dict__ and "_original_forward" not in net.__dict__
    assert net(torch.ones(1, 1)).shape == (1, 1)


@cases(
    "wanted, found, pairs",
    (["a"], ["module.a"], {"module.a": "a"}),
    (["module.a"], ["a"], {"a": "module.a"}),
    (["module._orig_mod.x.a"], ["_orig_mod.x._orig_mod.a"], {"_orig_mod.x._orig_mod.a": "module._orig_mod.x.a"}),
    (["module.a"], ["module.a"], {"module.a": "module.a"}),  # a user's attribute of that name
    (["a", "module.a"], ["a", "module.a"], {"a": "a", "module.a": "module.a"}),
    (["a", "module.a"], ["_orig_mod.a"], {}),  # two could be meant
)
def test_names_match_whoever_wrote_them(wanted, found, pairs):
    assert unwrap.match_names(wanted, found) == pairs
