"""Sequences shared by ranks equal sequences in one process: attention, training, losses; and what is refused, by all ranks."""

import copy
import warnings

import torch
from expect import full, raised
from harness import everywhere, fresh_accelerator, rank, world
from models import tiny
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

from accelerate import ParallelismConfig
from accelerate.data_loader import PackingCollator
from accelerate.extensions.sequence import sequence
from accelerate.extensions.sequence.sequence import aggregate_loss, shift_labels
from accelerate.strategies import mesh
from accelerate.utils import FullyShardedDataParallelPlugin

warnings.simplefilter("ignore", FutureWarning)
KINDS = ["cp", "sp"]
LENGTH, WORDS = 16, 40


def layout_of(axis, size):
    own = {"cp_size": size} if axis == "cp" else {"sp_size": size, "sp_backend": "torch"}
    return ParallelismConfig(**own)


def ready(axis, *models):
    accelerator = fresh_accelerator(parallelism_config=layout_of(axis, world()))
    accelerator._prepare_device_mesh()
    assert sequence.prepare(accelerator, axis, models) == models
    return accelerator


def near(mine, theirs, what):
    worst = (mine - theirs).abs().max().item()
    assert mine.shape == theirs.shape and worst < 1e-5, (what, mine.shape, theirs.shape, worst)


def my_part(whole, accelerator, axis, dim):
    part = accelerator.torch_device_mesh[axis]
    return whole.chunk(part.size(), dim=dim)[part.get_local_rank()]


def check_attention_equals_the_whole():
    cases = [  # heads, key heads, causal, scale, value width
        (4, 4, False, None, 6),
        (4, 4, True, None, 6),
        (4, 2, True, 0.3, 6),
        (8, 1, True, None, 6),
        (4, 4, True, None, 10),
        (4, 4, False, 0.7, 6),
    ]
    for axis in KINDS:
        accelerator = ready(axis)
        for heads, shared, causal, scale, width in cases:
            torch.manual_seed(heads + shared)
            shapes = [(heads, 6), (shared, 6), (shared, width), (heads, width)]
            q, k, v, weights = (torch.randn(2, count, LENGTH, last) for count, last in shapes)
            options = {"is_causal": causal, "scale": scale, "enable_gqa": heads != shared}
            whole = [t.clone().requires_grad_() for t in (q, k, v)]
            expected = F.scaled_dot_product_attention(*whole, **options)
            (expected * weights).sum().backward()
            with accelerator.maybe_context_parallel(buffers=[q, k, v, weights], buffer_seq_dims=[2, -2, 2, 2]):
                for call in (F.scaled_dot_product_attention, imported_by_name):
                    mine = [t.clone().requires_grad_() for t in (q, k, v)]
                    out = call(*mine, **options)
                    (out * weights).sum().backward()
                    what = (axis, heads, shared, causal, scale, width)
                    near(out, my_part(expected, accelerator, axis, 2), what)
                    for one, full in zip(mine, whole, strict=True):
                        near(one.grad, my_part(full.grad, accelerator, axis, 2), what)
            # Outside it is the plain one again.
            near(F.scaled_dot_product_attention(q, k, v, **options), expected.detach(), "outside")


def check_buffers_come_back():
    for axis in KINDS:
        accelerator = ready(axis)
        share = LENGTH // world()
        ids = torch.arange(2 * LENGTH).reshape(2, LENGTH)
        base = torch.arange(3.0 * LENGTH).reshape(LENGTH, 3)
        view = base[:, 1]  # not contiguous, and shares memory
        wide = torch.arange(LENGTH)[None].expand(2, -1)
        gone = torch.arange(LENGTH)
        before = [t.clone() for t in (ids, base, view, wide)]
        with accelerator.maybe_context_parallel([ids, view, wide, gone], [1, 0, -1, 0], no_restore_buffers={gone}):
            mine = slice(rank() * share, (rank() + 1) * share)
            assert torch.equal(ids, before[0][:, mine]) and torch.equal(view, before[2][mine])
            assert torch.equal(wide, before[3][:, mine]) and torch.equal(base, before[1])
            with raised(RuntimeError, "inside itself"), accelerator.maybe_context_parallel([ids], [1]):
                pass
            assert ids.shape == (2, share)
        with raised(KeyError, "mine"), accelerator.maybe_context_parallel([ids, view, wide], [1, 0, 1]):
            raise KeyError("mine")
        for tensor, old in zip((ids, base, view, wide), before, strict=True):
            assert torch.equal(tensor, old) and tensor.stride() == tensor.stride()
        assert torch.equal(gone, torch.arange(LENGTH)[mine])
        # A backward that still needs a part which is complete again fails, and does not use the whole.
        table = nn.Embedding(2 * LENGTH, 4)
        with accelerator.maybe_context_parallel([ids], [1]):
            late = table(ids).sum()
        with raised(RuntimeError, "modified by an inplace operation"):
            late.backward()
        with accelerator.maybe_context_parallel():  # cut manually
            pass


def check_bad_input_is_refused_together():
    for axis in KINDS:
        accelerator = ready(axis)
        size = world()
        ids, enter = torch.arange(LENGTH)[None], accelerator.maybe_context_parallel
        odd = torch.arange(LENGTH + 1)[None]
        unit = size * (2 if axis == "cp" else 1)
        cases = [
            ([odd], [1], None, ("not divisible by", f"= {LENGTH // unit} x {unit} + 1", f"to {LENGTH + unit}")),
            ([ids], [1, 1], None, ("1 buffers and 2 buffer_seq_dims",)),
            ([ids], [2], None, ("buffer_seq_dims[0] is 2", "(1, 16)")),
            ([ids, ids], [1, 1], None, ("twice",)),
            ([ids, odd], [1, 1], None, ("lengths [16, 17]",)),
            ([ids, nn.Parameter(torch.ones(LENGTH))], [1, 0], None, ("requires a gradient",)),
            ([ids, torch.ones(LENGTH, requires_grad=True) * 2], [1, 0], None, ("requires a gradient",)),
            ([ids, "text"], [1, 0], None, ("buffers[1] is a str",)),
            ([ids], [1], {odd}, ("not in buffers",)),
            ([ids + rank()], [1], None, ("same batch",)),
            # One rank alone is wrong; the others learn of it.
            ([odd if rank() else ids], [1], None, ("not divisible",)),
        ]
        for buffers, dims, lasting, fragments in cases:
            with raised(ValueError, *fragments), enter(buffers, dims, lasting):
                raise AssertionError("entered")
        assert torch.equal(ids, torch.arange(LENGTH)[None])
        q = torch.randn(1, 6, 4, 8)
        with enter([ids], [1]):
            with raised(ValueError, "is_causal=True", "full one"):
                F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))
            with raised(ValueError, "MultiheadAttention"):
                nn.MultiheadAttention(8, 2, batch_first=True)(q[0], q[0], q[0], need_weights=False)
            if axis == "cp":
                with raised(ValueError, "dropout_p=0.1", "attn_pdrop"):
                    F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
            else:
                F.scaled_dot_product_attention(q[:, :4], q[:, :4], q[:, :4], dropout_p=0.1)
                heads = 2 * size - 1
                with raised(ValueError, f"{heads} heads and 1 heads of keys"):
                    F.scaled_dot_product_attention(q[:, :1].expand(-1, heads, -1, -1), q[:, :1], q[:, :1])
        with raised(ValueError, "MultiheadAttention"):
            sequence.prepare(accelerator, axis, (nn.TransformerEncoderLayer(8, 2),))


class Plain(nn.Module):
    """A causal language model of one layer, of torch alone; its attention is computed again in the backward pass."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS)

    def attend(self, hidden):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inward(hidden).chunk(3, dim=-1))
        return self.outward(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, ids, places):
        hidden = self.words(ids) + self.places(places)
        return self.head(hidden + checkpoint(self.attend, hidden, use_reentrant=False))


def llama():
    sizes = {"vocab_size": WORDS, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return tiny("Llama", attn_implementation="sdpa", **sizes)


def batches():
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, WORDS, (2, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 5 + step :] = 0  # most of a row is padding, so shards have unequal numbers of tokens
        yield ids * mask, mask, torch.where(mask == 1, ids, -100)


def mean_loss(logits, shifted):
    return F.cross_entropy(logits.flatten(0, -2).float(), shifted.flatten(), ignore_index=-100)


def trained_whole(model, forward):
    model, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, mask, labels in batches():
        loss = mean_loss(forward(model, ids, mask), shift_labels(labels))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def trained_shared(model, forward, axis, sharded, own_loss=None):
    """Train the whole way: `prepare` of an Accelerator with FSDP2 or DDP, `backward`, the optimizer."""
    model, layout = copy.deepcopy(model), layout_of(axis, world())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = fresh_accelerator(fsdp_plugin=plugin, parallelism_config=layout)
    shared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group, losses = accelerator.torch_device_mesh[axis].get_group(), []
    for ids, mask, labels in batches():
        shifted = shift_labels(labels)
        with accelerator.maybe_context_parallel([ids, mask, shifted], [1, 1, 1]):
            if own_loss:
                loss = own_loss(shared, ids, shifted)
            else:
                loss = mean_loss(forward(shared, ids, mask, accelerator._cp_context.active.positions), shifted)
            loss = aggregate_loss(loss, (shifted != -100).sum(), group=group)
            accelerator.backward(loss)
        losses.append(sum(everywhere(loss.item())) / world())
        optimizer.step()
        optimizer.zero_grad()
    assert all(hasattr(parameter, "full_tensor") is sharded for parameter in model.parameters())
    return losses, model


def same_training(first, second, what):
    (losses, model), (others, other) = first, second
    near(torch.tensor(losses), torch.tensor(others), (what, "losses"))
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        near(one.detach(), full(two).detach(), (what, name))


def plain_forward(model, ids, mask, places=None):
    return model(ids, torch.arange(ids.shape[1])[None] if places is None else places)


def hf_forward(model, ids, mask, places=None):
    return model(input_ids=ids, attention_mask=mask).logits


def own_loss_of_transformers(shared, ids, shifted):
    return shared(input_ids=ids, labels=shifted, shift_labels=shifted).loss


def check_facade_trains_the_same():
    for make, forward, sharded, own_loss in (
        (Plain, plain_forward, True, None),
        (llama, hf_forward, True, None),
        (llama, hf_forward, False, own_loss_of_transformers),
    ):
        model = make()
        expected = trained_whole(model, forward)
        for axis in KINDS:
            done = trained_shared(model, forward, axis, sharded, own_loss=own_loss)
            same_training(expected, done, (make.__name__, axis, own_loss))


PACKS = [  # lengths of documents in rows of 32 tokens, for each step; parts begin within documents
    [[5, 9, 1, 12], [20, 11]],
    [[32], [3, 3, 17, 2, 2]],
    [[8, 8, 8, 8], [15, 1, 16]],
]


def packed_rows():
    for step, lengths in enumerate(PACKS):
        generator = torch.Generator().manual_seed(step)
        documents = [
            [{"input_ids": torch.randint(1, WORDS, (n,), generator=generator)} for n in row] for row in lengths
        ]
        rows = [PackingCollator(2 * LENGTH)(row) for row in documents]
        whole = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        yield whole, [one for row in documents for one in row]


def trained_padded(model, attention):
    model, losses = copy.deepcopy(model), []
    model.config._attn_implementation = attention
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, documents in packed_rows():
        ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in documents], batch_first=True)
        mask = (ids != 0).long()
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = mean_loss(logits, shift_labels(ids.masked_fill(mask == 0, -100)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def trained_packed(model, axis, sharded, torchs_own=False, checkpointed=False):
    """Train on packed rows that ranks share; with `torchs_own` as on an accelerator, whose parts are of the front and the back."""
    model = copy.deepcopy(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = fresh_accelerator(fsdp_plugin=plugin, parallelism_config=layout_of(axis, world()))
    if torchs_own:
        accelerator._prepare_device_mesh()
        part = mesh.submesh(accelerator.torch_device_mesh, axis)
        accelerator._cp_context = sequence.TorchRegion(part, "allgather")
    shared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group, losses = accelerator.torch_device_mesh[axis].get_group(), []
    for row, _ in packed_rows():
        ids, places, shifted = row["input_ids"], row["position_ids"], shift_labels(row["labels"])
        with accelerator.maybe_context_parallel([ids, places, shifted], [1, 1, 1]):
            logits = shared(input_ids=ids, position_ids=places).logits
            loss = aggregate_loss(mean_loss(logits, shifted), (shifted != -100).sum(), group=group)
            accelerator.backward(loss)
        losses.append(sum(everywhere(loss.item())) / world())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def check_packed_documents_train_as_padded_ones():
    torch.manual_seed(0)
    model = llama()
    expected = trained_padded(model, "sdpa")
    same_training(expected, trained_padded(model, "eager"), "eager, in one process")
    for axis, options in (("cp", {}), ("sp", {}), ("cp", {"torchs_own": True}), ("cp", {"checkpointed": True})):
        done = trained_packed(model, axis, sharded=not options, **options)
        same_training(expected, done, (axis, options))


def slow_compiled_before_or_after():
    model = Plain()
    ids = torch.randint(0, WORDS, (2, LENGTH))
    places = torch.arange(LENGTH)[None]
    expected = model(ids, places)
    expected.square().mean().backward()
    grad = model.inward.weight.grad.clone()
    for axis in KINDS:
        compiled = torch.compile(model, backend="aot_eager")
        near(compiled(ids, places), expected, "compiled outside")  # a graph of plain attention exists now
        accelerator = ready(axis, compiled)
        model.zero_grad()
        with accelerator.maybe_context_parallel([ids, places], [1, 1]):
            out = compiled(ids, places)
            out.square().mean().backward()
        near(out, my_part(expected, accelerator, axis, 1), (axis, "compiled"))
        total = model.inward.weight.grad.clone()
        torch.distributed.all_reduce(total)
        near(total / world(), grad, (axis, "compiled, gradient"))
        near(compiled(ids, places), expected, "outside again")


def check_uneven_losses_are_exact():
    size = world()
    weight, rows = torch.randn(3, WORDS), torch.randn(6 * size, 3)
    targets = torch.randint(0, WORDS, (6 * size,))
    targets[1:5] = -100  # rank 0 has two tokens
    targets[6 * (size - 1) :] = -100  # the last rank has none
    whole = weight.clone().requires_grad_()
    expected = F.cross_entropy(rows @ whole, targets)
    expected.backward()
    mine = weight.clone().requires_grad_()
    part = slice(6 * rank(), 6 * rank() + 6)
    count = (targets[part] != -100).sum()
    plain = F.cross_entropy(rows[part] @ mine, targets[part])
    loss = aggregate_loss(plain, int(count) if rank() else count)
    loss.backward()
    near(loss.detach(), expected.detach(), "value")
    averaged = mine.grad.clone()
    torch.distributed.all_reduce(averaged)
    near(averaged / size, whole.grad, "gradient")
    with raised(ValueError, "(2,)"):
        aggregate_loss(torch.ones(2), 2)


def slow_counted_windows_are_exact():
    """Each rank counts its own tokens, and they differ from rank to rank; without FSDP gradients are kept meanwhile."""
    torch.manual_seed(0)
    model, windows = llama(), list(batches())
    counts = [(shift_labels(labels) != -100).sum() for _, _, labels in windows]
    whole = copy.deepcopy(model)
    for (ids, _, labels), count in zip(windows, counts, strict=True):
        (mean_loss(whole(input_ids=ids).logits, shift_labels(labels)) * count / sum(counts)).backward()
    for axis in KINDS:
        for sharded in (False, True):
            accelerator = fresh_accelerator(
                parallelism_config=layout_of(axis, world()),
                fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None,
                gradient_accumulation_steps=len(windows),
            )
            shared = copy.deepcopy(model)
            shared, _ = accelerator.prepare(shared, torch.optim.SGD(shared.parameters(), lr=0.1))
            for ids, _, labels in windows:
                ids, shifted = ids.clone(), shift_labels(labels)
                with accelerator.maybe_context_parallel([ids, shifted], [1, 1]):
                    mine = int((shifted != -100).sum())
                    with accelerator.accumulate(shared, num_items=mine):
                        logits = shared(input_ids=ids).logits.flatten(0, 1)
                        summed = F.cross_entropy(logits, shifted.flatten(), ignore_index=-100, reduction="sum")
                        accelerator.backward(summed / max(mine, 1))
            for found, wanted in zip(shared.parameters(), whole.parameters(), strict=True):
                near(full(found.grad), wanted.grad, (axis, sharded))


def check_teachers_follow():
    """A model that `prepare_model` gets for evaluation alone is right inside the context, or refused there, and free outside."""
    for axis in KINDS:
        accelerator = fresh_accelerator(parallelism_config=layout_of(axis, world()))  # the teacher is prepared first
        teacher, other = accelerator.prepare_model(llama(), evaluation_mode=True), llama()
        other.config._attn_implementation = "eager"
        eager = accelerator.prepare_model(other, evaluation_mode=True)
        ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        whole = teacher(input_ids=ids).logits
        eager(input_ids=ids)
        with accelerator.maybe_context_parallel([ids], [1]):
            near(teacher(input_ids=ids).logits, my_part(whole, accelerator, axis, 1), axis)
            with raised(ValueError, "'eager'", "outside of maybe_context_parallel"):
                eager(input_ids=ids)
        with raised(ValueError, "'eager'"):
            other = llama()
            other.config._attn_implementation = "eager"
            accelerator.prepare_model(other)


def check_models_that_cannot_are_refused():
    for axis in KINDS:
        model = llama()
        accelerator = ready(axis, model)
        ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % WORDS
        places, packed = torch.arange(LENGTH)[None], torch.cat((torch.arange(12), torch.arange(4)))[None]
        right, left = torch.ones_like(ids), torch.ones_like(ids)
        right[0, 3:], left[0, :3] = 0, 0
        share = LENGTH // world()
        buffers = [ids, places, packed, right, left]
        whole = model(input_ids=ids, attention_mask=right).logits
        later = ids.clone()
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers)):
            for wrong, words in (
                ({"labels": ids}, ("labels=", "shift_labels")),
                ({"input_ids": later}, ("Name input_ids in the buffers",)),
                ({"position_ids": packed, "attention_mask": right}, ("packed", "Omit attention_mask")),
                ({"position_ids": packed.clone()}, ("made for a part", "pass the same tensor")),
                ({"position_ids": torch.arange(share)[None]}, ("made for a part",)),
                ({"attention_mask": left}, ("padding before real tokens",)),
                ({"attention_mask": torch.ones(2, 1, share, share)}, ("rows and columns",)),
            ):
                with raised(ValueError, *words):
                    model(**{"input_ids": ids, **wrong})
            expected = my_part(whole, accelerator, axis, 1)
            real = right.bool()  # the output at padding is undefined
            for out in (
                model(ids, right),
                model(input_ids=ids, attention_mask=right, position_ids=places),
                model(input_ids=ids, position_ids=places),
                model(input_ids=ids, inputs_embeds=None),
            ):
                near(out.logits[real], expected[real], (axis))
            with raised(ValueError, "other documents"):
                model(input_ids=ids, position_ids=packed)
        # A model that was hooked is copied without process groups.
        near(copy.deepcopy(model)(input_ids=ids).logits, model(input_ids=ids).logits, "copy")
