"""A model that runs as a pipeline returns what it returns in one process, and what cannot run is refused on all ranks."""

from collections import namedtuple

import torch
from expect import assert_same_everywhere, raised
from models import tiny
from torch import nn

from accelerate import PartialState, prepare_pippy

STATE = PartialState(cpu=True)
RANK, RANKS = STATE.process_index, STATE.num_processes
Pair = namedtuple("Pair", ["first", "second"])
WIDTH = 8


class Layers(nn.Module):
    """Layers in a row, more than there are stages; what it returns is up to the function it is given."""

    def __init__(self, returns=None):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(5))
        self.head = nn.Linear(WIDTH, 3)
        self.returns = returns

    def forward(self, x, scale=None, factor=1.0):
        states = [self.embed(x) + self.shift]
        for layer in self.layers:
            states.append(states[-1] + layer(states[-1]))
        logits = self.head(states[-1]) * factor
        logits = logits if scale is None else logits * scale
        return logits if self.returns is None else self.returns(x, states, logits)


def rows(count, seed=7):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def flat(output):
    return [tensor for tensor in torch.utils._pytree.tree_leaves(output) if isinstance(tensor, torch.Tensor)]


def compare(output, expected, gathered):
    """Require a structure with its values where they have to be, and the same ones everywhere."""
    if not gathered and RANK != RANKS - 1:
        assert output is None, output
        return
    assert type(output) is type(expected), (type(output), type(expected))
    found, wanted = torch.utils._pytree.tree_flatten(output), torch.utils._pytree.tree_flatten(expected)
    assert found[1] == wanted[1], (found[1], wanted[1])
    for mine, value in zip(found[0], wanted[0], strict=True):
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(mine, value)
        else:
            assert mine == value, (mine, value)
    if gathered:
        assert_same_everywhere(flat(output))


def by_micro_batches(model, batch, size):
    """Return what one process computes from micro-batches of the size of the example, the last one filled up."""
    filled = torch.cat([batch, batch[-1:].expand(-len(batch) % size, *batch.shape[1:])])
    return torch.cat([model(part) for part in filled.split(size)])[: len(batch)]


def points(count=RANKS):
    return [f"layers.{number}" for number in range(5 - count + 1, 5)]


@torch.no_grad()
def check_batches_of_any_size():
    """Split automatically or as told, any number of samples and of micro-batches, and bit for bit what one process computes."""
    for split, chunks, gathered in (("auto", None, True), (points(), 3, False)):
        torch.manual_seed(1)
        model = Layers()
        plain = model.forward
        piped = prepare_pippy(model, split, example_args=(rows(2),), num_chunks=chunks, gather_output=gathered)
        assert piped is model and len(piped.hf_split_points) == RANKS - 1
        for count in (1, 2 * RANKS, 13):
            batch = rows(count)
            expected = by_micro_batches(plain, batch, 2)
            output = piped(batch if RANK == 0 else rows(count, seed=RANK))  # the first rank's inputs count
            assert (output is None) is (not gathered and RANK != RANKS - 1)
            assert output is None or torch.equal(output, expected), (split, chunks, count)
            again = piped(batch) if RANK == 0 else piped()
            assert again is None or torch.equal(again, expected)
        assert not any("_orig_forward" in module.__dict__ for module in model.modules())


@torch.no_grad()
def check_structures():
    """What a model returns keeps its structure, also what early stages computed and what came in."""
    kinds = (
        lambda x, states, logits: {"logits": logits, "states": tuple(states), "count": 3, "none": None},
        lambda x, states, logits: (x, [states[0], logits.argmax(-1)], Pair(x > 0, states[-1])),
        lambda x, states, logits: Pair(logits.sum(-1), (states[1].repeat_interleave(2, 0), logits, logits)),
    )
    for kind in kinds:
        torch.manual_seed(2)
        model = Layers(kind)
        batch = rows(5)
        expected = model(batch)
        for gathered in (True, False):
            piped = prepare_pippy(model, example_args=(rows(2),), gather_output=gathered)
            first = piped(batch)
            kept = [tensor.clone() for tensor in flat(first)]
            compare(first, expected, gathered)
            piped(rows(5, seed=8))
            assert all(torch.equal(one, two) for one, two in zip(kept, flat(first), strict=True)), "memory used again"


class Several(Layers):
    """Takes what a pipeline has trouble with: inputs for late stages, for nobody, without samples, nested ones."""

    def forward(self, x, *more, mask, unused=None, table=None, number=None, words=(), mode="sum", **rest):
        x = super().forward(x + words["bias"])
        x = x + torch.where(mask, 1.0, -1.0).transpose(0, 1).transpose(0, 1)[:, :3] + table[:3] * number
        return x - sum(more).mean(1, keepdim=True) if mode == "sum" else x * rest["other"]


@torch.no_grad()
def check_inputs():
    """Keywords, defaults, constants, nested inputs, and inputs that are the same for all samples."""

    def given(count, mode="sum"):
        batch = rows(count)
        words = {"bias": batch * 2, "unused": torch.arange(count)}
        named = {"mask": batch > 0, "unused": batch, "table": torch.arange(4.0), "number": torch.tensor(2.5)}
        return (batch, batch, rows(count, 9)), {**named, "words": words, "mode": mode, "other": batch[:, :1]}

    for mode in ("sum", "product"):
        torch.manual_seed(3)
        model = Several()
        args, kwargs = given(3 * RANKS + 1, mode)
        expected = model(*args, **kwargs)
        example_args, example_kwargs = given(2, mode)
        piped = prepare_pippy(model, points(), None, example_args, example_kwargs, gather_output=True)
        compare(piped(*args, **kwargs), expected, True)
        compare(piped(*args, **kwargs) if RANK == 0 else piped(), expected, True)
    # Given by name or by position, it is one argument.
    model = Layers()
    batch, scale = rows(4), torch.rand(4, 1)
    expected = model(batch, scale)
    piped = prepare_pippy(model, example_kwargs={"x": batch[:1], "scale": scale[:1]}, gather_output=True)
    compare(piped(batch, scale), expected, True)
    compare(piped(scale=scale, x=batch), expected, True)


class Turned(nn.Module):
    """Sends activations that are no block of memory: transposed, expanded, of several dtypes; with a tied weight."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens).transpose(0, 1)
        mask = (tokens > 3)[:, None, :].expand(-1, 2, -1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1)) + mask.sum((1, 2))[:, None, None]


@torch.no_grad()
def slow_activations():
    """Whatever strides and dtypes they have; under bf16 weights, and under autocast."""
    tokens = torch.randint(0, 12, (6, 4), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(4)
        model = Turned().to(dtype)
        expected = by_micro_batches(model.forward, tokens, 2)
        piped = prepare_pippy(model, points(), example_args=(tokens[:2],), gather_output=True)
        output = piped(tokens)
        assert output.dtype is dtype and torch.equal(output, expected)
    model = Turned()
    with torch.autocast("cpu", torch.bfloat16):
        expected = by_micro_batches(model.forward, tokens, 2)
        piped = prepare_pippy(model, points(), example_args=(tokens[:2],), gather_output=True)
        output = piped(tokens)
    assert expected.dtype is output.dtype is torch.bfloat16 and torch.equal(output, expected)
    assert torch.equal(piped(tokens), expected), "the stages know the autocast that they were traced under"


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.sum() > 0 else -layer(x)
        return x


class Opaque:
    """An opaque value."""


def check_refused_at_first():
    """What cannot become a pipeline is refused on every rank, and the model is as it was."""
    batch = rows(2)
    example = {"example_args": (batch,)}
    near = [*points()[:-1], "layers.9"]
    cases = [
        (Layers(), {**example, "split_points": near}, ("'layers.9'", "has no module", "'layers.")),
        (Layers(), {**example, "split_points": ["head"] * RANKS}, ("split_points=['head'", f"{RANKS} processes")),
        (Layers(), {}, ("`example_args` and `example_kwargs` do not fit Layers.forward(x", "'x'")),
        (Layers(), {"example_args": (torch.tensor(1.0),)}, ("batch dimension", "x of shape ()")),
        (Layers(), {"example_args": batch}, ("example_args is a tensor", "(tensor,)")),
        (Layers(), {**example, "num_chunks": 0}, ("num_chunks=0", "at least 1")),
        (Layers(), {"example_args": (batch, Opaque())}, ("scale", "Opaque", "Omit it")),
        (Layers(lambda x, states, logits: logits.sum()), example, ("returns it of shape ()", "labels")),
        (Layers(lambda x, states, logits: {"a": [Opaque()]}), example, ("Opaque (a[0])", "cannot be divided")),
        (Branching(), example, ("cannot trace Branching", "one graph")),
        (Layers().to("meta"), example, ("'embed.weight' is on the meta device", "load")),
    ]
    for model, options, fragments in cases:
        before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
        with raised((ValueError, TypeError), *fragments):
            prepare_pippy(model, **options)
        assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == before
    with raised(ValueError, "Rank 1 cannot" if RANK != 1 else "", "batch dimension"):
        prepare_pippy(Layers(), example_args=(batch if RANK != 1 else torch.tensor(1.0),))
    with raised(ValueError, "example is", "on rank 1"):
        prepare_pippy(Layers(), example_args=(batch if RANK != 1 else rows(3),))


@torch.no_grad()
def check_refused_at_calls():
    """Arguments unlike the example are refused on every rank, and the pipeline continues."""
    model = Layers()
    batch, scale = rows(4), torch.rand(4, 1)
    expected = model(batch, scale)
    piped = prepare_pippy(model, example_args=(batch[:2], scale[:2]), gather_output=True)
    calls = [
        ((), {}, ("missing a required argument: 'x'",)),
        ((None, None), {}, ("got no sample", "x=None")),
        ((batch[:0], scale[:0]), {}, ("got no sample", "x of shape (0, 8)")),
        ((batch[:, :5], scale), {}, ("x of shape (4, 5)", "(2, 8)", "Only the number of samples may differ")),
        ((batch, scale[:3]), {}, ("scale of shape (3, 1)", "batch of 4")),
        ((batch.double(), scale), {}, ("torch.float64 in a batch", "torch.float32")),
        ((batch, 2.0), {}, ("scale=2.0", "scale of shape (2, 1)")),
        ((batch, scale, 2.0), {}, ("traced with x, scale, and is called with x, scale, factor",)),
        ((batch, scale), {"why": 1}, ("unexpected keyword argument 'why'",)),
    ]
    for args, kwargs, fragments in calls:
        with raised((ValueError, TypeError), *fragments):
            piped(*args, **kwargs) if RANK == 0 else piped()
        compare(piped(batch, scale), expected, True)


def model_of(family):
    import transformers

    if family == "Llama":
        return tiny(family, vocab_size=64, num_hidden_layers=4, num_key_value_heads=2, pad_token_id=2)
    if family == "Bert":
        kind, more = "BertForSequenceClassification", {"hidden_size": 16, "intermediate_size": 32}
    elif family == "GPT2":
        kind, more = "GPT2LMHeadModel", {"hidden_size": 16, "n_positions": 32, "pad_token_id": 2}
    else:
        kind, more = "T5ForConditionalGeneration", {"d_model": 16, "d_kv": 4, "d_ff": 32, "decoder_start_token_id": 0}
    sizes = {"vocab_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2 if family == "T5" else 4, **more}
    torch.manual_seed(6)
    return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**sizes))


@torch.no_grad()
def same_as_alone(family, dtype, **constants):
    """A model of transformers, whole and in a pipeline, with and without a mask."""
    tokens = torch.randint(3, 64, (5, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([6, 3, 5, 6, 2])[:, None]).long()
    for masked in (True, False):
        model = model_of(family).to(dtype).eval()
        batch = {"input_ids": tokens, **({"attention_mask": mask} if masked else {})}
        if family == "T5":
            batch["decoder_input_ids"] = tokens.flip(1)
        expected = model(**batch, **constants)
        example = {name: tensor[:2] for name, tensor in batch.items()}
        piped = prepare_pippy(model, example_kwargs={**example, **constants}, gather_output=True)
        output = piped(**batch, **constants)
        assert type(output) is type(expected) and list(output) == list(expected), (list(output), list(expected))
        # Kernels of other batch sizes add in another order.
        close = {} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
        for mine, value in zip(flat(output.to_tuple()), flat(expected.to_tuple()), strict=True):
            torch.testing.assert_close(mine, value, **close)
        assert_same_everywhere(flat(output.to_tuple()))


def check_bert():
    same_as_alone("Bert", torch.float32)


def slow_models_of_transformers():
    same_as_alone("GPT2", torch.float32, use_cache=False)
    same_as_alone("Llama", torch.float32, use_cache=False, output_hidden_states=True)
    same_as_alone("Llama", torch.bfloat16, use_cache=False)
    same_as_alone("T5", torch.float32, use_cache=False)
