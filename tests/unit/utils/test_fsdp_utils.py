import functools
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard, wrap

import sharded_io
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.save import unlisted
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.extensions.convert import convert
from accelerate.utils import fsdp_utils as utils
from sharded_samples import net, sharding

CPU = torch.device("cpu")


class Layer(nn.Linear):
    """What the policies wrap."""


def plugin(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


def chosen(policy, model):
    return [name for name, module in model.named_modules() if policy(module)]


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        *[("[01]", {"0.weight", "0.bias", "1.weight", "1.bias"}), (r"2\..*", {"2.0.weight"})],
        *[("nothing", set()), (None, set()), ([], set())],
    ],
)
def test_parameters_of_named_modules(modules, names):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    found = utils.get_parameters_from_modules(modules, model, CPU)
    assert {name for name, parameter in model.named_parameters() if parameter in found} == names
    assert len(found) == len(names)
    found = utils.get_parameters_from_modules((model[0],), model, torch.device("meta"))
    assert found == set(model[0].parameters())
    assert model[0].weight.is_meta and not model[1].weight.is_meta
    assert utils.get_parameters_from_modules(model[1], model, CPU) == set(model[1].parameters())


def test_ties_survive_materialisation():
    def init(module):
        module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        model = net()
    retied = utils.ensure_weights_retied(init, model, CPU)
    for module in model.modules():
        retied(module)
    assert model.head.weight is model.emb.weight
    assert model.head.weight.device == CPU
    assert utils.ensure_weights_retied(init, nn.Linear(1, 1), CPU) is init


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, Layer),
        lambda module, recurse, nonwrapped_numel: isinstance(module, Layer) and nonwrapped_numel == 6 and not recurse,
        lambda **options: isinstance(options["module"], Layer),
        wrap.ModuleWrapPolicy([Layer]),
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Layer)),
    ],
)
def test_own_policies(policy):
    model = nn.Sequential(Layer(2, 2), nn.Linear(2, 2))
    assert chosen(utils.fsdp2_prepare_auto_wrap_policy(plugin(auto_wrap_policy=policy), model), model) == ["0"]


@pytest.mark.parametrize("key", [lambda parameter: parameter, lambda parameter: parameter.data_ptr()])
def test_switched_parameters(key):
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [old.weight]}, {"params": [old.bias]}])
    with pytest.raises(KeyError, match="Parameter 0 of the optimizer's group 1"):
        utils.fsdp2_switch_optimizer_parameters(optimizer, {key(old.weight): new.weight})
    assert optimizer.param_groups[0]["params"] == [old.weight], "nothing was changed"
    mapping = {key(a): b for a, b in zip(old.parameters(), new.parameters(), strict=True)}
    utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [group["params"] for group in optimizer.param_groups] == [[new.weight], [new.bias]]
    assert utils.get_fsdp2_grad_scaler(device="cpu", init_scale=4.0).get_scale() == 4.0


@pytest.fixture
def sharded(tmp_path):
    model = net()
    folder = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return model, folder


def test_merge_and_clean_up(sharded, tmp_path):
    model, folder = sharded
    utils.merge_fsdp_weights(str(folder), str(tmp_path / "merged"))
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    # What a model ties is saved from storage of its own in a sharded checkpoint.
    assert weights and all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    with pytest.raises(ValueError, match="Did you mean .*pytorch_model_fsdp_0"):
        utils.merge_fsdp_weights(folder.parent, tmp_path)
    for target in (folder, folder / "merged"):
        with pytest.raises(ValueError, match="lies in checkpoint_dir"):
            utils.merge_fsdp_weights(folder, target, remove_checkpoint_dir=True)
    assert (folder / ".metadata").exists()
    utils.merge_fsdp_weights(folder, tmp_path / "merged", safe_serialization=False, remove_checkpoint_dir=True)
    weights = torch.load(tmp_path / "merged" / "pytorch_model.bin", weights_only=True)
    assert set(weights) == set(model.state_dict())
    assert not folder.exists()


def test_merge_compares_with_the_manifest_and_deletes_nothing_that_is_damaged(tmp_path):
    folder = tmp_path / "checkpoint"
    sharded_io.save_model(net(), folder)
    Manifest(unlisted(str(folder), (), 0)).write(folder)
    file = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp has changed"):
        utils.merge_fsdp_weights(file.parent, tmp_path / "merged", remove_checkpoint_dir=True)
    assert file.exists() and not (tmp_path / "merged").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_merge_is_on_the_disk_before_anything_is_deleted(sharded, tmp_path, monkeypatch, safe):
    _, folder = sharded
    (tmp_path / "merged").mkdir()
    file = tmp_path / "merged" / ("model.safetensors" if safe else "pytorch_model.bin")
    file.write_text("older")
    monkeypatch.setattr(convert.durable, "of_file", lambda path: (0, ""))
    with pytest.raises(OSError, match="is not what was written"):
        utils.merge_fsdp_weights(folder, tmp_path / "merged", safe, remove_checkpoint_dir=True)
    monkeypatch.undo()
    assert (folder / ".metadata").exists()
    done = []
    for module, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree")):
        step = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, step=step, name=name: (done.append(name), step(*args))[1])
    utils.merge_fsdp_weights(folder, tmp_path / "merged", safe, remove_checkpoint_dir=True)
    assert done == ["fsync", "replace", "fsync", "rmtree"]
    assert os.listdir(tmp_path / "merged") == [file.name]


def test_a_state_is_distributed_over_a_model_without_memory(process_group):
    accelerator = sharding(2)
    with torch.device("meta"):
        model = net(tied=False)
    fully_shard(model)
    wanted = net(seed=3, tied=False).state_dict()
    utils.fsdp2_load_full_state_dict(accelerator, model, wanted)
    assert all(torch.equal(accelerator.get_state_dict(model)[name], value) for name, value in wanted.items())


def test_a_model_is_sharded_once(process_group):
    accelerator = sharding(2)
    model = torch.compile(net(), backend="eager")
    assert utils.fsdp2_prepare_model(accelerator, model) is model
    sharded = list(model.parameters())
    assert utils.fsdp2_prepare_model(accelerator, model) is model
    assert all(now is before for now, before in zip(model.parameters(), sharded, strict=True))


def test_the_final_norm_is_a_child_of_the_base_model():
    model = torch.nn.Module()
    model.base_model_prefix = "model"
    model.model = torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.Linear(2, 2), torch.nn.RMSNorm(2))
    model.head = torch.nn.Linear(2, 2)
    assert utils._find_final_norm(model) is model.model[2]
    assert utils._find_final_norm(model.head) is None


def test_a_sharded_checkpoint_is_merged_into_a_file(tmp_path):
    dcp.save({"model": {"a": torch.arange(3.0)}}, checkpoint_id=tmp_path / "shards")
    path = utils._distributed_checkpoint_to_merged_weights(str(tmp_path / "shards"), str(tmp_path / "out"))
    assert path == tmp_path / "out" / "model.safetensors"
    assert path.is_file()
