"""`Accelerator` in a training: backward passes, accumulation, clipping, communication."""

import torch

from interop.differential.core import probe, words
from interop.differential.probes.accelerator import BOTH, COVERED, made, model

VALUES = {
    "0d": lambda r: torch.tensor(float(r)), "1d": lambda r: torch.arange(3) + 10 * r,
    "2d": lambda r: torch.full((2, 3), float(r)), "half": lambda r: torch.full((2,), r + 0.5, dtype=torch.float16),
    "bfloat16": lambda r: torch.full((2,), r + 0.5, dtype=torch.bfloat16),
    "bool": lambda r: torch.tensor([True, bool(r)]), "int8": lambda r: torch.tensor([r, 1], dtype=torch.int8),
    "double": lambda r: torch.tensor([r / 3], dtype=torch.float64), "empty": lambda r: torch.zeros(0, 2),
    "list": lambda r: [torch.tensor([r]), torch.tensor([r + 1.0])],
    "tuple": lambda r: (torch.tensor([r]), torch.tensor([[r]])),
    "dict": lambda r: {"a": torch.tensor([r]), "b": {"c": torch.tensor([r * 2])}},
    "transposed": lambda r: (torch.arange(6.0).reshape(2, 3) + r).t(),
    "grad": lambda r: torch.full((2,), float(r), requires_grad=True), "number": lambda r: 3, "text": lambda r: "word",
    "none": lambda r: None, "mixed": lambda r: [torch.tensor([r]), 3],
}  # fmt: skip


@probe(COVERED, processes=BOTH, value=list(VALUES))
def gather(value):
    accelerator = made()
    return accelerator.gather(VALUES[value](accelerator.process_index))


@probe(COVERED, processes=BOTH, value=list(VALUES), reduction=words("sum mean none"), scale=[1.0, 0.5])
def reduce(value, reduction, scale):
    accelerator = made()
    return accelerator.reduce(VALUES[value](accelerator.process_index), reduction=reduction, scale=scale)


@probe(COVERED, processes=BOTH, given=[[1, 2], "ab", {"a": 1}, 3, None, [], ["a", {"b": 2}]])
def gather_objects(given):
    return made().gather_for_metrics(given, use_gather_object=True)


@probe(COVERED, processes=BOTH, setters=[[], [0], [1], [0, 1]], checks=[1, 2])
def triggers(setters, checks):
    accelerator = made()
    if accelerator.process_index in setters:
        accelerator.set_trigger()
    return [accelerator.check_trigger() for _ in range(checks)]


@probe(COVERED, processes=BOTH)
def together():
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
    COVERED, processes=BOTH,
    method=["on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"],
    index=[None, 0, 1, 9],
)  # fmt: skip
def decorators(method, index):
    accelerator = made()
    given = {"on_process": {"process_index": index}, "on_local_process": {"local_process_index": index}}.get(
        method, {}
    )
    return getattr(accelerator, method)(lambda x=1: x + 1, **given)(3)


@probe(COVERED, processes=BOTH, inputs=[[], [1], [1, 2, 3], "abc", {"a": [1, 2, 3]}, (1, 2, 3)], padding=[False, True])
def split(inputs, padding):
    accelerator = made()
    with accelerator.split_between_processes(inputs, apply_padding=padding) as part:
        return part


@probe(COVERED, processes=BOTH, even=[None, True, False], what=["model", "none", "two"])
def join(even, what):
    accelerator = made()
    nets = {
        "model": [accelerator.prepare(model())],
        "none": [],
        "two": [accelerator.prepare(model()), accelerator.prepare(model(2))],
    }[what]
    with accelerator.join_uneven_inputs(nets, even_batches=even) as given:
        return given, accelerator.even_batches
