"""What goes wrong with shards in silence: other weights on other ranks, optimizers left behind, gradients that are not exchanged."""

import itertools
import os
import shutil
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expect import assert_same_everywhere, differs_between_ranks, logged, raised
from harness import Kept, everywhere, fresh_accelerator, learn, rank, shared_folder, world
from torch import nn
from torch.distributed.fsdp import _flat_param
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from accelerate.checkpoint import dcp as our_dcp
from accelerate.checkpoint.manifest import NAME, DamagedCheckpoint
from accelerate.extensions.checks.replicas import ReplicasDiffer
from accelerate.extensions.reports import out_of_memory
from accelerate.precision import master
from accelerate.strategies import shard
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
    find_executable_batch_size,
    fsdp2_load_full_state_dict,
)
from leaks import left_behind

TWO_BY_TWO = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
CONSISTENCY = "accelerate.extensions.same_model.consistency"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(8, 1)
        self.register_buffer("scale", torch.rand(1) + 1)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def sharding(version, **options):
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
        **options,
    )


def build(seed=0):
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(seed=0, samples=4):
    whole = torch.randn(samples * world(), 4, generator=torch.Generator().manual_seed(seed))
    return whole, whole[samples * rank() : samples * (rank() + 1)]


def train(accelerator, model, optimizer, dtype=torch.float32):
    for number in range(2):
        learn(accelerator, model(batch(number)[1].to(dtype)).square().mean(), optimizer)


def weights(accelerator, model):
    """The full weights on rank 0, copied, nothing elsewhere."""
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def assert_close(found, expected):
    for name, value in found.items():
        assert torch.allclose(value, expected[name], atol=1e-6), (name, value, expected[name])


@contextmanager
def told(fragment, times=1):
    """Require that rank 0, and no other, logs a warning about ranks that differ, so often."""
    with logged(CONSISTENCY) as lines:
        yield
    found = [line for line in lines if fragment in line]
    assert len(found) == (times if rank() == 0 else 0), lines


def other_seeds(*kinds):
    """Each rank's own draw would be a mixture, and replicas would never be equal."""
    for options in kinds:
        accelerator = fresh_accelerator(**options)
        model, optimizer = build(seed=rank())
        expected = everywhere(model.state_dict())[0]
        with told("those of rank 0 are used"):
            model, optimizer = accelerator.prepare(model, optimizer)
        assert_close(weights(accelerator, model), expected)
        assert_same_everywhere(model.buffers())
        if options["fsdp_plugin"].fsdp_version == 2:
            assert_same_everywhere([parameter.full_tensor() for parameter in model.parameters()], "shards")
        accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
        with told("", times=0):
            accelerator.prepare(*build())


def check_other_seeds_train_the_weights_of_rank_zero():
    whole = sharding(1, sharding_strategy="NO_SHARD")
    other_seeds({"fsdp_plugin": sharding(2)}, {"fsdp_plugin": sharding(1)}, {"fsdp_plugin": whole})


def four_replicas_of_other_seeds():
    other_seeds(*({"fsdp_plugin": sharding(version), "parallelism_config": TWO_BY_TWO} for version in (2, 1)))


def check_models_that_differ_are_refused_by_all_ranks():
    def frozen(model):
        model.first.weight.requires_grad_(False)

    def wider(model):
        model.last = nn.Linear(8, 2)

    def hollow(model):
        model.last.to("meta")

    for change, fragment in ((frozen, "frozen"), (wider, "(2, 8)"), (hollow, "meta device on rank 1")):
        for version in (1, 2):
            accelerator = fresh_accelerator(fsdp_plugin=sharding(version))
            model, _ = build()
            if rank() == 1:
                change(model)
            with raised(ValueError, fragment):
                accelerator.prepare(model)


def check_whole_and_sharded_gradients_are_weighed_together():
    plugin = GradientAccumulationPlugin(num_steps=2)
    options = {"fsdp_plugin": sharding(2, ignored_modules="last"), "gradient_accumulation_plugin": plugin}
    accelerator = fresh_accelerator(**options)
    model, optimizer = build()
    whole, mine = batch()
    expected = build()[0]
    expected(whole).mean().backward()
    model.last.requires_grad_(True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for half in mine.chunk(2):
        with accelerator.accumulate(model, num_items=len(half)):
            accelerator.backward(model(half).mean())
    found = model.first.weight.grad.full_tensor()
    assert torch.allclose(found, expected.first.weight.grad, atol=1e-6)


def check_items_leave_the_scale_of_the_loss():
    """Weights of thousands made scaled gradients overflow in most windows, where they are exchanged as they come."""
    scales = []
    for counts in ((None, None), (3000, 1000)):
        options = {"fsdp_plugin": sharding(2), "gradient_accumulation_steps": 2}
        accelerator = fresh_accelerator(mixed_precision="fp16", **options)
        model, optimizer = accelerator.prepare(*build())
        for step in range(6):
            for count in counts:
                items = count and count * (rank() + 1) + step
                with accelerator.accumulate(model, num_items=items):
                    learn(accelerator, model(batch(step)[1]).square().mean(), optimizer)
        scales.append(accelerator.scaler.get_scale())
    assert scales[0] <= 2 * scales[1], scales


def check_items_resume_bit_for_bit():
    """Weights by the window before, which a resumed run has not seen, rounded otherwise than in the run that went on."""
    for precision in ("no", "bf16"):
        finals = []
        with shared_folder() as folder:
            for resumed in (False, True):
                accelerator = fresh_accelerator(
                    mixed_precision=precision, fsdp_plugin=sharding(2), gradient_accumulation_steps=3
                )
                model, optimizer = accelerator.prepare(*build())
                if resumed:
                    accelerator.load_state(folder + "/c")
                for step in range(3 if resumed else 0, 9):
                    if step == 3 and not resumed:
                        accelerator.save_state(folder + "/c")
                    with accelerator.accumulate(model, num_items=37 + 1000 * (step % 3) + 11 * step * (rank() + 1)):
                        learn(accelerator, model(batch(step)[1]).square().mean(), optimizer)
                finals.append(weights(accelerator, model))
        assert all(torch.equal(one, finals[1][name]) for name, one in finals[0].items()), precision


def check_an_optimizer_made_before_follows_into_another_accelerator():
    """It had the old parameters, which get no gradients: its steps changed nothing."""
    for version in (1, 2):
        first = fresh_accelerator(fsdp_plugin=sharding(version))
        model, optimizer = build()
        model = first.prepare(model)
        second = Accelerator(cpu=True)
        model, optimizer = second.prepare(model, optimizer)
        before = weights(second, model)
        learn(second, model(batch()[1]).sum(), optimizer)
        after = weights(second, model)
        assert not any(torch.equal(value, before[name]) for name, value in after.items() if "." in name)


def check_no_sync_may_be_nested():
    for version in (1, 2):
        accelerator = fresh_accelerator(fsdp_plugin=sharding(version, use_orig_params=True if version == 1 else None))
        model, _ = build()
        whole, mine = batch()
        expected = build()[0]
        expected(whole).mean().mul(3).backward()
        model = accelerator.prepare(model)
        with accelerator.no_sync(model):
            with accelerator.no_sync(model):
                accelerator.backward(model(mine).mean())
            accelerator.backward(model(mine).mean())
            if version == 2:
                assert all(parameter.grad is None for parameter in model.parameters()), "exchanged too early"
        accelerator.backward(model(mine).mean())
        if version == 2:
            assert torch.allclose(model.first.weight.grad.full_tensor(), expected.first.weight.grad, atol=1e-5)


def check_a_full_state_dict_need_not_have_what_none_has():
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
    wanted = build(seed=3)[0].state_dict()
    model = accelerator.prepare(build()[0])
    model.table.fill_(5)
    fsdp2_load_full_state_dict(accelerator, model, wanted if rank() == 0 else {})
    assert_close(weights(accelerator, model), wanted)
    assert model.table.eq(5).all()
    with raised(RuntimeError, "scale is missing"):
        del wanted["scale"]
        fsdp2_load_full_state_dict(accelerator, model, wanted if rank() == 0 else {})


def check_nothing_is_left_behind():
    dispatches = DataLoaderConfiguration(dispatch_batches=True)
    shards = FullyShardedDataParallelPlugin(fsdp_version=2)
    for options in {"mixed_precision": "fp16", "dataloader_config": dispatches}, {"fsdp_plugin": shards}:
        with shared_folder() as folder:
            left_behind(
                fresh_accelerator(**options), folder
            )  # a device mesh has its ranks as long as the process lives
            assert everywhere(left_behind(fresh_accelerator(**options), folder)) == [[]] * world(), options


def check_what_this_rank_holds_is_said_when_memory_runs_out():
    error = torch.OutOfMemoryError("CUDA out of memory.")
    for options in {}, {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}:
        accelerator = fresh_accelerator(**options)
        model, optimizer = accelerator.prepare(*build())
        learn(accelerator, model(torch.ones(2, 4)).sum(), optimizer)
        text, (row, *_) = out_of_memory.explain(error), accelerator.memory_report().rows
        assert f"\n   {rank()}  " in text and master.size(row.parameters) in text


def check_regions_are_compiled_where_shards_find_their_state():
    for version in (1, 2):
        accelerator = fresh_accelerator(
            fsdp_plugin=sharding(version, use_orig_params=True if version == 1 else None),
            dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True),
            gradient_accumulation_steps=2,
        )
        reference, by_hand = build()
        model, optimizer = accelerator.prepare(*build())
        for step in range(4):
            whole, mine = batch(seed=step)
            with accelerator.accumulate(model):
                learn(accelerator, model(mine).pow(2).mean(), optimizer)
            (reference(whole).pow(2).mean() / 2).backward()
            if step % 2:
                by_hand.step()
                by_hand.zero_grad()
        assert_close(weights(accelerator, model), reference.state_dict())
        with shared_folder() as folder:
            accelerator.save_state(os.path.join(folder, "checkpoint"))
            accelerator.load_state(os.path.join(folder, "checkpoint"))


class Heads(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, size, bias=False) for size in sizes)

    def forward(self, inputs):
        return [head(inputs) for head in self.heads]


class HeadsAndExperts(Heads):
    """Heads, and experts of which each token has one, and the last one none."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.experts = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3))

    def forward(self, inputs):
        chosen, mixed = inputs[:, :2].argmax(1), inputs.new_zeros(len(inputs), 5)
        for number, expert in enumerate(self.experts):
            mixed = mixed.index_put((chosen == number,), expert(inputs[chosen == number]))
        return [*super().forward(inputs), mixed]


def check_muon_steps_shards_as_one_process_does():
    """Each matrix is orthogonalised on one rank, in bfloat16 as torch does it: a step has the length of the rate, and is rounded to some hundredths of it.

    So the gradients here have singular values of one size: small ones are rounded to others.
    """
    if not hasattr(torch.optim, "Muon"):  # torch 2.9 has it
        return

    def made():
        torch.manual_seed(0)
        # Rows that two ranks do not divide, two of one shape, and one row, of which a rank has none.
        model = HeadsAndExperts(9, 7, 9, 1)
        return model, torch.optim.Muon(model.parameters(), lr=0.02)

    def loss_of(model, inputs, number):
        wished = torch.randn(64, 9, generator=torch.Generator().manual_seed(number))
        return sum((out - 10 * wished[: len(inputs), : out.shape[1]]).square().mean() for out in model(inputs))

    def step(number):
        return learn(accelerator, loss_of(model, batch(number, 16)[1], number), optimizer)

    reference, by_hand = made()
    accelerator = fresh_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer = accelerator.prepare(*made())
    for number in range(4):
        parts = batch(number, 16)[0].chunk(world())
        (sum(loss_of(reference, part, number) for part in parts) / world()).backward()
        with FlopCounterMode(display=False) as alone:
            by_hand.step()
        by_hand.zero_grad()
        accelerator.backward(loss_of(model, batch(number, 16)[1], number))
        with FlopCounterMode(display=False) as shared:
            optimizer.step()
        optimizer.zero_grad()
        counts = everywhere(shared.get_total_flops())
        assert sum(counts) == alone.get_total_flops() and max(counts) < 0.7 * sum(counts), "ranks share the products"
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.full_tensor() - wanted).abs().max() < 4 * 0.02 * 0.05
    with shared_folder() as folder:
        accelerator.save_state(os.path.join(folder, "checkpoint"))
        expected = [step(number) for number in range(4, 6)]
        accelerator.load_state(os.path.join(folder, "checkpoint"))
        assert [step(number) for number in range(4, 6)] == expected


def check_whole_weights_are_freed_while_sharding():
    """Optimizers made before, and the names that they follow by, kept all of them until the end."""
    sizes = []

    def watched(original):
        def watching(*arguments, **options):
            sizes.append(old().numel() if old() is not None else 0)
            return original(*arguments, **options)

        return watching

    for version, owner, name in ((1, _flat_param.FlatParamHandle, "shard"), (2, shard, "distribute")):
        sizes.clear()
        original = getattr(owner, name)
        accelerator = fresh_accelerator(
            fsdp_plugin=sharding(version, cpu_ram_efficient_loading=True if version == 2 else None)
        )
        os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
        model, optimizer = build()
        old = weakref.ref(model.blocks[0][0].weight)
        expected = {key: value.clone() for key, value in model.state_dict().items()} if rank() == 0 else {}
        setattr(owner, name, watched(original))
        try:
            model, optimizer = accelerator.prepare(model, optimizer)
        finally:
            setattr(owner, name, original)
        assert sizes and not any(sizes), (version, sizes)
        assert_close(weights(accelerator, model), expected)


def check_weights_are_written_where_they_are():
    """Each node was to have a file, and the second node got an empty one."""
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
    model = accelerator.prepare(build()[0])
    with mock.patch.object(Accelerator, "is_local_main_process", True):
        accelerator.project_configuration.save_on_each_node = True
        with shared_folder() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.save_model(model, os.path.join(folder, str(rank())))
            assert os.path.exists(os.path.join(folder, str(rank()))) is (rank() == 0)
            assert any("first node only" in str(item.message) for item in caught) is (rank() == 1)


def check_what_ranks_have_whole_is_written_as_the_first_has_it():
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2, ignored_modules="none"))
    accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for buffer in model.buffers():  # each rank has statistics of its batches
        buffer.fill_(10 + rank())
    with shared_folder() as folder:
        accelerator.save_state(folder)
        for buffer in model.buffers():
            buffer.fill_(0)
        accelerator.load_state(folder)
    assert all((buffer == 10).all() for buffer in model.buffers()), [buffer.tolist() for buffer in model.buffers()]


def check_a_load_reads_over_what_is_there():
    """Once the checkpoint is verified and every rank takes its state; until then nothing changes, and no memory is taken twice."""

    for dtype in (torch.float32, torch.bfloat16):
        accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
        model = Model()
        model.blocks[1][0].weight = model.blocks[0][0].weight
        model.to(dtype)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        stubborn = Kept()
        accelerator.register_for_checkpointing(stubborn)

        def tensors(model=model, optimizer=optimizer):
            kept = [value for of_one in optimizer.optimizer.state.values() for value in of_one.values()]
            found = [value.detach() for value in (*model.parameters(), model.scale, *kept)]
            return [value.to_local() if isinstance(value, DTensor) else value for value in found]

        train(accelerator, model, optimizer, dtype)
        if dtype == torch.bfloat16:  # torch's optimizers give their states the dtype of the parameter again
            for of_one in optimizer.optimizer.state.values():
                of_one["exp_avg_sq"] = of_one["exp_avg_sq"].float()
        with shared_folder() as folder:
            accelerator.save_state(folder)
            saved = [tensor.to(dtype, copy=True) for tensor in tensors()]
            train(accelerator, model, optimizer, dtype)
            before, places = [tensor.clone() for tensor in tensors()], [tensor.data_ptr() for tensor in tensors()]
            stubborn.loading = ValueError("not this one") if rank() == 1 else None
            with raised((ValueError, RuntimeError), "not this one"):
                accelerator.load_state(folder)
            assert all(map(torch.equal, tensors(), before))
            stubborn.loading = None
            accelerator.load_state(folder)
            assert all(map(torch.equal, tensors(), saved)), dtype
            if dtype == torch.float32:
                after = {tensor.data_ptr() for tensor in tensors() if tensor.dim()}  # counts of steps are new
                assert after <= set(places), "a load took new memory for what was there"
            accelerator.wait_for_everyone()


class Publishing(Kept):
    """A registered object that lets something happen when it is given its state."""

    meanwhile = staticmethod(lambda: None)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.meanwhile()


def check_a_load_beside_saves_takes_one_of_them():
    """One rank sees another save take the place: all ranks start over. What is published after the reading does not count."""
    for kind in ({}, {"fsdp_plugin": sharding(2)}):
        accelerator = fresh_accelerator(**kind)
        model, optimizer = build()[0], None
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        counter = Publishing(number=0)
        accelerator.register_for_checkpointing(counter)
        with shared_folder() as folder:
            saved = []
            for number in range(3):
                train(accelerator, model, optimizer)
                counter.state = {"number": number}
                accelerator.save_state(f"{folder}/{number}")
                saved.append(weights(accelerator, model))
            place, others = f"{folder}/0", [f"{folder}/2", f"{folder}/1"]
            tried = []

            def publish(*_, place=place, others=others):
                if rank() == world() - 1 and others:
                    shutil.rmtree(place)
                    os.rename(others.pop(), place)

            def meanwhile(models, _, publish=publish, tried=tried):
                tried.append(1)
                if len(tried) == 1:
                    publish()

            counter.meanwhile = lambda ready=accelerator.wait_for_everyone, publish=publish: (ready(), publish())
            accelerator.register_load_state_pre_hook(meanwhile)
            train(accelerator, model, optimizer)
            accelerator.load_state(place)
            assert len(tried) == 2 and counter.state == {"number": 1}, (kind, tried, counter.state)
            assert_close(weights(accelerator, model), saved[1])
            assert {state["step"].item() for state in optimizer.optimizer.state.values()} == {4.0}, kind
            train(accelerator, model, optimizer)
            assert_close(weights(accelerator, model), saved[2])
            accelerator.wait_for_everyone()


def check_a_shard_that_one_rank_reads_may_be_damaged():
    """That rank alone hashes it: all refuse the checkpoint, or take the one before."""
    for version in (1, 2):
        with shared_folder() as folder:
            plugin = sharding(version, state_dict_type="SHARDED_STATE_DICT")
            project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
            accelerator = fresh_accelerator(fsdp_plugin=plugin, project_config=project)
            model = build()[0]
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            saved, places = [], []
            for _ in range(2):
                train(accelerator, model, optimizer)
                saved.append(weights(accelerator, model))
                places.append(accelerator.save_state())
            train(accelerator, model, optimizer)
            before = weights(accelerator, model)
            shard_of_one = Path(places[1], "optimizer_0", "__1_0.distcp")
            if rank() == 0:
                data = bytearray(shard_of_one.read_bytes())
                data[len(data) // 2] ^= 1
                shard_of_one.write_bytes(data)
            accelerator.wait_for_everyone()
            with raised(DamagedCheckpoint, "optimizer_0/__1_0.distcp has changed"):
                accelerator.load_state(places[1])
            assert_close(weights(accelerator, model), before)
            assert accelerator.load_state(latest=True) == places[0]
            assert_close(weights(accelerator, model), saved[0])
            assert accelerator.save_iteration == 2
            accelerator.wait_for_everyone()


def check_a_model_whose_state_is_a_copy_is_loaded():
    """Reading over such a state would change the copy alone, and the load would be lost without an error."""

    def copies(module, state, prefix, metadata):
        for name in list(state):
            state[name] = state[name].clone()

    accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
    model = accelerator.prepare(build()[0])
    model._register_state_dict_hook(copies)
    before = weights(accelerator, model)
    with shared_folder() as folder:
        accelerator.save_state(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    assert_close(weights(accelerator, model), before)


def check_a_size_that_is_none_is_refused_by_all_ranks():
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
    model = accelerator.prepare(build()[0])
    with shared_folder() as folder, raised(ValueError, "is not a size"):
        accelerator.save_model(model, folder, max_shard_size="many")


def check_a_step_is_skipped_by_all_ranks():
    """A gradient that overflowed in the shard of one rank alone; a fused optimizer looks at it on its device, and steps or not."""
    for version, fused, clip in itertools.product((1, 2), (False, True), (False, True)):
        accelerator = fresh_accelerator(fsdp_plugin=sharding(version), mixed_precision="fp16")
        model, _ = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.backward(model(batch()[1]).mean())
        if rank() == 1:
            for parameter in model.parameters():
                local = getattr(parameter.grad, "_local_tensor", parameter.grad)
                if local is not None and local.numel():
                    local.view(-1)[0] = float("inf")
                    break
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        before = weights(accelerator, model)
        optimizer.step()
        schedule.step()
        assert all(everywhere(accelerator.optimizer_step_was_skipped)), (version, fused, clip)
        assert_close(weights(accelerator, model), before)
        assert schedule.get_last_lr() == [0.1]
        assert len(set(everywhere(accelerator.scaler.get_scale()))) == 1


def four_layers_and_shards_of_other_seeds():
    """Each group of ranks with the same part of the layers takes the weights of its first."""
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2), parallelism_config=mesh)
    model, _ = build(seed=rank())
    model._tp_plan = {"first": "colwise", "blocks.*.0": "rowwise"}
    model = accelerator.prepare(model)
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    assert_same_everywhere(whole, "layers")
    assert not differs_between_ranks(model.scale)


def four_lists_of_different_lengths_are_gathered_once_per_replica():
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2), parallelism_config=mesh)
    model, _ = build()
    model._tp_plan = {"first": "colwise", "blocks.*.0": "rowwise"}
    accelerator.prepare(model)
    mine = ["a0", "a1", "a2"] if rank() < 2 else ["b0"]
    assert accelerator.gather_for_metrics(mine) == ["a0", "a1", "a2", "b0"]
    assert accelerator.gather_for_metrics({"texts": mine}) == {"texts": ["a0", "a1", "a2", "b0"]}


def four_replicas_of_shards_that_part():
    """A shard is compared with the same one of the other replica, and with no other."""
    for sizes, seen in ({"dp_replicate_size": 2, "dp_shard_size": 2}, True), ({"dp_shard_size": 4}, False):
        for rate, changed in (0.1, False), (0.1, True), (0.2, False):
            with mock.patch.dict(os.environ, ACCELERATE_CHECK_EVERY="1"):
                accelerator = fresh_accelerator(fsdp_plugin=sharding(2), parallelism_config=ParallelismConfig(**sizes))
            model, optimizer = accelerator.prepare(*build())
            if rank() == 3:
                optimizer.param_groups[0]["lr"] = rate
                with torch.no_grad():
                    model.first.weight.to_local().add_(int(changed))
            told = None
            try:
                learn(accelerator, model(torch.ones(2, 4)).sum(), optimizer)
            except ReplicasDiffer as error:
                told = str(error)
            assert len(set(everywhere(told))) == 1, told
            if changed and seen:
                assert "parameter 'first.weight': " in told and " on rank 1; " in told and " on rank 3" in told, told
                assert "rank 0" not in told.partition("'first.weight'")[2].partition("\n")[0], told
            else:
                assert ("learning rate of group 0: 0.2 on rank 3" in (told or "")) is (rate != 0.1), told


def four_meshes_after_out_of_memory():
    """Also where ranks share sequences, or have saved a checkpoint."""
    for sizes in ({"dp_replicate_size": 2}, {"cp_size": 2}):
        mesh = ParallelismConfig(dp_shard_size=2, **sizes)
        accelerator = fresh_accelerator(fsdp_plugin=sharding(2), parallelism_config=mesh)
        with shared_folder() as folder:

            @find_executable_batch_size(starting_batch_size=2, accelerator=accelerator, keep_global_batch=True)
            def search(size, accelerator=accelerator, folder=folder):
                model, optimizer = accelerator.prepare(*build())
                accelerator.save_state(f"{folder}/{size}")
                if size == 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                rows = torch.ones(size, 4, 4)
                with accelerator.maybe_context_parallel(buffers=[rows], buffer_seq_dims=[1]):
                    learn(accelerator, model(rows).square().mean(), optimizer)
                return size

            assert search() == 1


def contents(folder):
    """The bytes of a checkpoint's files but the manifest, which has the time, and torch's metadata, which has the plan's order."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name not in (NAME, ".metadata")
    }


def written_in_the_background(*kinds):
    """Under a training that continues: what is written is the state of the call, byte for byte that of a save that waits."""
    for kind in kinds:
        accelerator = fresh_accelerator(**kind)
        model, _ = build()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

        train(accelerator, model, optimizer)
        with shared_folder() as folder:
            groups = len(dist.distributed_c10d._world.pg_map)
            accelerator.save_state(f"{folder}/waits")
            assert len(dist.distributed_c10d._world.pg_map) == groups, kind  # it needs no other one
            accelerator.save_state(f"{folder}/goes_on", blocking=False)
            made = len(dist.distributed_c10d._world.pg_map)
            assert made - groups in (0, 1), kind  # it is kept for the next save, also of another Accelerator
            accelerator.save_state(f"{folder}/goes_on", blocking=False)
            assert len(dist.distributed_c10d._world.pg_map) == made, kind
            train(accelerator, model, optimizer)  # meanwhile: with collectives of its own
            accelerator.wait_for_checkpoint()
            accelerator.wait_for_everyone()
            assert contents(f"{folder}/goes_on") == contents(f"{folder}/waits"), kind
            after = weights(accelerator, model)
            accelerator.load_state(f"{folder}/goes_on")
            train(accelerator, model, optimizer)
            assert_close(weights(accelerator, model), after)
            accelerator.wait_for_everyone()


def check_shards_are_written_in_the_background():
    plugins = (sharding(2), sharding(1), sharding(2, state_dict_type="FULL_STATE_DICT"))
    written_in_the_background(*({"fsdp_plugin": plugin} for plugin in plugins))


def four_write_in_the_background():
    written_in_the_background({"fsdp_plugin": sharding(2), "parallelism_config": TWO_BY_TWO})


def check_a_rank_that_cannot_collect_its_state_stops_all():
    """The others do not wait for it where shards are written together; the next save works."""
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2))
    accelerator.prepare(*build())
    counter = Kept()
    counter.saving = OSError("the counter is broken") if rank() == 1 else None
    accelerator.register_for_checkpointing(counter)
    with shared_folder() as folder:
        for blocking in (True, False):
            with raised((OSError, RuntimeError), "the counter is broken"):
                accelerator.save_state(f"{folder}/{blocking}", blocking=blocking)
        accelerator.wait_for_everyone()
        assert os.listdir(folder) == []
        accelerator.wait_for_everyone()
        counter.saving = None
        accelerator.save_state(f"{folder}/whole")
        accelerator.load_state(f"{folder}/whole")


def four_replicas_share_the_writing():
    """Each rank writes a fourth of the bytes; plans are made again when a dtype or a shape changes, and only then."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = []

    def state(value, dtype=torch.float32, rows=64):
        whole = [torch.full((rows, 32), value + number, dtype=dtype) for number in range(6)]
        spread = {
            f"w{number}": distribute_tensor(one, mesh, [Replicate(), Shard(0)]) for number, one in enumerate(whole)
        }
        # Of what is complete on all ranks, as of running statistics, the first rank's counts.
        return {"model": {**spread, "mean": torch.full((2,), value + rank()), "epoch": int(value)}}

    original = dcp.DefaultSavePlanner.create_global_plan

    def create_global_plan(planner, plans):
        made.append(len(plans))
        return original(planner, plans)

    dcp.DefaultSavePlanner.create_global_plan = create_global_plan
    with shared_folder() as folder:
        for number, given in enumerate([{}, {}, {"dtype": torch.bfloat16}, {"rows": 68}, {"rows": 68}]):
            into = f"{folder}/{number}"
            entries = our_dcp.save(state(float(number), **given), into + "/pytorch_model_fsdp_0")
            written = everywhere(sum(entry.size for name, entry in entries.items() if name != ".metadata"))
            assert max(written[1:]) < 1.05 * min(written) and written[0] < 1.4 * min(written), written
            found = state(-9.0, **given)
            dcp.load(found, checkpoint_id=into + "/pytorch_model_fsdp_0")
            for name, value in state(float(number), **given)["model"].items():
                if name.startswith("w"):
                    assert found["model"][name].dtype == value.dtype
                    assert torch.equal(found["model"][name].to_local(), value.to_local()), (number, name)
            assert found["model"]["mean"].tolist() == [float(number)] * 2 and found["model"]["epoch"] == number
        assert made == ([4, 4, 4] if rank() == 0 else []), made
    dcp.DefaultSavePlanner.create_global_plan = original
