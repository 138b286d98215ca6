"""The table of docs/guides/precision.md, and what a run has in place of each of its cells."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "precision.md"


class Net(nn.Module):
    """A model with parameters of both kinds and a buffer, which notes what its last layer computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.frozen = nn.Linear(32, 16).requires_grad_(False)
        self.last = nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(3))
        self.seen: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.last(self.frozen(self.first(inputs)))
        self.seen = output.dtype
        return output


def rows(*strategies: str) -> Iterator[dict[str, str]]:
    """Yield the rows of some strategies, by the heads of the columns."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if line.startswith("| strategy | mixed_precision |"))
    head = [cell.strip() for cell in lines[start].strip("|").split("|")]
    for line in lines[start + 2 :]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != len(head):
            return
        row = dict(zip(head, cells, strict=True))
        if row["strategy"] in strategies:
            yield row


def check(accelerator, row: dict[str, str], around_backward=None):
    """Train one step as a row says, and compare the row with the tensors and with the report.

    Args:
        accelerator: Built as the row says.
        row: Of `rows`.
        around_backward: A context for the backward pass.

    Returns:
        The prepared model.
    """
    loaded = getattr(torch, row["loaded in"])
    net = Net().to(loaded)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    inputs = torch.randn(4, 16, dtype=loaded if row["mixed_precision"] == "no" else torch.float32)
    output = model(inputs.to(accelerator.device))
    with around_backward or contextlib.nullcontext():
        accelerator.backward(output.float().pow(2).mean())
    optimizer.step()
    found = {
        "trainable parameters": {p.dtype for p in model.parameters() if p.requires_grad},
        "frozen parameters": {p.dtype for p in model.parameters() if not p.requires_grad},
        "buffers": {buffer.dtype for buffer in model.buffers()},
        "gradients": {p.grad.dtype for p in model.parameters() if p.grad is not None},
        "optimizer state": {v.dtype for state in optimizer.state.values() for v in state.values() if v.dim()},
        "outputs": {output.dtype},
        "forward": {net.seen},
    }
    seen = {copy: ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes)) for copy, dtypes in found.items()}
    assert seen == {copy: row[copy] for copy in seen}, row
    report = accelerator.precision_report(model)
    assert report.strategy == row["strategy"] and report.model == "Net"
    assert {copy: report.dtype_of(copy) for copy in (*seen, "gradients exchanged")} == {
        copy: row[copy] for copy in (*seen, "gradients exchanged")
    }, str(report)
    trained = next(line for line in report.rows if line.copy == "trainable parameters")
    assert (trained.before, trained.count) == (row["loaded in"], 816), str(report)
    pure = row["mixed_precision"] != "no" and row["trainable parameters"] == "bfloat16"
    assert report.warnings == int(pure), str(report)
    return model
