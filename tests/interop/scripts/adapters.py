"""LoRA under each strategy: it trains as on one process, and stock PEFT loads what `save_adapter` writes.

accelerate launch --cpu --num_processes N adapters.py FOLDER LAYOUT ...
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from arrived_models import source
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from pytest import raises
from safetensors.torch import load_file
from sharded_models import EXACT, adam, batches, close, llama, same
from tiny import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object, set_seed

# Layers whose columns tensor parallelism cuts, and those whose rows.
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]
MAX_NORM = 0.5


def fsdp(version, **more):
    return FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **more
    )


def by_hand(model):
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (PartialState().num_processes,), mesh_dim_names=("fsdp",)))


# How many different batches a step has; the options of an Accelerator; what transformers shards as it loads; what a program shards.
LAYOUTS = {
    "single": (1, dict, None, None),
    "ddp": (2, dict, None, None),
    "fsdp1": (2, lambda: {"fsdp_plugin": fsdp(1, use_orig_params=True)}, None, None),
    "fsdp2": (2, lambda: {"fsdp_plugin": fsdp(2)}, None, None),
    "hand": (2, dict, None, by_hand),
    "loaded-fsdp": (2, dict, {"fsdp_size": 2}, None),
    "loaded-tp": (1, dict, {"tp_size": 2}, None),
    "tp": (1, lambda: {"parallelism_config": ParallelismConfig(tp_size=2)}, None, None),
    "fsdp2-tp": (2, lambda: {"fsdp_plugin": fsdp(2), "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)}, None, None),
    "hsdp": (4, lambda: {"fsdp_plugin": fsdp(2), "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}, None, None),
}  # fmt: skip


def adapted(place, loaded=None, shard=None, add=None):
    """A model with random factors in each adapter, equal on all ranks; a second adapter next to the first, which does not train."""
    model = AutoModelForCausalLM.from_pretrained(
        place, **({"distributed_config": DistributedConfig(**loaded)} if loaded else {})
    )
    if shard:
        shard(model)
    set_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    return (add or get_peft_model)(*((model, config) if add is None else (config, model))).train()


def alone(model, replicas):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses, norms = adam(trained), [], []
    for ids in batches():
        found = [model(input_ids=part, labels=part, use_cache=False).loss / replicas for part in ids.chunk(replicas)]
        sum(found).backward()
        losses.append(sum(found).item())
        norms.append(nn.utils.clip_grad_norm_(trained, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(accelerator, model, optimizer, replicas):
    losses, norms = [], []
    mine = accelerator.process_index * replicas // accelerator.num_processes
    for ids in batches():
        part = ids.chunk(replicas)[mine]
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@contextmanager
def run_of(options):
    GradientState._reset_state()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, **options())
    yield accelerator
    accelerator.free_memory()


def trains_and_saves(folder, name):
    replicas, options, loaded, shard = LAYOUTS[name]
    place = source(folder, llama)
    with run_of(options) as accelerator:
        model = adapted(place, loaded, shard)
        optimizer = adam([parameter for parameter in model.parameters() if parameter.requires_grad])
        model, optimizer = accelerator.prepare(model, optimizer)
        state = accelerator.get_state_dict(model)
        split = sum(isinstance(p, DTensor) and any(q.is_shard() for q in p.placements) for p in model.parameters())
        assert split or name in ("single", "ddp", "fsdp1"), (name, "nothing is sharded")
        # A model that is loaded in parts draws factors for them: one process begins with what they are together.
        plain = adapted(place)
        plain.load_state_dict(gather_object([{key: value.clone() for key, value in state.items()}])[0])
        losses, norms = alone(plain, replicas)
        found = train(accelerator, model, optimizer, replicas)
        close([*found[0], *found[1]], [*losses, *norms], name)
        to = f"{folder}/{name}"
        accelerator.save_adapter(model, to)
        assert sorted(path.name for path in Path(to).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place), to).train()
        trained = {key: value for key, value in plain.state_dict().items() if "lora_" in key}
        assert len(trained) == 4 * len(TARGETS), sorted(trained)
        same({key: value for key, value in read.state_dict().items() if "lora_" in key}, trained, EXACT, name)
        ids = batches()[0]
        close([read(input_ids=ids, labels=ids).loss.item()], [plain(input_ids=ids, labels=ids).loss.item()], name)
        refuses_zeros(accelerator, model, f"{to}-refused")


def refuses_zeros(accelerator, model, to):
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters() if parameter.requires_grad):
        return  # adapters that each rank has whole are not gathered
    gather, broken = DTensor.full_tensor, accelerator.is_last_process

    def zeros(tensor, **options):
        return gather(tensor, **options) * (not broken)

    with mock.patch.object(DTensor, "full_tensor", zeros), raises(RuntimeError, match="is zero where a shard is not"):
        accelerator.save_adapter(model, to)
    assert not Path(to).exists()


def keeps_the_former(accelerator, model, to):
    former = Path(to, "adapter_model.safetensors").read_bytes()

    def full(descriptor):
        raise OSError("no space left")

    for config, there in (("as it is", True), ("of another", False)):
        if accelerator.is_main_process and not there:
            Path(to, "adapter_config.json").write_text("{}")
        accelerator.wait_for_everyone()
        with mock.patch("os.fsync", full), raises((OSError, RuntimeError), match="no space left"):
            accelerator.save_adapter(model, to)
        assert Path(to, "adapter_model.safetensors").read_bytes() == former, config
        assert Path(to, "adapter_config.json").exists() == there, config
        accelerator.wait_for_everyone()
    accelerator.save_adapter(model, to)
    assert Path(to, "adapter_config.json").exists()


def saves_other_forms(folder):
    place, to = source(folder, llama), f"{folder}/forms"
    with run_of(LAYOUTS["fsdp2"][1]) as accelerator:
        model = adapted(place)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
        model = accelerator.prepare(model)
        accelerator.save_adapter(model, to)
        accelerator.save_adapter(model, to)
        names = ["adapter_config.json", "adapter_model.safetensors"]
        assert sorted(path.name for path in Path(to).iterdir()) == [*names, "other"]
        assert sorted(path.name for path in Path(to, "other").iterdir()) == names
        other = load_file(f"{to}/other/adapter_model.safetensors")
        assert (
            len(other) == 4 and all(value.any() for value in other.values()) and all(".lora_" in key for key in other)
        )
        keeps_the_former(accelerator, model, to)
        model = accelerator.prepare(adapted(place, add=inject_adapter_in_model))
        accelerator.save_adapter(model, f"{to}/injected")
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place), f"{to}/injected").state_dict()
        state = gather_object([accelerator.get_state_dict(model)])[0]
        same({key: read[f"base_model.model.{key}"] for key in state}, state, 0.0, "injected")
        with raises(ValueError, match="with the adapters .., and saves those that PEFT has put into layers"):
            accelerator.save_adapter(accelerator.prepare(llama()), to)
        accelerator.wait_for_everyone()


def main():
    folder, *names = sys.argv[1:]
    for name in names:
        saves_other_forms(folder) if name == "forms" else trains_and_saves(folder, name)
        if PartialState().is_main_process:
            print("ok", name, flush=True)
    report(passed=len(names))


if __name__ == "__main__":
    main()
