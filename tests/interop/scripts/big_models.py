"""Offloaded models of transformers and diffusers give the results of whole ones bit for bit: big_models.py FOLDER [CHECK ...]"""

import itertools
import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from big_checks import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2]))

from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_submodules
from interop.tiny_models import MODELS, image, pipeline
from offload_samples import EMPTY, MAPPED, PREFETCHES, WHOLE, Reference, cut, prefetching, same

EXAMPLES = int(os.environ.get("BIG_MODELS_EXAMPLES", "12"))
EVERY_SETTING = "BIG_MODELS_EXAMPLES" in os.environ
DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
# Blocks use weights of their parts without calling them; a whole block is then brought at once.
BLOCKS = ["LlamaDecoderLayer", "LlamaMLP", "MixtralDecoderLayer", "T5Block", "BertLayer", "ResnetBlock2D"]
BLOCKS += ["CrossAttnDownBlock2D"]


def offloads(reference: Reference, way: str, device_map: dict[str, str], prefetch: str | None, **options: Any) -> None:
    """Require one way to offload a model to change nothing."""
    what = (way, device_map, prefetch, options)
    with prefetching(prefetch):
        model = reference.offloaded(way, device_map, **options)
        reference.check(model, what)
        if way in WHOLE or device_map == {"": "disk"}:
            assert all(parameter.is_meta for parameter in model.parameters()), what
        if way not in EMPTY:  # a model that is read in had no weights to go back to
            reference.check_removal(model, what)


def in_one_place(name: str) -> Callable[[Path], None]:
    """Return the check that a model as a whole is on the CPU or the disk, in either precision."""

    def check(folder: Path) -> None:
        references = [Reference(MODELS[name], dtype, folder / str(dtype)) for dtype in DTYPES]
        ways = [(way, {"": place}, {}) for way, place in itertools.product(MAPPED, ("cpu", "disk"))]
        ways += [(way, {}, {"offload_buffers": buffers}) for way, buffers in itertools.product(WHOLE, (False, True))]
        for number, (way, device_map, options) in enumerate(ways):
            settings = list(itertools.product(references, PREFETCHES))
            # In turn; a count that shares no factor with theirs meets every pair.
            for reference, prefetch in settings if EVERY_SETTING else [settings[number * 3 % len(settings)]]:
                offloads(reference, way, device_map, prefetch, **options)

    return check


def cut_at_random(name: str) -> Callable[[Path], None]:
    """Return the check that a model is cut between the CPU and the disk wherever hypothesis likes."""

    def check(folder: Path) -> None:
        references = {dtype: Reference(MODELS[name], dtype, folder / str(dtype)) for dtype in DTYPES}

        @st.composite
        def maps(draw: Callable, model: torch.nn.Module, places: tuple[str, ...]) -> dict[str, str]:
            return cut(lambda words: draw(st.sampled_from(words)), model, places)

        @SETTINGS
        @given(data=st.data())
        def at(data: Any) -> None:
            reference = references[data.draw(st.sampled_from(DTYPES))]
            way = data.draw(st.sampled_from(MAPPED))
            places = ("memory", "cpu", "disk") if way == "blocks" else ("cpu", "disk")
            device_map = data.draw(maps(reference.make(), places))
            options = {
                "offload_buffers": data.draw(st.booleans()),
                "preload_module_classes": data.draw(st.sampled_from([None, BLOCKS])),
            }
            offloads(reference, way, device_map, data.draw(st.sampled_from(PREFETCHES)), **options)

        at()

    return check


def tied_apart(folder: Path) -> None:
    """The two ends of a tied weight are in different places, and a checkpoint has it under one name only."""
    parts = {
        "tied_llama": ("model", "lm_head"),
        "bert": ("bert", "cls"),
        "t5": ("shared", "encoder", "decoder", "lm_head"),
    }
    for name, modules in parts.items():
        reference = Reference(MODELS[name], torch.float32, folder / name)
        ends = (("disk", "cpu"), ("cpu", "disk"))
        for way, alone, (place, rest) in itertools.product(("memory", "file", "steps"), modules, ends):
            offloads(reference, way, {module: place if module == alone else rest for module in modules}, None)


def computed_maps(folder: Path) -> None:
    """Maps that accelerate computes for a small budget, in memory and from checkpoints."""
    prefetches = itertools.cycle(PREFETCHES)
    blocks = {"unet": ["ResnetBlock2D", "BasicTransformerBlock"]}
    for name, (strategy, part) in itertools.product(MODELS, (("auto", 0.3), ("balanced", 0.6), ("sequential", 0.8))):
        reference = Reference(MODELS[name], torch.float32, folder / f"{name}{part}")
        model = reference.make()
        options = {
            "no_split_module_classes": blocks.get(name) or model._no_split_modules,
            "max_memory": {"cpu": int(part * sum(parameter.nbytes for parameter in model.parameters()))},
        }
        with prefetching(next(prefetches)):
            loaded = reference.offloaded("shards", strategy, **options)
            places = set(loaded.hf_device_map.values())
            assert places in ({"cpu", "disk"}, {"disk"}), (name, loaded.hf_device_map)
            reference.check(loaded, (name, strategy, loaded.hf_device_map))
        offloads(reference, "memory", infer_auto_device_map(model, **options), next(prefetches))


def diffusion_pipeline(folder: Path) -> None:
    """The models of a pipeline, each offloaded in another way; two runs each, then without hooks."""
    words, numbers = ["a cat", "cat"], itertools.count()
    wanted = [image(pipeline(), word) for word in words]

    def mixed(model: torch.nn.Module, place: Path) -> torch.nn.Module:
        return dispatch_model(model, cut(random.Random(0).choice, model), offload_dir=place, force_hooks=True)

    ways = [
        lambda model, place: cpu_offload(model, execution_device="cpu", offload_buffers=True),
        lambda model, place: disk_offload(model, place, execution_device="cpu"),
        mixed,
    ]
    for prefetch, first in itertools.product(PREFETCHES, range(len(ways))):
        pipe = pipeline()
        models = [pipe.unet, pipe.vae, pipe.text_encoder]
        with prefetching(prefetch):
            for offload, model in zip(ways[first:] + ways[:first], models, strict=True):
                offload(model, folder / str(next(numbers)))
            for _ in range(2):
                assert all(same(image(pipe, word), want) for word, want in zip(words, wanted, strict=True)), first
            for model in models:
                remove_hook_from_submodules(model)
        assert all(same(image(pipe, word), want) for word, want in zip(words, wanted, strict=True)), first


CHECKS = {
    **{f"{name}-whole": in_one_place(name) for name in MODELS},
    **{f"{name}-cut": cut_at_random(name) for name in MODELS},
    "tied-apart": tied_apart,
    "computed-maps": computed_maps,
    "pipeline": diffusion_pipeline,
}
QUICK = ["llama-whole", "t5-cut", "unet-cut", "tied-apart", "pipeline"]

if __name__ == "__main__":
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # random cuts part tied weights, which it says
    run(CHECKS, QUICK)
