"""Modules that some ranks omit of a step: equal to one process with the batches of all ranks, whichever ranks call them."""

import torch
from expect import assert_all_close, full, raised
from harness import fresh_accelerator, rank, world
from torch import nn

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

STEPS = 8  # both ranks, the second, the first, none; twice


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, states):
        return states + self.dropout(torch.tanh(self.inner(states)))


class Reads(nn.Module):
    """Blocks of its own, a layer that belongs to the whole model, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks = nn.Linear(6, 8), nn.Sequential(Block(8), Block(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pictures):
        self.calls += 1
        return self.blocks(self.enter(pictures)) + 0 * torch.rand(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.pictures = nn.Linear(4, 8), Reads()
        self.blocks, self.last = nn.Sequential(Block(8), Block(8)), nn.Linear(8, 1)

    def forward(self, text, pictures=None):
        states = self.text(text)
        if pictures is not None and len(pictures):
            states = torch.cat([states, self.pictures(pictures)])
        states = self.blocks(states)
        return {"loss": self.last(states).sum() / 4, "states": [states]}


def batches(step: int, micro: int):
    draws = torch.Generator().manual_seed(10 * step + micro)
    for number in range(world()):
        text, pictures = torch.randn(3, 4, generator=draws), torch.randn(2, 6, generator=draws)
        calls = (step + micro >> number) % 2 == 0
        yield text, pictures if calls else pictures[:0] if number else None


def plugin(**options) -> FullyShardedDataParallelPlugin:
    names = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **names, **options)


def equals_one_process(micro_batches: int = 1, atol: float = 1e-5, **settings) -> None:
    accelerator = fresh_accelerator(gradient_accumulation_steps=micro_batches, **settings)
    torch.manual_seed(0)
    reference = Model()
    model = Model()
    model.load_state_dict(reference.state_dict())
    accelerator.conditional(model.pictures, given="pictures", inputs=torch.zeros(1, 6))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (reference, model)]
    model, optimizer = accelerator.prepare(model, optimizers[1])
    called = 0
    for step in range(STEPS):
        for micro in range(micro_batches):
            mine = list(batches(step, micro))
            with accelerator.accumulate(model):
                before = torch.get_rng_state()
                loss = model(*mine[rank()])["loss"]
                called += mine[rank()][1] is not None and len(mine[rank()][1]) > 0
                drew = not torch.equal(before, torch.get_rng_state())
                assert drew is (mine[rank()][1] is not None and len(mine[rank()][1]) > 0), "a call for others draws"
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            expected = sum(reference(*each)["loss"] for each in mine) / world()
            (expected / micro_batches).backward()
            found = accelerator.reduce(loss.detach().float(), "mean")
            torch.testing.assert_close(found, expected.detach(), rtol=atol, atol=atol)
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()
    found = accelerator.unwrap_model(model)
    assert full(found.pictures.calls).item() == called, "a call for others changes buffers"
    values = [full(value).float() for value in found.parameters()]
    assert_all_close(values, [value.detach() for value in reference.parameters()], rtol=atol, atol=atol)


def check_it_trains_as_one_process() -> None:
    recomputed = plugin(reshard_after_forward=False, activation_checkpointing=True)
    for options in (
        {"fsdp_plugin": plugin()},
        {"micro_batches": 2, "fsdp_plugin": recomputed},
        {"atol": 5e-2, "mixed_precision": "bf16", "fsdp_plugin": plugin()},
        {"micro_batches": 2},
    ):
        equals_one_process(**options)


def check_evaluation() -> None:
    accelerator = fresh_accelerator(fsdp_plugin=plugin())
    model = Model()
    accelerator.conditional(model.pictures, given="pictures", inputs=(torch.zeros(1, 6),))
    model = accelerator.prepare(model).eval()
    with torch.no_grad():
        for step in range(4):
            model(*list(batches(step, 0))[rank()])


def check_ranks_run_different_forwards_inside_whole_parameters() -> None:
    accelerator = fresh_accelerator(fsdp_plugin=plugin())
    model = Model()
    accelerator.conditional(model.pictures, given="pictures", inputs=torch.zeros(1, 6))
    model = accelerator.prepare(model)
    with torch.no_grad(), accelerator.whole_parameters(model) as whole:
        for step in range(3 * rank()):
            whole(*list(batches(step, 0))[rank()])
    model(*list(batches(1, 0))[rank()])["loss"].backward()  # only the first rank calls it


class Wrapped(Model):
    def forward(self, text, pictures=None):
        return type("Output", (), super().forward(text, pictures))


def check_outputs_in_which_no_tensor_is_found() -> None:
    accelerator = fresh_accelerator(fsdp_plugin=plugin())
    model = Wrapped()
    accelerator.conditional(model.pictures, given="pictures", inputs=torch.zeros(1, 6))
    model = accelerator.prepare(model)
    model(*list(batches(world() ** 2 - 1, 0))[rank()])  # no rank calls it: nothing to join
    with raised(TypeError, "Wrapped.forward returned a type in which no tensor with gradients is found"):
        model(*list(batches(1, 0))[rank()])


def check_what_cannot_be_declared() -> None:
    accelerator = fresh_accelerator(fsdp_plugin=plugin())
    model = Model()
    accelerator.conditional(model.pictures, given="picture", inputs=torch.zeros(1, 6))
    with raised(ValueError, "given='picture' is no argument of Model.forward", "pictures"):
        accelerator.prepare(model)
    accelerator.free_memory()
    model = accelerator.prepare(model)
    with raised(ValueError, "prepared already"):
        accelerator.conditional(model.pictures, given="pictures", inputs=torch.zeros(1, 6))
    with raised(ValueError, "without parameters"):
        accelerator.conditional(nn.Tanh(), given="pictures", inputs=torch.zeros(1, 6))
    old: Accelerator = fresh_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with raised(ValueError, "Use FSDP with fsdp_version=2, or DDP"):
        old.conditional(Model().pictures, given="pictures", inputs=torch.zeros(1, 6))


def four_replicas_and_shards() -> None:
    equals_one_process(
        fsdp_plugin=plugin(), parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    )
