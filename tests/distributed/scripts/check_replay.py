"""Steps that are computed twice: a rank that computes something else the second time is named, and a clean run is as one without."""

import os
import warnings
from unittest import mock

import torch
from expect import differing
from harness import everywhere, fresh_accelerator, learn, rank, world
from torch import nn

from accelerate import DistributedDataParallelKwargs, ParallelismConfig
from accelerate.training.replay import ReplayDiffers
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TorchDynamoPlugin


class Flips(torch.autograd.Function):
    """The identity, which flips a bit in forward or backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_ = forward
        return flipped(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.forward_ else flipped(gradient), None


def flipped(x):
    x = x.clone()
    x.view(torch.int32).view(-1)[0] ^= 1 << 12
    return x


class Faulty(nn.Module):
    """Computes wrongly once, at a call of its forward."""

    def __init__(self, at, forward):
        super().__init__()
        self.at, self.forward_, self.calls = at, forward, 0

    def forward(self, x):
        self.calls += 1
        return Flips.apply(x, self.forward_) if self.calls == self.at else x


class Net(nn.Module):
    def __init__(self, at=0, forward=True):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.faulty, self.last = Faulty(at, forward), nn.Linear(16, 2)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return {"logits": self.last(self.faulty(x))}


def sharding(**options):
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"], **options
    )


KINDS = {
    "plain": dict,
    "unused": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
    "static": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True, gradient_as_bucket_view=True)]},
    "fsdp2": lambda: {"fsdp_plugin": sharding()},
    "fsdp2 in 16 bits": lambda: {
        "fsdp_plugin": sharding(module_precision={"norm": "fp32"}),
        "mixed_precision": "bf16",
    },
    "accumulating": lambda: {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
    "accumulating shards": lambda: {
        "fsdp_plugin": sharding(activation_checkpointing=True),
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2),
    },
    "compiled": lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager")},
}  # fmt: skip


def trained(kind, every, steps=3, at=0, forward=True, loss=None):
    """Train; return everything that a later step depends on, and the error."""
    with mock.patch.dict(os.environ, ACCELERATE_REPLAY_EVERY=str(every)):
        accelerator = fresh_accelerator(**KINDS[kind]())
    torch.manual_seed(0)
    model = Net(at if rank() == world() - 1 else 0, forward)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    torch.manual_seed(rank())
    error, losses, gradients = None, [], []
    try:
        for _ in range(steps * accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                x = torch.randn(8, 4, device=accelerator.device)
                value = (loss or plain_loss)(model, x)
                accelerator.backward(value)
                losses.append(value.item())
                local = [
                    p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    for p in model.parameters()
                    if p.grad is not None
                ]
                gradients.append([bits(gradient) for gradient in local])
                optimizer.step()
                optimizer.zero_grad()
    except ReplayDiffers as found:
        error = str(found)
    tensors = [*model.parameters(), *model.buffers()]
    state = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    rng = torch.get_rng_state()
    accelerator.free_memory()
    assert len(set(everywhere(error))) == 1
    return (losses, gradients, [bits(tensor) for tensor in state], rng), error


def bits(tensor):
    """A copy that tells zeros of both signs apart."""
    return tensor.detach().clone().view(-1).view(torch.uint8)


def plain_loss(model, x):
    return model(x)["logits"].float().square().mean()


def twice_loss(model, x):
    """Two forwards, of which the second takes what the first returned, as adversarial training does."""
    first = model(x)["logits"]
    return first.sum() + model(torch.cat([first, first], dim=1))["logits"].square().mean()


def check_a_clean_run_is_bit_for_bit_one_without(kinds=tuple(kind for kind in KINDS if kind != "compiled")):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ACCELERATE_REPLAY_EVERY")
        for kind in kinds:
            expected, error = trained(kind, 0)
            assert error is None
            for every in (1, 3) if kind == "plain" else (1,):
                found, error = trained(kind, every)
                assert error is None, (kind, every, error)
                assert not differing(found, expected), (kind, every, differing(found, expected))
        expected, error = trained("plain", 0, loss=twice_loss)
        found, error = trained("plain", 1, loss=twice_loss)
        assert error is None and not differing(found, expected), error


def slow_compiled():
    check_a_clean_run_is_bit_for_bit_one_without(["compiled"])


def check_the_rank_that_computes_wrongly_is_named():
    last = world() - 1
    for kind in ("plain", "accumulating shards"):
        for forward in (True, False):
            _, error = trained(kind, 1, steps=1, at=1, forward=forward)
            assert error is not None, (kind, forward)
            assert f"is not the same on rank {last}:\n  - rank {last}: " in error, error
            assert ("output 0" in error) is forward, error
            assert "gradient of 'first." in error or forward, error
            assert error.startswith("Step 1 of AdamW"), error
        # A step that is not computed twice is not looked at.
        _, error = trained(kind, 3, steps=1, at=1)
        assert error is None


def slow_what_cannot_be_computed_again_is_said():
    def penalised(model, x):
        x.requires_grad_(True)
        out = model(x)["logits"]
        return out.sum() + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, error = trained("plain", 1, steps=1, loss=penalised) if world() == 1 else (None, None)
        trained("plain", 1, steps=1, loss=lambda model, x: model(x)["logits"].detach().requires_grad_().sum())
    told = [str(item.message) for item in caught if "ACCELERATE_REPLAY_EVERY" in str(item.message)]
    assert error is None and any("no output of a prepared model" in line for line in told), told
    assert world() > 1 or any("create_graph=True" in line for line in told), told


def slow_a_step_of_several_optimizers():
    with mock.patch.dict(os.environ, ACCELERATE_REPLAY_EVERY="1", ACCELERATE_CHECK_EVERY="1"):
        accelerator = fresh_accelerator()
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    makes, judges, *optimizers = accelerator.prepare(*models, *optimizers)
    for _ in range(2):
        x = torch.ones(2, 4, device=accelerator.device)
        learn(accelerator, judges(makes(x).detach()).mean() + judges(x).mean(), optimizers[1])
        learn(accelerator, judges(makes(x)).mean(), optimizers[0])
        optimizers[1].zero_grad()
    assert accelerator._replay_check is not None


def slow_layers_that_are_split():
    """Ranks that share layers compute each step together twice, and may pass a wrong number on."""
    if world() == 1:
        return
    for at, words in ((0, None), (1, "is not the same on rank 0")):
        with mock.patch.dict(os.environ, ACCELERATE_REPLAY_EVERY="1"):
            accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=world()))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Faulty(at if rank() == 0 else 0, True), nn.Linear(8, 2))
        model._tp_plan = {"0": "colwise", "2": "rowwise"}
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        error = None
        try:
            for number in range(2):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
                learn(accelerator, model(x).square().mean(), optimizer)
        except ReplayDiffers as found:
            error = str(found)
        assert error is None if words is None else words in error, error
        accelerator.free_memory()
