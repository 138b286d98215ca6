"""`Accelerator` in a training: backward passes, accumulation, clipping, communication."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
)
from interop.differential.core import Words, probe
from interop.differential.probes.accelerator import BOTH, COVERED, attempt, data, made, model, weights


@probe(
    COVERED,
    processes=BOTH,
    precision=["no", "bf16", "fp16"],
    accumulate=[1, 2, 4],
    clip=[None, "norm", "value"],
    optimizer=["AdamW"],
    count=[12, 9],
)
def training(precision: str, accumulate: int, clip: Any, optimizer: str, count: int) -> Iterator[tuple[str, Any]]:
    """Two epochs: weights, losses, rates, norms and what the accelerator says in each step."""
    accelerator = made(mixed_precision=precision, gradient_accumulation_steps=accumulate)
    net = model()
    steps = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(steps, total_iters=10)
    net, steps, loader, schedule = accelerator.prepare(net, steps, data(count), schedule)
    losses, seen = [], []
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(inputs), labels)
                accelerator.backward(loss)
                norm = None
                if clip == "norm" and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(net.parameters(), 0.5).item()
                if clip == "value" and accelerator.sync_gradients:
                    accelerator.clip_grad_value_(net.parameters(), 0.05)
                steps.step()
                schedule.step()
                steps.zero_grad()
            norm = None if norm is None else round(norm, 3)
            seen.append((accelerator.sync_gradients, accelerator.optimizer_step_was_skipped, norm))
            losses.append(round(loss.item(), 3))
    yield "losses", losses
    yield "weights", weights(net)
    yield "rate", (round(schedule.get_last_lr()[0], 6), schedule.scheduler.last_epoch)
    yield "steps", seen
    yield "dtype", (loss.dtype, next(net.parameters()).dtype, net(inputs).dtype)


@probe(
    COVERED,
    processes=BOTH,
    plugin=[(2, True, True), (2, False, False), (3, True, False), (4, False, True)],
    count=[5, 6, 8],
    loops=[1, 2],
)
def accumulation(plugin: tuple[int, bool, bool], count: int, loops: int) -> Any:
    """When gradients are synchronised, with and without the end of a loader."""
    steps, with_loader, each = plugin
    settings = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=with_loader, sync_each_batch=each)
    accelerator = made(gradient_accumulation_plugin=settings)
    net = model()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), data(2 * count, 2))
    seen = []
    for _ in range(loops):
        for inputs, labels in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
                seen.append((accelerator.sync_gradients, GradientState().end_of_dataloader, accelerator.step))
    return seen, weights(net)


@probe(COVERED, processes=BOTH, prepared=[True, False], how=["none", "one", "two", "nothing", "text"])
def accumulate_what(prepared: bool, how: str) -> Any:
    """What `accumulate` and `no_sync` may be given."""
    accelerator = made(gradient_accumulation_steps=2)
    nets = [model(1), model(2)]
    nets = [accelerator.prepare(net) for net in nets] if prepared else nets
    given = {"none": [], "one": nets[:1], "two": nets, "nothing": [None], "text": ["x"]}[how]
    seen = []
    for _ in range(3):
        with accelerator.accumulate(*given) as yielded:
            seen.append((accelerator.sync_gradients, yielded))
    with accelerator.no_sync(given[0] if given else None) as yielded:
        seen.append(yielded)
    return seen


@probe(COVERED, processes=BOTH)
def sync_in_backward() -> Iterator[tuple[str, Any]]:
    accelerator = made()
    net = accelerator.prepare(model())
    inputs = torch.full((2, 3), float(accelerator.process_index + 1))
    with accelerator.no_sync(net):
        accelerator.backward(net(inputs).sum())
    yield "local", [round(p.grad.sum().item(), 4) for p in net.parameters()]
    loss = net(inputs).sum()
    yield (
        "trigger",
        attempt(lambda: Accelerator.trigger_sync_in_backward(net).__enter__())
        if not accelerator.use_distributed
        else None,
    )
    with accelerator.trigger_sync_in_backward(net):
        accelerator.backward(loss)
    yield "together", [round(p.grad.sum().item(), 4) for p in net.parameters()]


@probe(
    COVERED,
    loss=["scalar", "vector", "no grad", "number", "none", "retained", "negative", "nan"],
    steps=[1, 2, 4],
    precision=["no", "fp16"],
)
def backward(loss: str, steps: int, precision: str) -> Iterator[tuple[str, Any]]:
    accelerator = made(gradient_accumulation_steps=steps, mixed_precision=precision)
    weight = torch.ones(3, requires_grad=True)
    values = {
        "scalar": (weight * 2).sum(),
        "vector": weight * 2,
        "no grad": torch.tensor(1.0),
        "number": 1.0,
        "none": None,
        "retained": (weight * 3).sum(),
        "negative": -(weight.sum()),
        "nan": weight.sum() * float("nan"),
    }
    more = {"retain_graph": True} if loss == "retained" else {}
    yield "returned", attempt(accelerator.backward, values[loss], **more)
    if loss == "retained":
        yield "again", attempt(accelerator.backward, values[loss])
    scale = (
        accelerator.scaler.get_scale() if accelerator.scaler is not None and accelerator.scaler.is_enabled() else 1.0
    )
    yield "gradient", None if weight.grad is None else weight.grad / scale


@probe(
    COVERED,
    norm_type=[1, 2, 3.0, "inf", float("inf"), 0],
    bound=[0.0, 0.1, 1, 100.0, -1.0],
    what=["parameters", "list", "one", "empty", "no gradients"],
)
def clip_norm(norm_type: Any, bound: float, what: str) -> Iterator[tuple[str, Any]]:
    accelerator = made()
    net = accelerator.prepare(model())
    if what != "no gradients":
        accelerator.backward(net(torch.ones(2, 3)).sum())
    given = {"list": list(net.parameters()), "one": next(net.parameters()), "empty": []}.get(what, net.parameters())
    yield "norm", attempt(lambda: accelerator.clip_grad_norm_(given, bound, norm_type=float(norm_type)))
    yield "gradients", [None if p.grad is None else round(p.grad.norm().item(), 4) for p in net.parameters()]


@probe(COVERED, bound=[0.0, 0.01, 1, -1.0, None, "1"], what=["parameters", "one", "empty"])
def clip_value(bound: Any, what: str) -> Iterator[tuple[str, Any]]:
    accelerator = made()
    net = accelerator.prepare(model())
    accelerator.backward(net(torch.ones(2, 3)).sum())
    given = {"one": next(net.parameters()), "empty": []}.get(what, net.parameters())
    yield "returned", attempt(accelerator.clip_grad_value_, given, bound)
    yield "gradients", [round(p.grad.abs().max().item(), 4) for p in net.parameters()]


VALUES = {
    "0d": lambda r: torch.tensor(float(r)),
    "1d": lambda r: torch.arange(3) + 10 * r,
    "2d": lambda r: torch.full((2, 3), float(r)),
    "half": lambda r: torch.full((2,), r + 0.5, dtype=torch.float16),
    "bfloat16": lambda r: torch.full((2,), r + 0.5, dtype=torch.bfloat16),
    "bool": lambda r: torch.tensor([True, bool(r)]),
    "int8": lambda r: torch.tensor([r, 1], dtype=torch.int8),
    "double": lambda r: torch.tensor([r / 3], dtype=torch.float64),
    "empty": lambda r: torch.zeros(0, 2),
    "list": lambda r: [torch.tensor([r]), torch.tensor([r + 1.0])],
    "tuple": lambda r: (torch.tensor([r]), torch.tensor([[r]])),
    "dict": lambda r: {"a": torch.tensor([r]), "b": {"c": torch.tensor([r * 2])}},
    "transposed": lambda r: (torch.arange(6.0).reshape(2, 3) + r).t(),
    "grad": lambda r: torch.full((2,), float(r), requires_grad=True),
    "number": lambda r: 3,
    "text": lambda r: "word",
    "none": lambda r: None,
    "mixed": lambda r: [torch.tensor([r]), 3],
}


@probe(COVERED, processes=BOTH, value=list(VALUES))
def gather(value: str) -> Any:
    accelerator = made()
    return accelerator.gather(VALUES[value](accelerator.process_index))


@probe(COVERED, processes=BOTH, value=list(VALUES), reduction=Words(["sum", "mean", "none"]), scale=[1.0, 0.5])
def reduce(value: str, reduction: str, scale: float) -> Any:
    accelerator = made()
    return accelerator.reduce(VALUES[value](accelerator.process_index), reduction=reduction, scale=scale)


@probe(
    COVERED,
    processes=BOTH,
    dim=[0, 1, -1, 5],
    pad=[0, -100],
    first=[False, True],
    value=["1d", "2d", "dict", "text", "bool"],
)
def pad(dim: int, pad: int, first: bool, value: str) -> Any:
    accelerator = made()
    rank = accelerator.process_index
    values = {
        "1d": torch.arange(2 + rank),
        "2d": torch.ones(1 + rank, 3 - rank),
        "dict": {"a": torch.ones(2, 1 + rank)},
        "text": "x",
        "bool": torch.ones(1 + rank, dtype=torch.bool),
    }
    return accelerator.pad_across_processes(values[value], dim=dim, pad_index=pad, pad_first=first)


@probe(
    COVERED,
    processes=BOTH,
    count=[1, 4, 5, 7, 8],
    batch=[2, 3],
    drop=[False, True],
    objects=[False, True, None],
    even=[True, False],
)
def gather_for_metrics(count: int, batch: int, drop: bool, objects: Any, even: bool) -> Any:
    """Each sample once, as tensors, objects or nested."""
    accelerator = made(dataloader_config=DataLoaderConfiguration(even_batches=even))
    loader = accelerator.prepare(DataLoader(range(count), batch, drop_last=drop))
    if not even and accelerator.num_processes > 1:
        return "ranks would wait"
    seen = []
    for values in loader:
        if objects:
            seen.append(accelerator.gather_for_metrics([f"n{v}" for v in values.tolist()], use_gather_object=True))
        elif objects is None:
            seen.append(
                {k: v.tolist() for k, v in accelerator.gather_for_metrics({"a": values, "b": values * 2}).items()}
            )
        else:
            seen.append(accelerator.gather_for_metrics(values).tolist())
    return seen


@probe(COVERED, processes=BOTH, given=[[1, 2], "ab", {"a": 1}, 3, None, [], ["a", {"b": 2}]])
def gather_objects(given: Any) -> Any:
    return made().gather_for_metrics(given, use_gather_object=True)


@probe(COVERED, processes=BOTH, setters=[[], [0], [1], [0, 1]], checks=[1, 2])
def triggers(setters: list[int], checks: int) -> Any:
    accelerator = made()
    if accelerator.process_index in setters:
        accelerator.set_trigger()
    return [accelerator.check_trigger() for _ in range(checks)]


@probe(COVERED, processes=BOTH)
def together() -> Iterator[tuple[str, Any]]:
    accelerator = made()
    yield "wait", accelerator.wait_for_everyone()
    for name in ("main_process_first", "local_main_process_first"):
        with getattr(accelerator, name)() as given:
            yield name, given
    yield "print", accelerator.print("a", 2, sep="")
    yield "even", (setattr(accelerator, "even_batches", False), accelerator.even_batches)
    if not accelerator.use_distributed:  # it leaves the process group that the other probes need
        yield "end", accelerator.end_training()


@probe(
    COVERED,
    processes=BOTH,
    method=["on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"],
    index=[None, 0, 1, 9],
)
def decorators(method: str, index: Any) -> Any:
    accelerator = made()
    given = {"on_process": {"process_index": index}, "on_local_process": {"local_process_index": index}}.get(
        method, {}
    )
    return getattr(accelerator, method)(lambda x=1: x + 1, **given)(3)


@probe(COVERED, processes=BOTH, inputs=[[], [1], [1, 2, 3], "abc", {"a": [1, 2, 3]}, (1, 2, 3)], padding=[False, True])
def split(inputs: Any, padding: bool) -> Any:
    accelerator = made()
    with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
        return part


@probe(COVERED, processes=BOTH, even=[None, True, False], what=["model", "none", "two"])
def join(even: Any, what: str) -> Any:
    """`join_uneven_inputs` around nothing but a value."""
    accelerator = made()
    nets = {
        "model": [accelerator.prepare(model())],
        "none": [],
        "two": [accelerator.prepare(model()), accelerator.prepare(model(2))],
    }[what]
    with accelerator.join_uneven_inputs(nets, even_batches=even) as given:
        return given, accelerator.even_batches


@probe(COVERED, skip=[0, 1, 2], shuffle=[False, True])
def skip(skip: int, shuffle: bool) -> Any:
    accelerator = made()
    loader = accelerator.prepare(data(shuffle=shuffle))
    return [labels.tolist() for _, labels in accelerator.skip_first_batches(loader, skip)]


@probe(COVERED, prepared=[True, False], given=[None, "optimizer", "list"])
def unscale(prepared: bool, given: Any) -> Any:
    accelerator = made(mixed_precision="fp16")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if prepared:
        net, optimizer = accelerator.prepare(net, optimizer)
    accelerator.backward(net(torch.ones(1, 3)).sum())
    return accelerator.unscale_gradients({"optimizer": optimizer, "list": [optimizer]}.get(given))
