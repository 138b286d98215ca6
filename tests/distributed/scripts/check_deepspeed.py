"""DeepSpeed on this machine's processors: each ZeRO stage trains as plain torch does, saves, resumes, and says what it cannot do."""

import copy
import itertools

import torch
from expect import logged, raised
from harness import fresh_engine, rank, shared_folder, world
from models import WIDTH, inputs_of, mean_square, network
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, ParallelismConfig
from accelerate.utils import DummyOptim, DummyScheduler

USUAL = ("check_",)
UPDATES, STEPS = 10, 2
CONFIG = {
    "zero_optimization": {"stage": 1},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}

LENGTHS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")


def engines(stage=2, mixed_precision="no", config=None, dynamo=None, dataloader_config=None, **options):
    plugin = (
        DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config))
        if config
        else DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, zero3_save_16bit_model=True, **options)
    )
    return fresh_engine(
        deepspeed_plugin=plugin,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=STEPS,
        dynamo_plugin=dynamo,
        dataloader_config=dataloader_config,
    )


def loader(size=2):
    return DataLoader(TensorDataset(torch.zeros(8, WIDTH)), batch_size=size)


def made(model, kind=torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=5e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=40)


def train(accelerator, model, optimizer, scheduler, updates=range(UPDATES)):
    """Train on inputs that each rank has for itself; the mean losses, and the norm of the last gradients."""
    losses = []
    for number in updates:
        for step in range(STEPS):
            with accelerator.accumulate(model):
                loss = mean_square(model, inputs_of(rank(), seed=STEPS * number + step))
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    return losses, float(norm)


def plain(kind=torch.optim.AdamW, build=network):
    """The same in plain torch, with the inputs of all ranks."""
    model = build()
    optimizer, scheduler = made(model, kind)
    for parameter in model.parameters():  # what no row reaches has gradients of zero, as in ZeRO's buffers
        parameter.grad = torch.zeros_like(parameter)
    losses = []
    for number in range(UPDATES):
        for step in range(STEPS):
            each = [mean_square(model, inputs_of(other, seed=STEPS * number + step)) for other in range(world())]
            loss = torch.stack(each).mean()
            (loss / STEPS).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _ in range(world()):
            scheduler.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses, float(norm), model.state_dict()


def prepared(accelerator, kind=torch.optim.AdamW, build=network):
    model = build()
    return accelerator.prepare(model, *made(model, kind), loader())[:3]


def near(found, wanted, within=1e-5):
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=within, rtol=within), (found, wanted)


def check_bf16_is_near_and_states_are_whole():
    """In float32 every stage is compared with one process by `conformance`."""
    losses, _, weights = plain()
    for stage in (0, 1, 2, 3):
        accelerator = engines(stage, "bf16")
        assert accelerator.mixed_precision == "bf16" and accelerator.scaler is None
        model, optimizer, scheduler = prepared(accelerator)
        kinds = [type(item).__name__ for item in (model, optimizer, scheduler)]
        assert kinds == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "AcceleratedScheduler"]
        found, _ = train(accelerator, model, optimizer, scheduler)
        apart = max(abs(one - other) for one, other in zip(found, losses, strict=True))
        assert 0 < apart < 0.01, (stage, apart)  # 0.0012 is measured
        state = accelerator.get_state_dict(model)
        bare = accelerator.get_state_dict(model, unwrap=False)
        if stage == 3 and rank():
            assert state is bare is None
            state = {}
        else:
            assert set(state) == set(bare) == set(weights)
        whole = [value.untyped_storage().nbytes() == value.nbytes for value in state.values()]
        assert all(whole), "a view would save all of ZeRO's buffer"
        accelerator.free_memory()
        assert accelerator.deepspeed_engine_wrapped is None


def check_each_of_two_engines_learns_from_its_own_loss():
    accelerator = engines(2)
    teacher, first, slow = prepared(accelerator)
    wrapped = accelerator.deepspeed_engine_wrapped
    student, second, other = prepared(accelerator)
    assert accelerator.deepspeed_engine_wrapped is wrapped and wrapped.engine is teacher
    before = [accelerator.get_state_dict(model) for model in (teacher, student)]
    x = inputs_of(rank())
    for _ in range(STEPS):
        with accelerator.accumulate(teacher, student):
            accelerator.backward((student(x) - teacher(x).detach() - 1).pow(2).mean())
    after = [accelerator.get_state_dict(model) for model in (teacher, student)]
    changed = [any(not old[name].equal(new[name]) for name in old) for old, new in zip(before, after, strict=True)]
    assert changed == [False, True]
    with raised(ValueError, "2 of the prepared engines"):
        accelerator.backward((student(x) - teacher(x)).pow(2).mean())


def check_placeholders_stand_for_the_configuration():
    accelerator = engines(config=CONFIG)
    model = network()
    optimizer = DummyOptim(model.parameters(), lr=5e-3)
    model, optimizer, scheduler, _ = accelerator.prepare(model, optimizer, DummyScheduler(optimizer), loader())
    assert type(scheduler).__name__ == "DeepSpeedSchedulerWrapper"
    filled = accelerator.deepspeed_config
    assert filled is accelerator.deepspeed_plugin.deepspeed_config
    assert filled["optimizer"]["params"] == {"lr": 5e-3, "weight_decay": 0, "torch_adam": True}
    assert filled["scheduler"]["params"] == {"warmup_min_lr": 0, "warmup_max_lr": 5e-3, "warmup_num_steps": 1}
    assert (filled["train_batch_size"], filled["train_micro_batch_size_per_gpu"]) == (2 * STEPS * world(), 2)


def check_the_engine_that_trains_is_the_one_that_is_wrapped():
    for first in ("student", "teacher"):
        accelerator = engines(3)
        frozen = network().requires_grad_(False)
        if first == "teacher":
            accelerator.prepare(frozen, loader())
        student = prepared(accelerator)[0]
        if first == "student":
            accelerator.prepare(frozen)
        assert accelerator.deepspeed_engine_wrapped.engine is student


def check_a_schedule_of_the_configuration_ends_with_the_training():
    """Its length counts the batches of one process, its warm-up the engine's steps."""
    kind = {"type": "WarmupDecayLR", "params": dict.fromkeys(LENGTHS, "auto")}
    for split in (False, True):
        accelerator = engines(
            config={**CONFIG, "scheduler": kind}, dataloader_config=DataLoaderConfiguration(split_batches=split)
        )
        model, batches = network(), 41
        optimizer = DummyOptim(model.parameters(), lr=5e-3)
        schedule = DummyScheduler(optimizer, total_num_steps=batches, warmup_num_steps=2)
        model, optimizer, scheduler, _ = accelerator.prepare(model, optimizer, schedule, loader(4))
        total = batches if split else -(-batches // world())
        told = accelerator.deepspeed_config["scheduler"]["params"]
        assert (told["total_num_steps"], told["warmup_num_steps"]) == (total, 2), told
        train(accelerator, model, optimizer, scheduler, updates=range(total))
        # One step before nought, because DeepSpeed's first has rate 0.
        near(scheduler.get_last_lr(), [5e-3 / (total - 2)])


def check_a_scheduler_of_deepspeeds_steps_with_the_engine_and_is_saved():
    from deepspeed.runtime.lr_schedules import WarmupLR

    accelerator = engines(2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = WarmupLR(optimizer, 0, 5e-3, warmup_num_steps=10, warmup_type="linear")
    model, optimizer, scheduler, _ = accelerator.prepare(model, optimizer, schedule, loader())
    assert type(scheduler).__name__ == "DeepSpeedSchedulerWrapper" and scheduler.scheduler is schedule
    rates = []
    for number in range(3):
        train(accelerator, model, optimizer, scheduler, updates=range(number, number + 1))
        rates.append(optimizer.param_groups[0]["lr"])
    near(rates, [0, 5e-4, 1e-3])
    with shared_folder() as folder:
        accelerator.save_state(f"{folder}/saved")
        train(accelerator, model, optimizer, scheduler, updates=range(3, 6))
        accelerator.load_state(f"{folder}/saved")
        assert schedule.last_batch_iteration == 2
        train(accelerator, model, optimizer, scheduler, updates=range(3, 4))
        near(optimizer.param_groups[0]["lr"], 1.5e-3)


def check_no_limit_of_gradients_means_none():
    moved = {}
    for limit in (0, 1.0):
        plugin = DeepSpeedPlugin(zero_stage=1, gradient_clipping=limit)
        accelerator = fresh_engine(deepspeed_plugin=plugin)
        model = network()
        before = [weight.detach().clone() for weight in model.parameters()]
        model, *_ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader())
        accelerator.backward(1000 * mean_square(model, inputs_of(rank())))
        norm = accelerator.clip_grad_norm_(model.parameters(), limit)
        change = [weight - former for weight, former in zip(model.module.parameters(), before, strict=True)]
        moved[limit] = torch.cat([one.flatten() for one in change]).norm().item()
        near(moved[limit], 1e-3 * (norm if limit == 0 else limit), 1e-3)
    assert moved[0] > 10 * moved[1.0], moved


def check_sizes_of_batches_are_those_of_a_rank():
    for split, dispatch in itertools.product((False, True), repeat=2):
        config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
        accelerator = fresh_engine(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), dataloader_config=config)
        model = network()
        _, _, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader(4))
        size = next(iter(batches))[0].shape[0]
        told = accelerator.deepspeed_config
        assert (told["train_micro_batch_size_per_gpu"], told["train_batch_size"]) == (size, size * world()), told


def check_autocast_is_the_engines_own():
    accelerator = engines(2, "bf16")
    model = prepared(accelerator)[0]
    with accelerator.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
        assert model(torch.ones(1, WIDTH)).dtype == torch.bfloat16


def check_hooks_of_checkpoints_see_engines_and_load_none():
    """As scripts of diffusers have them: they save and load models themselves, and take them out of the lists."""
    for stage in (2, 3):
        accelerator = engines(stage)
        teacher = accelerator.prepare_model(network().requires_grad_(False), evaluation_mode=True)
        model, optimizer, scheduler = prepared(accelerator)
        seen = []

        def saves(models, weights, folder, seen=seen):
            seen.append([*models])
            weights.clear()

        def loads(models, folder, seen=seen):
            seen.append([*models])
            models.clear()

        accelerator.register_save_state_pre_hook(saves)
        accelerator.register_load_state_pre_hook(loads)
        train(accelerator, model, optimizer, scheduler, updates=range(2))
        with shared_folder() as folder:
            accelerator.save_state(f"{folder}/saved")
            wanted = train(accelerator, model, optimizer, scheduler, updates=range(2, 5))
            accelerator.load_state(f"{folder}/saved")
            assert model.global_steps == 2
            assert train(accelerator, model, optimizer, scheduler, updates=range(2, 5)) == wanted
        assert [[type(one).__name__ for one in models] for models in seen] == [
            ["Sequential", "DeepSpeedEngine"],
            ["Sequential"],
        ]
        assert seen[0][0] is seen[1][0] is teacher and seen[0][1] is model


def check_what_does_not_fit_is_refused_on_every_rank():
    without = {key: value for key, value in CONFIG.items() if key not in ("optimizer", "scheduler")}
    model = network()
    optimizer, scheduler = made(model)
    dummy = DummyOptim(model.parameters())
    for config, objects, kind, words in (
        (without, (model, optimizer), ValueError, "no data loader has a batch size"),
        (without, (model, loader()), ValueError, "a model without an optimizer"),
        (without, (optimizer, loader()), ValueError, "optimizer without its model"),
        (without, (model, network(), optimizer, loader()), AssertionError, "two new models"),
        (without, (model, dummy, loader()), ValueError, "has no `optimizer`"),
        (CONFIG, (model, optimizer, loader()), ValueError, "configuration has `optimizer`"),
        (
            {**CONFIG, "scheduler": without},
            (model, dummy, scheduler, loader()),
            ValueError,
            "configuration has `scheduler`",
        ),
        (
            {**without, "optimizer": CONFIG["optimizer"]},
            (model, dummy, scheduler, loader()),
            ValueError,
            "DummyScheduler",
        ),
        ({**without, "mystery": "auto"}, (model, optimizer, loader()), ValueError, "`mystery` is 'auto'"),
    ):
        accelerator = engines(config=config)
        with raised(kind, words):
            accelerator.prepare(*objects)
    with raised(ValueError, "device_placement"):
        accelerator.prepare(model, optimizer, loader(), device_placement=[True] * 3)
    with raised(ValueError, "got a model without an optimizer"):
        accelerator.prepare_model(model, evaluation_mode=True)
        accelerator.prepare(model)
    with raised(ValueError, "num_items"):
        accelerator.backward(torch.ones(1), num_items=1)
    with raised(NotImplementedError, "parallelism_config"):
        fresh_engine(
            deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), parallelism_config=ParallelismConfig(tp_size=world())
        ).prepare(network(), loader())
    with raised(NotImplementedError, "fp8"):
        engines(1, "fp8")
    with raised(NotImplementedError, "clip_grad_value_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    accelerator = engines(1)
    with raised(NotImplementedError, "deepspeed_plugins=", "zero_stage=3"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    assert Accelerator(deepspeed_plugin=accelerator.deepspeed_plugin).deepspeed_plugin.zero_stage == 1
    accelerator = engines(3)
    with logged("accelerate.extensions.deepspeed.engine") as lines:
        model = prepared(accelerator)[0]
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert len(lines) == 1 and "gradient_clipping=1.0" in lines[0]
    accelerator.free_memory()
    zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
    zero["stage3_gather_16bit_weights_on_model_save"] = False
    model = prepared(accelerator)[0]
    with raised(ValueError, "stage3_gather_16bit_weights_on_model_save"):
        accelerator.get_state_dict(model)
