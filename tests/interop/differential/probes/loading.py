"""Checkpoints loaded into models, and quantised models."""

import json
import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.utils import BnbQuantizationConfig, bnb, modeling, offload
from interop.differential.core import call, probe, short
from interop.differential.probes.modeling import MODELS, NOT_MODELS, Bare, Net, on_meta, said, two_ties
from interop.differential.probes.offload import entries, state


def checkpoint(kind):
    """Write a checkpoint of a `Net` whose weights are all 3, in one way or in a faulty one, and return its path."""
    torch.manual_seed(1)
    state = {name: torch.full_like(t, 3) for name, t in Net().state_dict().items()}
    parts = {"first.safetensors": dict(list(state.items())[:5]), "second.safetensors": dict(list(state.items())[5:])}
    folder = pathlib.Path("checkpoint")
    folder.mkdir()
    where = {name: file for file, part in parts.items() for name in part}
    if kind in ("file", "folder", "half", "extra", "lacks", "reshaped", "integers", "no metadata", "both"):
        changes = {
            "extra": {"more": torch.ones(1)}, "reshaped": {"shift": torch.ones(9)},
            "integers": {"shift": torch.ones(4, dtype=torch.int64)},
        }  # fmt: skip
        state = {**state, **changes.get(kind, {})}
        state = {n: t.half() for n, t in state.items()} if kind == "half" else state
        state.pop("shift") if kind == "lacks" else None
        save_file(state, folder / "model.safetensors", metadata=None if kind == "no metadata" else {"format": "pt"})
        if kind == "both":
            torch.save({n: t + 1 for n, t in state.items()}, folder / "pytorch_model.bin")
        return folder if kind in ("folder", "both") else str(folder / "model.safetensors")
    if kind in ("bin", "bin folder", "bin half"):
        torch.save(
            {n: t.half() for n, t in state.items()} if kind == "bin half" else state, folder / "pytorch_model.bin"
        )
        return str(folder / "pytorch_model.bin" if kind != "bin folder" else folder)
    if kind in ("shards", "index", "shard missing", "broken index"):
        for file, part in parts.items():
            save_file(part, folder / file, metadata={"format": "pt"})
        if kind == "shard missing":
            (folder / "second.safetensors").unlink()
        path = folder / "model.safetensors.index.json"
        path.write_text("{" if kind == "broken index" else json.dumps({"metadata": {}, "weight_map": where}))
        return str(folder if kind != "index" else path)
    if kind in ("empty folder", "nothing"):
        return str(folder / ("nothing" if kind == "nothing" else ""))
    path = folder / ("model.safetensors" if kind == "no safetensors" else "pytorch_model.bin")
    path.write_bytes(b"nothing")
    return str(path)


CHECKPOINTS = [
    "file", "folder", "half", "extra", "lacks", "reshaped", "integers", "bin", "bin folder", "bin half", "shards",
    "index", "no metadata", "both",
]  # fmt: skip
BROKEN = ["shard missing", "broken index", "empty folder", "nothing", "no safetensors", "no bin"]
LOAD_MAPS = {
    "none": None, "cpu": {"": "cpu"}, "disk": {"": "disk"}, "meta": {"": "meta"},
    "parts": {"shift": "cpu", "embed": "cpu", "blocks": "disk", "norm": "cpu", "head": "disk"},
    "too few": {"embed": "cpu"}, "too many": {"": "cpu", "nothing": "disk"}, "nested": {"": "cpu", "head": "disk"},
    "auto": "auto",
}  # fmt: skip


def loaded(model, kind, device_map, **given):
    found = said(
        lambda: modeling.load_checkpoint_in_model(model, checkpoint(kind), device_map=LOAD_MAPS[device_map], **given)
    )
    folder = pathlib.Path(given.get("offload_folder") or "none", "index.json")
    return found["value"], state(model), sorted(json.loads(folder.read_text())) if folder.exists() else None


short(
    "load_checkpoint_in_model", lambda meta,
    **given: loaded(on_meta() if meta else Net(), offload_folder="offload", **given),
    "utils.modeling:load_checkpoint_in_model", kind=CHECKPOINTS + BROKEN, device_map=["none", "disk", "parts"],
    meta=[False, True],
)  # fmt: skip
short(
    "loaded_with", lambda **given: loaded(Net(), offload_folder="offload", **given),
    "utils.modeling:load_checkpoint_in_model", quick=12, kind=["file", "half", "extra", "lacks", "bin"],
    device_map=["none", "parts"], dtype=[None, torch.float16, "bfloat16", "x"], strict=[False, True],
    keep_in_fp32_modules=[None, ["norm"], "norm"], offload_state_dict=[False, True], offload_8bit_bnb=[False, True],
)  # fmt: skip


@probe(
    "utils.modeling:load_state_dict",
    kind=["file", "half", "bin", "no metadata", "index", "folder", "nothing", "no safetensors", "no bin"],
    device_map=list(LOAD_MAPS),
)
def load_state_dict(kind, device_map):
    path = checkpoint(kind)
    return dict(sorted(modeling.load_state_dict(str(path), device_map=LOAD_MAPS[device_map]).items()))


@probe(
    "utils.modeling:load_offloaded_weights", model={"net": Net, "meta": on_meta, "linear": lambda: nn.Linear(2, 2)},
    index=["all", "one", "none", "empty", "unknown"], folder=["folder", "missing"],
)  # fmt: skip
def load_offloaded_weights(model, index, folder):
    offload.offload_state_dict("folder", {n: torch.full_like(t, 3) for n, t in Net().state_dict().items()})
    found = json.loads(pathlib.Path("folder/index.json").read_text())
    chosen = {
        "all": found,
        "one": {"shift": found["shift"]},
        "none": None,
        "empty": {},
        "unknown": {"nothing": found["shift"]},
    }[index]
    return modeling.load_offloaded_weights(model, chosen, folder), state(model)


def body():
    model = Bare(body=nn.Linear(2, 2), lm_head=nn.Linear(2, 2))
    model.base_model_prefix = "transformer"
    return model


QUANTIZED = {
    **MODELS, "body": body, "two ties": two_ties,
    "prefixed": lambda: Bare(transformer=nn.Linear(2, 2), head=nn.Linear(2, 2)),
}  # fmt: skip
CONFIGS = [
    {"load_in_8bit": True}, {"load_in_4bit": True}, {"load_in_8bit": True, "skip_modules": ["head"]},
    {"load_in_4bit": True, "torch_dtype": "bf16", "keep_in_fp32_modules": ["norm"]},
    {"load_in_4bit": True, "skip_modules": ["blocks"], "bnb_4bit_quant_type": "nf4"},
]  # fmt: skip


@probe(
    "utils.bnb:get_keys_to_not_convert", "utils.bnb:get_parameter_device", model={**QUANTIZED, **NOT_MODELS},
    function=["get_keys_to_not_convert", "get_parameter_device"],
)  # fmt: skip
def about_quantizing(model, function):
    found = getattr(bnb, function)(model)
    return sorted(set(found)) if isinstance(found, list) else found


call("utils.bnb:has_4bit_bnb_layers", model={**MODELS, **NOT_MODELS}, slow=True)


@probe(
    "utils.bnb:replace_with_bnb_layers", "utils.bnb:has_4bit_bnb_layers", model=QUANTIZED, config=CONFIGS,
    keep=[None, [], ["head"], ["0", "blocks.0"], ["first"]], slow=True,
)  # fmt: skip
def replace_with_bnb_layers(model, config, keep):
    found = bnb.replace_with_bnb_layers(model, BnbQuantizationConfig(**config), modules_to_not_convert=keep)
    return found is model, {name: type(m) for name, m in model.named_modules()}, bnb.has_4bit_bnb_layers(model)


@probe(
    "utils.bnb:get_quantized_model_device_map", config=CONFIGS,
    device_map=[
        {"": "cpu"}, {"": 0}, {"embed": 0, "blocks": 1, "head": "cpu"}, {"blocks": "disk"}, "cpu", "nothing", "",
    ], model={"net": Net, "meta": on_meta},
)  # fmt: skip
def get_quantized_model_device_map(config, **given):
    made = BnbQuantizationConfig(**config)
    made.skip_modules, made.keep_in_fp32_modules = made.skip_modules or [], made.keep_in_fp32_modules or []
    return bnb.get_quantized_model_device_map(bnb_quantization_config=made, **given)


@probe(
    "utils.bnb:load_and_quantize_model", config=[*CONFIGS, None], device_map=[None, {"": "cpu"}, "auto"],
    meta=[True, False], slow=True,
)  # fmt: skip
def load_and_quantize_model(config, device_map, meta):
    made = None if config is None else BnbQuantizationConfig(**config)
    model = bnb.load_and_quantize_model(on_meta() if meta else Net(), made, checkpoint("file"), device_map=device_map)
    return {name: type(m) for name, m in model.named_modules()}


@probe(
    "utils.bnb:quantize_and_offload_8bit", name=["weight", "bias", "nothing"], dtype=[None, torch.float16],
    statistics=[None, torch.ones(2)],
)  # fmt: skip
def quantize_and_offload_8bit(name, dtype, statistics):
    model, index = nn.Linear(2, 2), {}
    pathlib.Path("folder").mkdir()
    bnb.quantize_and_offload_8bit(
        model, torch.ones(2, 2) if name == "weight" else torch.ones(2), name, dtype, "folder", index, statistics
    )
    return entries(index), state(model), sorted(path.name for path in pathlib.Path("folder").iterdir())
