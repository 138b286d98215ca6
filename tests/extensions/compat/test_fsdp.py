"""Functions for sharded models, for other programs."""

import os

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import sharded_io
from accelerate import Accelerator
from accelerate.checkpoint import dcp, layouts
from accelerate.checkpoint.manifest import files_below
from accelerate.checkpoint.save import SavePlan
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils as utils
from sharded_io import same
from sharded_samples import net, sharding
from unit.checkpoint.tied_net import Net, job


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


def test_a_state_is_distributed_over_a_model_without_memory(process_group):
    accelerator = sharding(2)
    with torch.device("meta"):
        model = net(tied=False)
    fully_shard(model)
    wanted = net(seed=3, tied=False).state_dict()
    utils.fsdp2_load_full_state_dict(accelerator, model, wanted)
    assert all(torch.equal(accelerator.get_state_dict(model)[name], value) for name, value in wanted.items())


def test_a_file_of_each_rank_is_not_written(tmp_path):
    for kind, use_dcp in (("LOCAL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)):
        plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
        with pytest.warns(UserWarning, match="only as many ranks"):
            utils.save_fsdp_model(plugin, None, Net(), str(tmp_path / kind), use_dcp=use_dcp)
        assert os.listdir(tmp_path / kind) == ["pytorch_model_fsdp_0"]


@pytest.mark.parametrize("kind, shards", [("SHARDED_STATE_DICT", True), ("FULL_STATE_DICT", False)])
def test_a_plan_takes_the_state_and_nothing_is_written_yet(tmp_path, kind, shards):
    """So a thread can write the rest of a Trainer's checkpoint, and each rank its own shards."""
    plugin, (model, optimizer), plan = (
        FullyShardedDataParallelPlugin(state_dict_type=kind),
        job(),
        SavePlan(str(tmp_path)),
    )
    utils.save_fsdp_model(plugin, None, model, plan)
    utils.save_fsdp_optimizer(plugin, None, optimizer, model, plan)
    assert plan.has_shards is shards and len(plan.contents()) == 2 and not os.listdir(tmp_path)
    assert plan.write().keys() == files_below(tmp_path)


def test_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    config = peft.LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False)
    model, other = peft.get_peft_model(Net(), config), peft.get_peft_model(Net(), config)
    base = other.base_model.model.embedding.weight.clone()
    utils.save_fsdp_model(plugin, None, model, str(tmp_path), adapter_only=True)
    utils.load_fsdp_model(plugin, None, other, str(tmp_path), adapter_only=True)
    specs = layouts.model_values(dcp.ShardedFolder(tmp_path / "pytorch_model_fsdp_0"))
    assert all("lora" in name for name in specs) and len(specs) == 2
    mine, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if "lora" in name)
    assert torch.equal(other.base_model.model.embedding.weight, base)


def test_the_final_norm_is_a_child_of_the_base_model():
    model = torch.nn.Module()
    model.base_model_prefix = "model"
    model.model = torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.Linear(2, 2), torch.nn.RMSNorm(2))
    model.head = torch.nn.Linear(2, 2)
    assert utils._find_final_norm(model) is model.model[2]
    assert utils._find_final_norm(model.head) is None


def test_a_save_replaces_the_former_one_when_it_is_there(tmp_path, monkeypatch):
    first, second, found = Net(), Net(), Net()
    sharded_io.save_model(first, tmp_path)
    (tmp_path / "pytorch_model_fsdp_0" / "__7_0.distcp").touch()
    with monkeypatch.context() as patch:
        patch.setattr(torch_dcp, "save", lambda *_, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sharded_io.save_model(second, tmp_path)
    for model in (first, second):
        sharded_io.load_model(found, tmp_path)
        assert same(dict(found.state_dict()), dict(model.state_dict()))
        sharded_io.save_model(second, tmp_path)
    assert os.listdir(tmp_path) == ["pytorch_model_fsdp_0"]
    assert set(os.listdir(tmp_path / "pytorch_model_fsdp_0")) == {".metadata", "__0_0.distcp"}


def test_a_checkpoint_with_a_manifest_is_not_saved_into(tmp_path):
    Accelerator(cpu=True).save_state(str(tmp_path))
    before = os.listdir(tmp_path)
    model, optimizer = job()
    for layout in ("sharded", "full"):
        with pytest.raises(ValueError, match="Save to another folder"):
            sharded_io.save_model(model, tmp_path, layout=layout)
        with pytest.raises(ValueError, match="Save to another folder"):
            sharded_io.save_optimizer(optimizer, model, tmp_path, layout=layout)
    assert os.listdir(tmp_path) == before
