"""DeepSpeed's compiled operators: offload to nvme, and its Adam for states in host memory."""

import glob
import os

import torch
from check_deepspeed import CONFIG, engines, loader, near, plain, prepared, train
from expect import raised
from harness import shared_folder
from models import WIDTH, network
from torch import nn

from accelerate.utils import DummyOptim, DummyScheduler


def wide():
    """A model with a weight whose half has more than the MiB from which DeepSpeed writes to a disk."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 2**17), nn.Tanh(), nn.AvgPool1d(2**13), nn.Linear(16, 1))


def on_disk(folder, device, kind=torch.optim.AdamW, forced=False):
    """An engine with its parameters on a disk, and its optimizer on a device."""
    paths = dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), folder)
    accelerator = engines(3, offload_optimizer_device=device, offload_param_device="nvme", **paths)
    config = accelerator.deepspeed_plugin.deepspeed_config
    config["zero_force_ds_cpu_optimizer"] = forced
    config["zero_optimization"]["offload_param"] |= {"buffer_size": 2**19, "max_in_cpu": 0}
    return accelerator, prepared(accelerator, kind, wide)


def files(folder):
    return [path for path in glob.glob(f"{folder}/**/*.swp", recursive=True) if os.path.getsize(path) >= 2**20]


def check_nvme_trains_the_optimizer_that_was_given():
    for kind, forced, name in (
        (torch.optim.AdamW, False, "AdamW"),
        (torch.optim.SGD, False, "SGD"),
        (torch.optim.AdamW, True, "DeepSpeedCPUAdam"),
    ):
        losses, _, weights = plain(kind, wide)
        with shared_folder() as folder:
            accelerator, objects = on_disk(folder, "nvme", kind, forced)
            assert type(objects[0].optimizer.optimizer).__name__ == name
            near(train(accelerator, *objects)[0], losses)
            assert files(f"{folder}/zero_stage_3/optimizer") and files(f"{folder}/zero_stage_3/float32params")
            for name, value in (accelerator.get_state_dict(objects[0]) or {}).items():
                near(value.tolist(), weights[name].tolist())
            with raised(RuntimeError, "zero_optimization.offload_optimizer.device is 'nvme'"):
                accelerator.save_state(f"{folder}/saved")
            assert not os.path.exists(f"{folder}/saved")
            accelerator.free_memory()


def check_parameters_on_nvme_go_on():
    with shared_folder() as folder:
        accelerator, objects = on_disk(folder, "cpu")
        train(accelerator, *objects, updates=range(3))
        assert files(f"{folder}/zero_stage_3/float32params")
        accelerator.save_state(f"{folder}/saved")
        wanted = train(accelerator, *objects, updates=range(3, 6))[0]
        accelerator.load_state(f"{folder}/saved")
        assert train(accelerator, *objects, updates=range(3, 6))[0] == wanted
        accelerator.free_memory()
        accelerator = engines(2)
        objects = prepared(accelerator, build=wide)
        accelerator.load_state(f"{folder}/saved")
        accelerator.save_state(f"{folder}/again")
        near(train(accelerator, *objects, updates=range(3, 6))[0], wanted, 1e-6)
        accelerator.free_memory()
        for saved in ("saved", "again"):
            accelerator, objects = on_disk(f"{folder}/{saved}_disk", "cpu")
            accelerator.load_state(f"{folder}/{saved}")
            near(train(accelerator, *objects, updates=range(3, 6))[0], wanted, 1e-6)
            accelerator.free_memory()
        accelerator, _ = on_disk(f"{folder}/disk", "nvme")
        with raised(RuntimeError, "zero_optimization.offload_optimizer.device is 'nvme'"):
            accelerator.load_state(f"{folder}/again")
        accelerator.free_memory()


def check_adam_in_host_memory():
    losses = plain()[0]
    accelerator = engines(2, offload_optimizer_device="cpu")
    accelerator.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = True
    forced = accelerator, prepared(accelerator)
    adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    config = {name: value for name, value in CONFIG.items() if name != "scheduler"} | {"optimizer": adam}
    config |= {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    accelerator, model = engines(config=config), network()
    optimizer = DummyOptim(model.parameters(), lr=5e-3, weight_decay=0.01)
    # The engine steps it once where the Accelerator's schedulers step once for each rank.
    scheduler = DummyScheduler(
        optimizer, lr_scheduler_callable=lambda own: torch.optim.lr_scheduler.LinearLR(own, 1.0, 0.5, total_iters=20)
    )
    described = accelerator, accelerator.prepare(model, optimizer, scheduler, loader())[:3]
    for own, objects in (forced, described):
        assert type(objects[0].optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
        near(train(own, *objects)[0], losses)
        own.free_memory()
