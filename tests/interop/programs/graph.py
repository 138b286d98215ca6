"""Graphs in batches of a bounded number of nodes: a batch sampler without a batch size, and batch objects with `to`."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, send_to_device, set_seed

FEATURES, EPOCHS, MAX_NODES, STEPS = 4, 2, 12, 8


class GraphBatch:
    """Nodes and edges of several graphs; `graph` tells for each node which graph it belongs to."""

    def __init__(self, nodes, edges, graph, targets):
        self.nodes, self.edges, self.graph, self.targets = nodes, edges, graph, targets
        self.moves = 0

    def to(self, device, non_blocking=False):
        for name in ("nodes", "edges", "graph", "targets"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=non_blocking))
        self.moves += 1
        return self


class NodeBudgetSampler(Sampler):
    """Draws a number of batches of graphs with at most so many nodes, in an order that each epoch draws again."""

    def __init__(self, sizes, seed=0):
        self.sizes, self.generator = sizes, torch.Generator().manual_seed(seed)

    def __len__(self):
        return STEPS

    def __iter__(self):
        order = torch.randperm(len(self.sizes), generator=self.generator).tolist()
        for _ in range(STEPS):
            batch, count = [], 0
            while order and count + self.sizes[order[-1]] <= MAX_NODES:
                batch.append(order.pop())
                count += self.sizes[batch[-1]]
            yield batch


class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(FEATURES, 8), nn.Linear(FEATURES + 8, 8)
        self.readout = nn.Linear(8, 1)

    def forward(self, batch):
        source, target = batch.edges
        messages = torch.zeros(len(batch.nodes), 8).index_add(0, target, self.message(batch.nodes)[source])
        hidden = torch.relu(self.update(torch.cat([batch.nodes, messages], dim=1)))
        pooled = torch.zeros(len(batch.targets), 8).index_add(0, batch.graph, hidden)
        return self.readout(pooled).squeeze(-1)


def make_graph(number):
    generator, nodes = torch.Generator().manual_seed(number), 3 + number % 4
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
    features = torch.randn(nodes, FEATURES, generator=generator)
    return features, edges, features.sum()


def collate(graphs):
    starts = torch.tensor([0, *[len(nodes) for nodes, _, _ in graphs]]).cumsum(0)
    edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=False)], dim=1)
    owner = torch.cat([torch.full((len(nodes),), number) for number, (nodes, _, _) in enumerate(graphs)])
    return GraphBatch(torch.cat([g[0] for g in graphs]), edges, owner, torch.stack([g[2] for g in graphs]))


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
set_seed(13)
graphs = [make_graph(number) for number in range(23)]
sampler = NodeBudgetSampler([len(nodes) for nodes, _, _ in graphs])
model = GraphNetwork()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(graphs, batch_sampler=sampler, collate_fn=collate)
)
result = {"losses": [], "graphs": [], "moves": set(), "test": []}
for _ in range(EPOCHS):
    losses, count = [], 0
    for batch in loader:
        result["moves"].add(batch.moves)
        loss = nn.functional.mse_loss(model(batch), batch.targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        count += len(batch.targets)
    result["losses"].append(accelerator.gather(torch.tensor([sum(losses) / len(losses)])).tolist())
    result["graphs"].append(accelerator.reduce(torch.tensor(count), reduction="sum").item())
    with torch.no_grad():
        everything = send_to_device(collate(graphs), accelerator.device)
        error = (accelerator.unwrap_model(model)(everything) - everything.targets).abs()
        result["test"].append(error.mean().item())
accelerator.print(json.dumps({**result, "moves": sorted(result["moves"])}))
