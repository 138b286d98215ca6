"""A model as trainable stages: the graph of `torch.export`, cut where modules begin. Each stage passes on all values needed later.

Torch's own cut (`torch.distributed.pipelining.pipeline`) sends a value from its stage directly to each user, and returns
the gradient of one user. Here a value passes through every stage in between. So only neighbours exchange, as interleaved
schedules need, and the gradient is the sum. A parameter of several stages (a tied embedding) keeps its name in each.

Source:
    https://docs.pytorch.org/docs/stable/export.html
"""

import contextlib
import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import pipe_split

from accelerate.extensions.pipeline.batches import Inputs, Outputs
from accelerate.extensions.pipeline.torch_private import is_view, traced_graph
from accelerate.runtime.torch_private import pytree

Context = Callable[[], contextlib.AbstractContextManager]
Carried = Mapping[bool, tuple[torch.Tensor, ...]]


class Stage(nn.Module):
    """A part of a model's graph: it takes the values that the stage before returns, and returns those that later stages need.

    Args:
        bodies: The graph of the part in training, and in evaluation, with its parameters under the names of the user's model.
        taken: The arguments of each, on the meta device.
        returned: The results of each.
        context: Makes the context of its computation, for mixed precision.
    """

    def __init__(
        self, bodies: Mapping[bool, fx.GraphModule], arguments: Carried, returned: Carried, context: Context
    ) -> None:
        super().__init__()
        self.bodies = nn.ModuleDict({str(mode): body for mode, body in bodies.items()})
        self.taken, self.returned, self._context = arguments, returned, context
        self.train(next(iter(bodies)))

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the stage; each result has its own memory."""
        with self._context():
            results = self.bodies[str(self.training)](*values)
        argument_ids = {id(value) for value in values}
        typed = (value.to(like.dtype) for value, like in zip(results, self.returned[self.training], strict=True))
        return tuple(
            # Zero-bubble schedules detach results in place, which views refuse; and gloo sends no strided memory.
            result.clone(memory_format=torch.contiguous_format)
            if id(result) in argument_ids or is_view(result) or not result.is_contiguous()
            else result
            for result in typed
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers, by the names of the user's model."""
        bodies = self.bodies.values()
        return {name: tensor for body in bodies for name, tensor in (*body.named_parameters(), *body.named_buffers())}


class _Flat(nn.Module):
    """A model behind a forward that takes and returns tensors; nothing is changed on the model itself."""

    def __init__(self, model: nn.Module, call: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._call(tensors)


@contextlib.contextmanager
def _marked(model: nn.Module, points: Sequence[str]) -> Iterator[None]:
    """Mark in the graph where modules begin, and give all modules their modes back."""
    modes = [(module, module.training) for module in model.modules()]
    hooks = [model.get_submodule(point).register_forward_pre_hook(lambda *_: pipe_split()) for point in points]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode


@dataclass
class Traced:
    """A model as stages, in training and in evaluation, with its inputs and outputs."""

    chains: "dict[bool, Chain]"
    inputs: Inputs
    outputs: Outputs


def trace(
    model: nn.Module,
    points: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stages: int,
    device: torch.device,
    record: Callable[[Any], tuple[torch.Tensor, ...]] | None = None,
    trains: bool = True,
) -> Traced:
    """Divide a model into stages that begin at modules, for a device, without changing the model. No communication.

    Returns the stages for training and for evaluation, with gradients. Without `trains`, only for the model's current mode,
    without gradients.

    `record` returns the relevant tensors of the model's output; None: all. ValueError if the names do not cut the model into
    that many stages, or if it cannot be traced.
    """
    inputs = Inputs(model, args, kwargs)
    _check_points(model, points, stages)
    outputs, tensors = Outputs(inputs.rows), inputs.traced()
    flat = _Flat(model, lambda tensors_of_batch: (record or outputs.record)(inputs.call(model, tensors_of_batch)))
    graphs = {}
    with _marked(model, points), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(trains):
        for mode in (True, False) if trains else (model.training,):
            if mode is not model.training:  # parts that the user has frozen by `.eval()` stay so
                model.train(mode)
            try:
                graphs[mode] = traced_graph(flat, tensors)
            except Exception as error:  # whatever the model's code raises when it is traced
                raise _untraceable(model, error) from error
    chains = {mode: Chain(model, graph, device) for mode, graph in graphs.items()}
    if others := {len(chain.names) for chain in chains.values()} - {stages}:
        raise ValueError(
            f"split_points={list(points)} cut {type(model).__name__} into {others.pop()} stages, but there are to be {stages}, in the order of "
            "the names: choose modules that forward calls once each, one after the other."
        )
    return Traced(chains, inputs, outputs)


def _check_points(model: nn.Module, split_points: Sequence[str], stages: int) -> None:
    """Raise ValueError for names that are not those of as many modules as begin a stage."""
    names = [name for name, _ in model.named_modules() if name]
    if unknown := [str(point) for point in split_points if point not in names]:
        near = difflib.get_close_matches(unknown[0], names, n=3, cutoff=0.5) or names[:3]
        raise ValueError(
            f"split_points={list(split_points)}: {type(model).__name__} has no module {unknown[0]!r}. Name one of its modules, such "
            f"as {', '.join(map(repr, near))}."
        )
    if not len(set(split_points)) == len(split_points) == stages - 1:
        raise ValueError(
            f"split_points={list(split_points)} name {len(set(split_points))} modules, but {stages} processes are {stages} stages, "
            f"and each but the first begins with one of them. Name {stages - 1} modules, or use 'auto'."
        )


def _untraceable(model: nn.Module, error: BaseException) -> ValueError:
    """Return the error for a model that cannot be traced."""
    cause = error.__cause__ or error
    if isinstance(cause, ValueError) and str(cause).startswith("The model returns"):
        return ValueError(str(cause))
    first = next((line for line in str(cause).splitlines() if line.strip()), "no message")
    return ValueError(
        f"torch.export cannot trace {type(model).__name__} ({type(cause).__name__}: {first.strip()[:300]}). A pipeline needs a "
        "forward that is one graph: no branches on values, in transformers no cache (use_cache=False in `example_kwargs`)."
    )


class Chain:
    """A traced model divided into stages that are not built yet: each node of the graph has a stage.

    Attributes:
        carried: The arguments of each stage, and finally the results of the last one, on the meta device. A value with a
            gradient requires one. The first stage takes all inputs.
        names: Of each stage's parameters and buffers.
    """

    def __init__(self, model: nn.Module, traced: fx.GraphModule, device: torch.device) -> None:
        self._model, self._device = type(model).__name__, device
        *self._nodes, output = traced.graph.nodes
        firsts = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._own = set(firsts.values())
        self._read: dict[fx.Node, tuple[str, Any]] = {}
        self._home: dict[fx.Node, int] = {}
        stage = 0
        for node in self._nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(traced)
                # For tied weights, which share memory, `named_parameters` gives the first name.
                self._read[node] = firsts.get(id(value), node.target.removeprefix("model.")), value
            elif node.op == "placeholder":
                self._home[node] = 0
            elif "pipe_split" in str(node.target):
                stage += 1
            elif node.op == "call_function":
                # A node with several results is no tensor; the selected result is sent.
                source = node.args[0] if node.target is operator.getitem else None
                self._home[node] = self._home.get(source, stage)
        last = {node: max((self._home.get(user, stage + 1) for user in node.users), default=-1) for node in self._home}
        self._carried = [
            [node for node in self._home if node.op == "placeholder"],
            *([node for node in last if self._home[node] < at <= last[node]] for at in range(1, stage + 1)),
            list(output.args[0]),
        ]
        grows = self._differentiable()
        self.carried = [tuple(self._like(node, grows) for node in values) for values in self._carried]
        self.names: list[set[str]] = [set() for _ in range(stage + 1)]
        for node, at in self._home.items():
            self.names[at] |= {self._read[source][0] for source in node.all_input_nodes if source in self._read}

    def _differentiable(self) -> dict[fx.Node, bool]:
        """Say of each node whether a gradient may come back for it."""
        grows = {node: getattr(value, "requires_grad", False) for node, (_, value) in self._read.items()}
        for node in self._home:
            target = str(node.target)
            stopped = target.startswith("aten.detach") or ("set_grad_enabled" in target and node.args[0] is False)
            values = pytree.tree_leaves(node.meta.get("val"))
            floating = any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
            grows[node] = floating and not stopped and any(grows.get(source) for source in node.all_input_nodes)
        return grows

    def _like(self, node: Any, grows: Mapping[fx.Node, bool]) -> torch.Tensor:
        value = node.meta.get("val") if node in self._home else None
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{self._model} needs {node} in a later stage than it is made in, or returns it, and a pipeline cannot send it: it is no tensor, or a weight. "
                "Begin the stage with another module, or return a result."
            )
        return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=grows[node])

    def body(self, stage: int, constants: dict[str, Any]) -> fx.GraphModule:
        """Return the graph of a stage, with its constants in `constants`, on the device. Its parameters are the model's."""
        graph, nodes, read = fx.Graph(), {}, {}

        def fetched(node: fx.Node) -> fx.Node:
            if node not in nodes:
                name, value = self._read[node]
                if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                    value = value.to(self._device)
                # Constants and parts of the graph may differ between training and evaluation under one name.
                read[name] = constants.setdefault(name, value) if name in self._own else value
                nodes[node] = graph.get_attr(name)
            return nodes[node]

        def placed(value: Any) -> Any:
            # Tracing has noted the device that the model was on.
            is_other = isinstance(value, torch.device) and value.type != self._device.type
            return self._device if is_other else value

        for node in self._carried[stage]:
            nodes[node] = graph.placeholder(node.name)
        for node in self._nodes:
            if self._home.get(node) == stage and node.op != "placeholder":
                copy = nodes[node] = graph.node_copy(node, fetched)
                copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), placed)
        graph.output(tuple(nodes[node] for node in self._carried[stage + 1]))
        return fx.GraphModule(read, graph, f"Stage{stage}")


def build(chains: Mapping[bool, Chain], stage: int, context: Context) -> Stage:
    """Make a stage of what `trace` returned; in training and in evaluation it has the same parameters and buffers."""
    constants: dict[str, Any] = {}
    bodies = {mode: chain.body(stage, constants) for mode, chain in chains.items()}
    arguments, returned = ({mode: chain.carried[at] for mode, chain in chains.items()} for at in (stage, stage + 1))
    return Stage(bodies, arguments, returned, context)
