"""A model as stages that train: the graph that `torch.export` traces, cut where modules begin, each stage giving the next what later ones need.

Torch's own cut (`torch.distributed.pipelining.pipeline`) sends a value from its stage straight to each that uses it, and returns the gradient
of one of them. Here a value passes through every stage in between, so that neighbours alone exchange, as interleaved schedules want, and its
gradient is the sum. A parameter that several stages use (a tied embedding) keeps its name in each.

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

from accelerate.parallel.batches import Inputs
from accelerate.runtime.torch_private import is_view, traced_graph

_NO_GRADIENT = ("aten.detach", "aten.detach_")


class Stage(nn.Module):
    """A part of a model's graph: it takes the values that the stage before returns, and returns those that later stages need.

    Args:
        body: The part, with the parameters that it uses under the names of the user's model.
        dtypes: Of the values that it returns.
        modes: Nodes whose constants differ between training and evaluation, with those of each.
        context: Makes the context of its computation, for mixed precision.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        dtypes: Sequence[torch.dtype],
        modes: Sequence[tuple[fx.Node, Mapping[bool, Any]]],
        context: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        super().__init__()
        self.body = body
        self._dtypes, self._modes, self._context = dtypes, modes, context

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the stage; each result has memory of its own."""
        with self._context():
            results = self.body(*values)
        taken = {id(value) for value in values}
        return tuple(
            # Zero-bubble schedules detach results in place, which views refuse; and gloo sends no strided memory.
            result.clone(memory_format=torch.contiguous_format)
            if id(result) in taken or is_view(result) or not result.is_contiguous()
            else result
            for result in (result.to(dtype) for result, dtype in zip(results, self._dtypes, strict=True))
        )

    def train(self, mode: bool = True) -> "Stage":
        """Compute as the model does in training, or in evaluation."""
        if mode != self.training and self._modes:
            for node, choices in self._modes:
                node.args, node.kwargs = choices[mode]
            self.body.recompile()
        return super().train(mode)


@dataclass
class Chain:
    """A model that is traced and divided into stages, none of which is built yet.

    Attributes:
        carried: The values that each stage takes, and at the end those that the last one returns, on the meta device; what a gradient comes
            back for requires one.
        used: Positions of the example's tensors that the first stage takes.
        names: Of the parameters and buffers that each stage uses.
        build: Makes a stage.
        evaluates: Why it cannot compute as in evaluation; empty if it can.
    """

    carried: list[tuple[torch.Tensor, ...]]
    used: list[int]
    names: list[set[str]]
    build: Callable[[int], Stage]
    evaluates: str = ""


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


def trace(
    model: nn.Module,
    points: Sequence[str],
    inputs: Inputs,
    record: Callable[[Any], tuple[torch.Tensor, ...]],
    stages: int,
    device: torch.device,
    context: Callable[[], contextlib.AbstractContextManager],
    trains: bool = True,
) -> Chain:
    """Divide a model into stages that begin at modules, for a device; the model stays as it is. No communication.

    With `trains` they have gradients, and compute as in training until `Stage.train` says otherwise; else as the model does now.

    `record` returns the tensors of what the model returns. ValueError if the names do not cut it into so many stages, or if it cannot be
    traced.
    """
    check_points(model, points, stages)
    tensors = inputs.traced()
    flat = _Flat(model, lambda given: record(inputs.call(model, given)))
    graphs = []
    with _marked(model, points), torch.random.fork_rng(devices=[]), torch.set_grad_enabled(trains):
        for mode in (True, False) if trains else (model.training,):
            if mode is not model.training:  # parts that the user has frozen by `.eval()` stay so
                model.train(mode)
            try:
                graphs.append(traced_graph(flat, tensors))
            except Exception as error:  # whatever the model's code raises when it is traced
                raise untraceable(model, error) from error
    return _Cut(model, graphs[0], graphs[-1], points, stages, device, context).chain()


def wrong_number(model: nn.Module, split_points: Sequence[str], found: int, stages: int) -> ValueError:
    """Return the error for modules that do not cut a model into so many stages."""
    return ValueError(
        f"split_points={list(split_points)} cut {type(model).__name__} into {found} stages, but there are to be {stages}, in the order of "
        "the names: choose modules that forward calls once each, one after the other."
    )


def check_points(model: nn.Module, split_points: Sequence[str], stages: int) -> None:
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
            f"each but the first of which begins with one of them. Name {stages - 1} modules, or use 'auto'."
        )


def untraceable(model: nn.Module, error: BaseException) -> ValueError:
    """Return the error for a model that cannot be traced."""
    cause = error.__cause__ or error
    if isinstance(cause, ValueError) and str(cause).startswith("The model returns"):
        return ValueError(str(cause))
    first = next((line for line in str(cause).splitlines() if line.strip()), "no message")
    return ValueError(
        f"torch.export cannot trace {type(model).__name__} ({type(cause).__name__}: {first.strip()[:300]}). A pipeline needs a "
        "forward that is one graph: no branches on values, in transformers no cache (use_cache=False in `example_kwargs`)."
    )


class _Cut:
    """A traced graph, and which stage each of its nodes belongs to."""

    def __init__(
        self,
        model: nn.Module,
        traced: fx.GraphModule,
        evaluated: fx.GraphModule,
        points: Sequence[str],
        stages: int,
        device: torch.device,
        context: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        self.model, self.traced, self.stages, self.device, self.context = model, traced, stages, device, context
        self.nodes = [node for node in traced.graph.nodes if node.op != "call_module"]
        firsts: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            firsts.setdefault(id(tensor), name)
        self.attributes = {node: self._attribute(node, firsts) for node in self.nodes if node.op == "get_attr"}
        self.home: dict[fx.Node, int] = {}
        stage = 0
        for node in self.nodes:
            if _is_mark(node):
                stage += 1
            elif node.op == "placeholder":
                self.home[node] = 0
            elif node.op == "call_function":
                # A part of several results is taken where these are: it is the part that travels.
                source = node.args[0] if node.target is operator.getitem else None
                self.home[node] = self.home.get(source, stage)
        if stage != stages - 1:
            raise wrong_number(model, points, stage + 1, stages)
        self.output = next(node for node in self.nodes if node.op == "output")
        self.grows = self._differentiable()
        self.evaluated, self.evaluates = self._modes(evaluated)
        last = {
            node: max(
                [
                    stages if user is self.output else self.home[user]
                    for user in node.users
                    if user in (*self.home, self.output)
                ],
                default=-1,
            )
            for node in self.home
        }
        self.carried = [
            [node for node in self.home if self.home[node] < stage <= last[node]] for stage in range(1, stages)
        ]
        self.carried.insert(0, [node for node in self.home if node.op == "placeholder" and last[node] >= 0])
        self.carried.append(list(self.output.args[0]))

    def _attribute(self, node: fx.Node, firsts: Mapping[int, str]) -> tuple[str, Any]:
        """Return the name and the value of what a node reads: of tied weights always the first name."""
        value = operator.attrgetter(node.target)(self.traced)
        return firsts.get(id(value), node.target.removeprefix("model.")), value

    def _differentiable(self) -> dict[fx.Node, bool]:
        """Say of each node whether a gradient may come back for it."""
        grows: dict[fx.Node, bool] = {}
        for node in self.nodes:
            if node.op == "get_attr":
                grows[node] = getattr(self.attributes[node][1], "requires_grad", False)
            elif node in self.home:
                target = str(node.target)
                stopped = target.startswith(_NO_GRADIENT) or ("set_grad_enabled" in target and node.args[0] is False)
                values = node.meta.get("val")
                floating = any(
                    isinstance(value, torch.Tensor) and value.is_floating_point()
                    for value in (values if isinstance(values, (list, tuple)) else [values])
                )
                grows[node] = floating and not stopped and any(grows.get(source) for source in node.all_input_nodes)
        return grows

    def _modes(self, evaluated: fx.GraphModule) -> tuple[dict[fx.Node, fx.Node], str]:
        """Return the node of evaluation for each one whose constants differ there; and what is wrong if the graphs differ in more."""
        others = [node for node in evaluated.graph.nodes if node.op != "call_module"]
        twins = dict(zip(others, self.nodes, strict=False))
        same = len(others) == len(self.nodes) and all(
            one.op == two.op and (one.op == "placeholder" or str(one.target) == str(two.target))
            for one, two in twins.items()
        )
        self._twins = twins
        if not same or any(
            [twins[source] for source in one.all_input_nodes] != two.all_input_nodes
            or (one.op == "get_attr" and self._code(evaluated, one) != self._code(self.traced, two))
            for one, two in twins.items()
        ):
            return {}, f"{type(self.model).__name__} computes other operations in evaluation than in training"
        differ = {
            two: one
            for one, two in twins.items()
            if one.op == "call_function" and repr((one.args, one.kwargs)) != repr((two.args, two.kwargs))
        }
        return differ, ""

    @staticmethod
    def _code(module: nn.Module, node: fx.Node) -> str:
        """Return the code of a part of the graph with settings of its own, such as `torch.no_grad`; empty for a tensor."""
        return getattr(operator.attrgetter(node.target)(module), "code", "")

    def chain(self) -> Chain:
        """Return what the stages are built from."""
        names = [
            {
                self.attributes[source][0]
                for node in self.home
                if self.home[node] == stage
                for source in node.all_input_nodes
                if source in self.attributes
            }
            for stage in range(self.stages)
        ]
        carried = [tuple(self._like(node) for node in values) for values in self.carried]
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        used = [inputs.index(node) for node in self.carried[0]]
        return Chain(carried, used, names, self._build, self.evaluates)

    def _like(self, node: Any) -> torch.Tensor:
        value = node.meta.get("val") if isinstance(node, fx.Node) and node not in self.attributes else None
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{type(self.model).__name__} needs {node} in a later stage than it is made in, and it is no tensor that a pipeline can send. Begin the "
                "stage with another module."
            )
        return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=self.grows[node])

    def _placed(self, value: Any) -> Any:
        """Return a constant of the graph for the device: tracing has noted the one that the model was on."""
        is_other = isinstance(value, torch.device) and value.type != self.device.type
        return self.device if is_other else value

    def _build(self, stage: int) -> Stage:
        graph, made, held = fx.Graph(), {}, {}
        modes = []

        def fetched(node: fx.Node) -> fx.Node:
            if node not in made:
                name, value = self.attributes[node]
                held[name] = value
                made[node] = graph.get_attr(name)
            return made[node]

        for node in self.carried[stage]:
            made[node] = graph.placeholder(node.name)
        for node in self.nodes:
            if self.home.get(node) != stage or node.op == "placeholder":
                continue
            copy = made[node] = graph.node_copy(node, fetched)
            copy.args, copy.kwargs = fx.node.map_aggregate((copy.args, copy.kwargs), self._placed)
            if other := self.evaluated.get(node):
                there = fx.map_arg((other.args, other.kwargs), lambda source: fetched(self._twins[source]))
                there = fx.node.map_aggregate(there, self._placed)
                modes.append((copy, {True: (copy.args, copy.kwargs), False: there}))
        graph.output(tuple(fetched(node) for node in self.carried[stage + 1]))
        body = fx.GraphModule(held, graph, f"Stage{stage}")
        return Stage(body, [self._like(node).dtype for node in self.carried[stage + 1]], modes, self.context)


def _is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and "pipe_split" in str(node.target)
