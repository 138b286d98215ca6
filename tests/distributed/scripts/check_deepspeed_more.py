"""DeepSpeed beyond its stages: offload, float16, mixtures of experts, compilation, reports on engines, a rank that does not come."""

import itertools
import os

import torch
from check_deepspeed import engines, loader, made, near, plain, prepared, train
from expect import raised
from harness import rank, shared_folder
from models import WIDTH, network
from safetensors.torch import load_file
from torch import nn

from accelerate.checkpoint.ranks import CollectiveMisuse
from accelerate.utils import TorchDynamoPlugin

USUAL = ("check_",)


class Experts(nn.Module):
    """One expert for each row, so that ranks run experts in a different order and number."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(-1)
            x = x.index_add(0, rows, self.experts[number](x[rows]) * weights[rows, None])
        return x


def sparse():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), Experts(), nn.Linear(WIDTH, 1))


def check_any_optimizer_trains_offloaded_states():
    """Adagrad's schedule counts: ZeRO replaces that optimizer by another one."""
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
        losses, _, weights = plain(kind)
        for stage, options in ((1, {}), (2, {}), (3, {}), (3, {"offload_param_device": "cpu"})):
            accelerator = engines(stage, offload_optimizer_device="cpu", **options)
            model, optimizer, scheduler = prepared(accelerator, kind)
            assert type(model.basic_optimizer) is type(optimizer.optimizer.optimizer) is kind
            near(train(accelerator, model, optimizer, scheduler)[0], losses)
            state = accelerator.get_state_dict(model) or {}
            for name in state:
                near(state[name].tolist(), weights[name].tolist())


def check_what_offload_cannot_do_is_refused_on_every_rank():
    disk = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "."}
    key = "zero_optimization.offload_optimizer"
    cases = [(2, disk, ValueError, f"{key}.device is 'nvme' at ZeRO stage 2")]
    cases += [(3, {"offload_param_device": "nvme"}, ValueError, "zero_optimization.offload_param.nvme_path")]
    import deepspeed

    if not deepspeed.ops.__compatible_ops__["async_io"]:
        cases += [(3, disk, RuntimeError, f"{key}.device is 'nvme', for which DeepSpeed builds async_io")]
    for stage, options, kind, words in cases:
        with raised(kind, words):
            prepared(engines(stage, **options))
    accelerator = engines(2)
    with raised(ValueError, "holds no parameter of Sequential"):
        accelerator.prepare(network(), made(network())[0], loader())
    # Where one rank cannot build it, none continues without.
    before = os.environ["PATH"]
    accelerator = engines(2, offload_optimizer_device="cpu")
    accelerator.deepspeed_plugin.deepspeed_config["zero_force_ds_cpu_optimizer"] = True
    for kind, error, words in (
        (torch.optim.SGD, ValueError, "DeepSpeed has no SGD"),
        (torch.optim.AdamW, RuntimeError, "ninja and a C++ compiler"),
    ):
        os.environ["PATH"] = "/nowhere"
        with raised(error, "zero_force_ds_cpu_optimizer", words):
            prepared(accelerator, kind)
        os.environ["PATH"] = before


def check_fp16_scales_losses_or_is_refused():
    """DeepSpeed asks the processor; torch computes in float16 on any."""
    from deepspeed import get_accelerator

    device, losses = get_accelerator(), plain()[0]
    device.is_fp16_supported = lambda: False
    with raised(ValueError, "mixed_precision='fp16'", "Take 'bf16'"):
        prepared(engines(2, "fp16"))
    device.is_fp16_supported = lambda: True
    for stage in (0, 1, 2, 3):
        accelerator = engines(stage, "fp16")
        accelerator.deepspeed_plugin.deepspeed_config["fp16"]["initial_scale_power"] = 8
        near(train(accelerator, *prepared(accelerator))[0], losses, 5e-3)
    accelerator = engines(2, "fp16")
    accelerator.deepspeed_plugin.deepspeed_config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}
    model, optimizer, scheduler = prepared(accelerator)
    skipped = []
    for number in range(8):
        before = scheduler.get_last_lr()
        train(accelerator, model, optimizer, scheduler, updates=range(number, number + 1))
        skipped.append(optimizer.step_was_skipped)
        assert (scheduler.get_last_lr() == before) is skipped[-1]
    assert skipped[0] and not skipped[-1] and sum(skipped) == model.skipped_steps, skipped
    accelerator.free_memory()
    del device.is_fp16_supported


def check_experts_that_not_every_rank_runs():
    losses = plain(build=sparse)[0]
    for device in ("none", "cpu"):
        accelerator = engines(3, transformer_moe_cls_names="Experts", offload_param_device=device)
        near(train(accelerator, *prepared(accelerator, build=sparse))[0], losses)
    with raised(ValueError, "holds Nothing", "the model has"):
        prepared(engines(3, transformer_moe_cls_names="Nothing"))


def check_compiled_engines_train_and_keep_their_names():
    losses, _, weights = plain()
    for stage, regional in ((0, False), (2, True), (3, False), (3, True)):
        dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        accelerator = engines(stage, dynamo=dynamo)
        model, optimizer, scheduler = prepared(accelerator)
        near(train(accelerator, model, optimizer, scheduler)[0], losses)
        assert model.module._compiled_call_impl is not None
        state = accelerator.get_state_dict(model) or {}
        assert stage == 3 and rank() or state.keys() == weights.keys()
        with shared_folder() as folder:
            accelerator.save_state(f"{folder}/saved")
            accelerator.load_state(f"{folder}/saved")
            accelerator.save_model(model, folder)
            assert rank() or load_file(f"{folder}/model.safetensors").keys() == weights.keys()
        torch._dynamo.reset()


def check_reports_tell_what_an_engine_has():
    # 129 numbers: on two ranks 65 (ZeRO 3) or 66 (1 and 2, filled up) each.
    count, width = sum(parameter.numel() for parameter in network().parameters()), 4
    for stage, precision in itertools.product((0, 1, 2, 3), ("no", "bf16")):
        accelerator = engines(stage, precision)
        model, optimizer, scheduler = prepared(accelerator)
        train(accelerator, model, optimizer, scheduler, updates=range(1))
        low = "bfloat16" if precision == "bf16" else "float32"
        size, part = 2 if precision == "bf16" else width, {0: count, 3: 65}.get(stage, 66)
        report = accelerator.precision_report(model)
        assert (report.strategy, report.warnings) == (f"zero{stage}", 0), report
        told = {row.copy: (row.before, row.after, row.count, row.nbytes, row.local) for row in report.rows}
        here = part if stage == 3 else count
        assert told["trainable parameters"] == ("float32", low, count, count * size, here * size), report
        assert told["updated by optimizers"] == ("-", "float32", count, count * width, part * width), report
        assert told["optimizer state"] == ("-", "float32", 2 * count, 2 * count * width, 2 * part * width), report
        assert (told["forward"][1], told["gradients exchanged"][1]) == (low, low), report
        held = accelerator.memory_report()
        assert "buffers of communication are in no column" in str(held)
        row = held.rows[rank()]
        steps = row.optimizer - 2 * part * width  # Adam's count, and what the states belong to
        copies = 0 if stage == 0 and precision == "no" else part * width
        assert copies <= steps <= copies + 4 * 4, held
        least = {0: count, 3: 65 + count}.get(stage, 132) * size
        assert least <= row.parameters <= least + 4 * size, held


def check_a_rank_that_does_not_come_to_save_is_named():
    accelerator = engines(3)
    objects = prepared(accelerator)
    train(accelerator, *objects, updates=range(1))
    if rank() == 0:
        with raised(CollectiveMisuse, "rank 1 will not call it"):
            accelerator.save_state("saved")
    train(accelerator, *objects, updates=range(1, 2))  # rank 1 waits here
