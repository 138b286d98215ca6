"""A traced model in stages computes what it does whole, in training and in evaluation, and so do its gradients."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

from accelerate.extensions.pipeline import balance, stages

BOTH = pytest.mark.parametrize("points", [["blocks.2"], ["blocks.1", "blocks.2", "blocks.3"]], ids=len)


class _Net(nn.Module):
    """A value of the first stage that later ones need, a tied head, a frozen bias, a constant, no gradient in parts."""

    def __init__(self, switches=False):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)])
        self.blocks[1][0].bias.requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.switches = switches

    def forward(self, tokens, scale):
        start = x = self.embed(tokens)
        left, right = x.chunk(2, -1)
        with torch.no_grad():  # a part of the graph with settings of its own, which differs in evaluation
            still = dropout(x, 0.5, self.training).exp() * torch.tensor(2.0 if self.training else 3.0)
        for block in self.blocks:
            x = block(x) * scale
        if self.switches and not self.training:
            x = x.relu()
        x = x + start + still + torch.cat([right, left], -1) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"scores": self.head(x), "seen": tokens}


def _traced(model, points):
    tokens, scale = torch.arange(6).view(3, 2), torch.ones(3, 1, 1)
    traced = stages.trace(model, points, (tokens,), {"scale": scale}, len(points) + 1, torch.device("cpu"))
    return traced.chains, traced.outputs, (tokens, scale)


def _loss_and_gradients(found, parameters):
    return torch.autograd.grad(found["scores"].square().sum(), parameters)


@BOTH
@pytest.mark.parametrize("switches", [False, True], ids=["same", "other operations"])
def test_stages_compute_what_the_model_does(points, switches):
    model = _Net(switches)
    chains, outputs, given = _traced(model, points)
    parts = [stages.build(chains, number, contextlib.nullcontext) for number in range(len(points) + 1)]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for part, names in zip(parts, chains[True].names, strict=True):
        held = {name: tensor for name, tensor in part.tensors().items() if name in own}
        assert all(own[name] is tensor for name, tensor in held.items()) and held.keys() <= names
        assert len(list(part.parameters())) == sum(isinstance(tensor, nn.Parameter) for tensor in held.values())
    assert "embed.weight" in chains[True].names[0] & chains[True].names[-1]
    trained = [parameter for parameter in own.values() if parameter.requires_grad]
    for mode in (True, False, True):
        model.train(mode)
        values = given
        torch.manual_seed(0)
        for number, part in enumerate(parts):
            part.train(mode)
            carried = [(value.shape, value.dtype) for value in chains[mode].carried[number]]
            assert [(value.shape, value.dtype) for value in values] == carried
            values = part(*values)
            assert all(value.is_contiguous() for value in values)
        found = outputs.joined([values], 3)
        torch.manual_seed(0)
        wanted = model(given[0], scale=given[1])
        assert found.keys() == wanted.keys() and torch.equal(found["seen"], wanted["seen"])
        torch.testing.assert_close(found["scores"], wanted["scores"])
        pairs = zip(_loss_and_gradients(found, trained), _loss_and_gradients(wanted, trained), strict=True)
        for mine, reference in pairs:
            torch.testing.assert_close(mine, reference)


@BOTH
def test_the_model_stays_as_it_is(points):
    model = _Net()
    model.blocks[3].eval()
    before = dict(model.__dict__), [module.training for module in model.modules()]
    _traced(model, points)
    assert (dict(model.__dict__), [module.training for module in model.modules()]) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gradients_come_back_for_what_needs_them_alone():
    chain = _traced(_Net(), ["blocks.2"])[0][True]
    assert [value.requires_grad for value in chain.carried[0]] == [False, False]
    carried = {(value.dtype, value.requires_grad) for value in chain.carried[1]}
    assert (torch.int64, False) in carried and (torch.float32, True) in carried and (torch.float32, False) in carried


def test_refused():
    for points, text in (
        (["blocks"], "no module"),
        (["blocks.9"], "no module 'blocks.9'"),
        (["head", "head"], "name"),
    ):
        with pytest.raises(ValueError, match=text if text != "no module" else "cut|trace"):
            _traced(_Net(), points)

    class Branching(_Net):
        def forward(self, tokens, scale):
            return super().forward(tokens, scale) if tokens.sum() > 3 else {"scores": scale}

    with pytest.raises(ValueError, match="torch.export cannot trace Branching"):
        _traced(Branching(), ["blocks.2"])


def test_blocks_are_balanced_by_what_they_cost():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [4, 4, 4, 64, 4, 4]
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4)) for n in sizes])
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Uneven()
    assert balance.costly_stages(model, 3, lambda: model(torch.ones(2, 4))) == ["blocks.3", "blocks.4"]
    plain = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    assert balance.costly_stages(plain, 2, lambda: None) == ["b"]
    experts = nn.ModuleList(
        [nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])}) for _ in range(4)]
    )
    assert balance.costly_stages(nn.ModuleDict({"layers": experts}), 2, lambda: None) == ["layers.2"]
