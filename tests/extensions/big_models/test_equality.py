"""An offloaded model gives the results of the whole one bit for bit, wherever its weights are cut."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offload_models import MODELS, References
from offload_samples import EMPTY, FORMS, MAPPED, PREFETCHES, WHOLE, cut, nested_cut, prefetching

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("models"))


def _check(reference, way, device_map, prefetch=None, **options):
    what = (way, device_map, prefetch, options)
    with prefetching(prefetch):
        model = reference.offloaded(way, device_map, **options)
        reference.check(model, what)
        if way in WHOLE or (device_map == {"": "disk"}):
            assert all(parameter.is_meta for parameter in model.parameters()), what
        if way not in EMPTY:  # a model that is read in had no weights to go back to
            reference.check_removal(model, what)


# Prefetching moves bytes of any type; which are drawn together is left to `test_cut_at_random`.
@pytest.mark.parametrize(
    ("dtype", "prefetch"), [*((DTYPES[0], prefetch) for prefetch in PREFETCHES), (DTYPES[1], PREFETCHES[-1])], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_whole_model_in_one_place(name, dtype, prefetch, references):
    reference = references(name, dtype)
    for way in MAPPED:
        for place in ("cpu", "disk"):
            _check(reference, way, {"": place}, prefetch)
    for way in WHOLE:
        for offload_buffers in (False, True):
            _check(reference, way, {}, prefetch, offload_buffers=offload_buffers)


_PHASES = {"suppress_health_check": list(HealthCheck), "phases": [Phase.generate, Phase.shrink]}
_QUICK = settings(deadline=None, derandomize=True, database=None, **_PHASES)


@pytest.mark.parametrize("count", [25, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_cut_at_random(references, name, count):
    @settings(_QUICK, max_examples=count)
    @given(data=st.data())
    def check(data):
        reference = references(name, data.draw(st.sampled_from(DTYPES)))
        way = data.draw(st.sampled_from(MAPPED))
        places = ("memory", "cpu", "disk") if way == "blocks" else ("cpu", "disk")
        device_map = cut(lambda words: data.draw(st.sampled_from(words)), reference.make(), places)
        prefetch = data.draw(st.sampled_from(PREFETCHES))
        options = {"offload_buffers": data.draw(st.booleans())}
        if way != "blocks":
            options["force_hooks"] = data.draw(st.booleans())
        if way in FORMS:
            options["offload_state_dict"] = data.draw(st.sampled_from([None, False, True]))
            options["strict"] = data.draw(st.booleans())
        preloaded = data.draw(st.sampled_from([None, ["Block"], ["Linear", "Sequential"]]))
        _check(reference, way, device_map, prefetch, preload_module_classes=preloaded, **options)

    check()


@pytest.mark.parametrize("name", MODELS)
@settings(_QUICK, max_examples=15)
@given(data=st.data())
def test_entries_below_others(references, data, name):
    reference = references(name)
    way = data.draw(st.sampled_from(["memory", *FORMS]))
    device_map = nested_cut(lambda words: data.draw(st.sampled_from(words)), reference.make())
    _check(reference, way, device_map, data.draw(st.sampled_from(PREFETCHES)))
