"""What libraries find on offloaded models and do to them; `big_libraries.py` runs these checks with its own.

PEFT, unsloth, compressed-tensors and diffusers read hooks and replace their parts. Each check makes sure of what they rely on,
and returns facts that are equal on both packages.
"""

import copy
import functools
import pickle
import sys
from pathlib import Path
from unittest import mock

import torch
from big_checks import digest

sys.path.append(str(Path(__file__).parents[2]))

from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from interop.tiny_models import MODELS
from offload_samples import Reference, same

MIXED = dict.fromkeys(["model.embed_tokens", "model.layers.1.self_attn", "model.layers.1.input_layernorm"], "cpu")
MIXED |= dict.fromkeys(["model.rotary_emb", "lm_head"], "cpu")
MIXED |= dict.fromkeys(["model.layers.0", "model.layers.1.mlp", "model.layers.1.post_attention_layernorm"], "disk")
MIXED["model.norm"] = "disk"
# Those whose weights come from memory and those read from safetensors; the peer can read no model to "disk" in full.
WAYS = {
    "cpu_offload": lambda reference: reference.offloaded("cpu_offload", {}),
    "disk_offload": lambda reference: reference.offloaded("disk_offload", {}),
    "blocks": lambda reference: reference.offloaded("blocks", {**MIXED, "lm_head": "memory"}),
    "memory": lambda reference: reference.offloaded("memory", MIXED),
    "shards": lambda reference: reference.offloaded("shards", MIXED),
}


def hooks_of(module):
    hook = module.__dict__.get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def offloading(model):
    named = ((name, module, hook) for name, module in model.named_modules() for hook in hooks_of(module))
    return {name: (module, hook) for name, module, hook in named if hook.offload}


def each_way(name):
    """Decorate a function of (reference, offloaded model, way) so that it runs for every way to offload a model."""

    def decorate(function):
        def check(folder):
            reference = Reference(MODELS[name], torch.float32, folder)
            return {way: function(reference, offload(reference), way) for way, offload in WAYS.items()}

        return check

    return decorate


@each_way("llama")
def anatomy(reference, model, way):
    """Hooks, forwards and weights maps have the shape that libraries take for granted."""
    facts = {}
    for name, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        assert (hook is None) == ("_old_forward" not in module.__dict__), name
        if hook is None:
            continue
        assert type(hook).__name__ in ("AlignDevicesHook", "SequentialHook"), name
        assert isinstance(module.forward, functools.partial) and module.forward.args[0] is module, name
        assert module._old_forward.__self__ is module, name
        for part in hooks_of(module):
            if part.offload:
                facts[name] = _of_weights(module, part)
    assert facts and (way != "shards" or "model.layers.0.mlp.gate_proj" in facts)
    reference.check(model)
    remove_hook_from_submodules(model)
    left = [n for n, m in model.named_modules() if {"_hf_hook", "_old_forward"} & m.__dict__.keys()]
    assert not left, left
    return dict(sorted(facts.items()))


def _of_weights(module, hook):
    weights = hook.weights_map
    assert isinstance(weights, PrefixedDataset)
    if isinstance(weights.dataset, OffloadedWeightsLoader):
        assert set(weights.dataset.index) <= set(weights.dataset) == set(weights.dataset.all_keys)
        assert {"state_dict", "save_folder", "index"} <= vars(weights.dataset).keys()
    everything = dict(weights.dataset)  # it is a mapping
    assert hook.tied_params_map is None or isinstance(hook.tied_params_map, dict)
    names = [name for name, tensor in module.named_parameters(recurse=False) if tensor.device.type == "meta"]
    assert all(same(weights[name], everything[weights.prefix + name]) for name in names)
    return {
        "prefix": weights.prefix, "weights": names, "of": digest([weights[name] for name in names]),
        "devices": {name: str(device) for name, device in hook.original_devices.items() if name in names},
        "execution": str(hook.execution_device), "place_submodules": hook.place_submodules,
    }  # fmt: skip


@each_way("llama")
def copied(reference, model, way):
    """A copy works independently: its forwards are of the copy, and taking its hooks off leaves the original alone."""
    reference.check(model)
    twin = copy.deepcopy(model)
    reference.check(twin)
    for name, module in twin.named_modules():
        if "_hf_hook" in module.__dict__:
            assert module.forward.args[0] is module and module._old_forward.__self__ is module, name
            assert module._hf_hook is not model.get_submodule(name)._hf_hook, name
    facts = _deals(model)
    remove_hook_from_submodules(twin)
    assert not offloading(twin)
    assert facts == _deals(model)
    reference.check(model)
    if way != "shards":
        reference.compare(reference.run(twin), "the copy without hooks")
    reference.check(copy.deepcopy(model))  # once more, after a forward
    return facts


def _deals(model):
    return {"offloading": len(offloading(model)), "meta": sum(p.is_meta for p in model.parameters())}


@each_way("llama")
def pickled(reference, model, way):
    """A hooked model travels through pickle, before its first forward and after it. (The peer's cannot.)"""
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(model))
        reference.check(twin)
        assert all(m.forward.args[0] is m for m in twin.modules() if "_hf_hook" in m.__dict__)
        reference.check(model)


@each_way("llama")
def rebound(reference, model, way):
    """A replaced `_old_forward` runs; a hook that is replaced or added later runs too; unsloth and others do both."""
    calls = []
    layer = model.model.layers[0].mlp.down_proj
    original = layer._old_forward if "_old_forward" in layer.__dict__ else None
    if original is not None:

        def spied(*args, **kwargs):
            calls.append(layer.weight.device.type)
            return original(*args, **kwargs)

        layer._old_forward = spied
        reference.compare(reference.run(model), "spied")
        assert calls and set(calls) == {"cpu"}
        layer._old_forward = original

    class Seen(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append("seen")
            return args, kwargs

    add_hook_to_module(layer, Seen(), append=True)
    reference.compare(reference.run(model), "seen")
    assert calls[-1] == "seen"
    counts = {"pre_forward": 0, "post_forward": 0}

    def counting(name, method):
        def counted(self, *args, **kwargs):
            counts[name] += 1
            return method(self, *args, **kwargs)

        return counted

    patches = [mock.patch.object(AlignDevicesHook, n, counting(n, getattr(AlignDevicesHook, n))) for n in counts]
    with patches[0], patches[1]:
        reference.compare(reference.run(model), "methods of the class replaced")
    hook = next(iter(offloading(model).values()))[1]
    hook.pre_forward = functools.partial(counting("pre_forward", AlignDevicesHook.pre_forward), hook)
    hook.post_forward = functools.partial(counting("post_forward", AlignDevicesHook.post_forward), hook)
    reference.compare(reference.run(model), "methods of one hook replaced")
    return {"calls": len(calls), **counts}


CHECKS = {"hooks-anatomy": anatomy, "hooks-copied": copied, "hooks-pickled": pickled, "hooks-rebound": rebound}
