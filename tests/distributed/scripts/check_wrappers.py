"""What `prepare` puts around a model (data parallelism, compilation, autocast) does what was requested."""

import contextlib

import torch
from expect import assert_all_close, assert_same_everywhere, differs_between_ranks, warned
from harness import fresh_accelerator, learn
from models import WIDTH, gradients, inputs_of, mean_square, network, own_inputs, prepared, whole_batch_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate import DistributedDataParallelKwargs


def check_communication_hooks_train():
    for hook, wrapper in (("no", "no"), ("fp16", "no"), ("power_sgd", "no"), ("batched_power_sgd", "fp16")):
        option = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1} if "power" in hook else {}
        handler = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper, comm_state_option=option)
        accelerator = fresh_accelerator(kwargs_handlers=[handler])
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Tanh(), nn.Linear(24, 24, bias=False))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        generator = torch.Generator().manual_seed(accelerator.process_index)
        x, y = torch.randn(2, 64, 24, generator=generator).to(accelerator.device)
        losses = []
        for _ in range(5):
            loss = (model(x) - y).pow(2).mean()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            found = gradients(model)
            assert_same_everywhere(found, (hook, wrapper))
            optimizer.step()
            optimizer.zero_grad()
        assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False)), (hook, losses)
        if accelerator.num_processes > 1:
            rounded = all(torch.equal(gradient, gradient.half().float()) for gradient in found)
            assert rounded is ("fp16" in (hook, wrapper)), (hook, wrapper)
            if wrapper == "no":
                assert (torch.linalg.matrix_rank(found[0]) == 1) == (hook == "power_sgd"), hook


class Forked(nn.Module):
    """A model of which each call uses one branch only, with a buffer."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x, branch):
        return self.branches[branch](x) + self.level


def check_wrapper_options_arrive():
    chosen = {"broadcast_buffers": False, "find_unused_parameters": True, "gradient_as_bucket_view": True}
    handler = DistributedDataParallelKwargs(bucket_cap_mb=7, **chosen)
    accelerator = fresh_accelerator(kwargs_handlers=[handler])
    model = Forked()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.num_processes > 1:
        assert isinstance(model, DistributedDataParallel) and model.bucket_bytes_cap == 7 << 20
        assert {name: getattr(model, name) for name in chosen} == chosen
        static = fresh_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
        assert static.prepare(network()).static_graph
    inner = accelerator.unwrap_model(model)
    inner.level.fill_(float(accelerator.process_index))
    for step in range(4):
        learn(accelerator, model(own_inputs(accelerator), step % 2).sum(), optimizer)
    assert inner.level.item() == accelerator.process_index, "broadcast_buffers=False leaves each rank its own"
    assert_same_everywhere(model.parameters())


def check_a_static_graph_accumulates():
    """Two models, the second of which trains from the second micro-batch on; `no_sync` by itself, too."""
    handler = DistributedDataParallelKwargs(static_graph=True)
    for uses_accumulate in (True, False):
        accelerator = fresh_accelerator(gradient_accumulation_steps=3, kwargs_handlers=[handler])
        models = [accelerator.prepare(network()) for _ in range(2)]
        expected = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
        for micro_batch in range(3):
            pieces = [inputs_of(rank, seed=micro_batch) for rank in range(accelerator.num_processes)]
            with contextlib.ExitStack() as held:
                if uses_accumulate:
                    held.enter_context(accelerator.accumulate(*models))
                elif micro_batch < 2:
                    for model in models:
                        held.enter_context(accelerator.no_sync(model))
                for model, sums in list(zip(models, expected, strict=True))[: micro_batch + 1]:
                    accelerator.backward(mean_square(model, own_inputs(accelerator, micro_batch)))
                    for total, gradient in zip(sums, whole_batch_gradients(accelerator, pieces), strict=True):
                        total += gradient / 3
        for model, sums in zip(models, expected, strict=True):
            assert_all_close(gradients(model), sums)


def check_hooks_that_get_local_gradients_warn():
    accelerator = fresh_accelerator()
    first, second = accelerator.prepare(network(), network())
    next(second.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    count = int(accelerator.num_processes > 1 and accelerator.is_main_process)
    with warned(count, "1 parameters of Sequential", "register_post_accumulate_grad_hook", "before DDP averages it"):
        for _ in range(2):
            accelerator.backward(mean_square(first, own_inputs(accelerator)))


def check_compiled_models_train_and_unwrap():
    accelerator = fresh_accelerator(dynamo_backend="eager")
    world = accelerator.num_processes
    model, optimizer = prepared(accelerator)
    pieces = [inputs_of(r) for r in range(world)]
    accelerator.backward(mean_square(model, own_inputs(accelerator)))
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, pieces))
    optimizer.step()
    assert_same_everywhere(model.parameters())
    assert isinstance(model._orig_mod, DistributedDataParallel) is (world > 1)
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert type(inner) is nn.Sequential and accelerator.unwrap_model(model)._orig_mod is inner
    assert list(accelerator.get_state_dict(model)) == list(network().state_dict())
    optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(mean_square(model, own_inputs(accelerator, 1)))
    assert differs_between_ranks(gradients(model)[0]) is (world > 1)
    with accelerator.no_sync(model):
        loss = mean_square(model, own_inputs(accelerator, 2))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    assert_same_everywhere(gradients(model))
    loader = accelerator.prepare(DataLoader(torch.ones(2 * world - 1, WIDTH), batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(mean_square(model, batch))
            optimizer.step()
    assert_same_everywhere(model.parameters())
