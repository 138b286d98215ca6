"""Shared sequences without other processes: torch's own path by recorded calls, buffers, hooks, heads, refusals."""

import contextlib
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from accelerate.extensions.sequence import models, sequence
from accelerate.extensions.sequence import region as region_module
from accelerate.extensions.sequence.config import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accelerate.extensions.sequence.region import Active, Region
from accelerate.extensions.sequence.sequence import aggregate_loss, shift_labels
from cases import cases

PLAIN = F.scaled_dot_product_attention


class Mesh:
    """One dimension of some ranks, of which this is the second."""

    device_type = "cpu"

    def __init__(self, axis="cp", ranks=2):
        self.mesh_dim_names, self.ranks = (axis,), ranks

    def __getitem__(self, name):
        return self

    def get_group(self):
        return "the group"

    def size(self):
        return self.ranks

    def get_local_rank(self):
        return 1


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The other rank says what this one says."""

    def same_on_all(mine, device, group):
        assert group == "the group"
        return True

    monkeypatch.setattr(region_module, "same_on_all", same_on_all)


@pytest.fixture
def first_rank(monkeypatch):
    """The first rank has what this one has, with the places before."""

    def all_gather(parts, mine, group):
        before = mine.clone()
        before[:2] -= mine.shape[-1]
        before[2] = 1  # it pads nothing
        for part, content in zip(parts, (before, mine), strict=True):
            part.copy_(content)

    monkeypatch.setattr(models.distributed, "all_gather", all_gather)
    monkeypatch.setattr(models.distributed, "get_backend", lambda group: "gloo")


@pytest.fixture
def torch_calls(monkeypatch):
    """Record what torch's context parallelism is requested, and cut as it does: in the tensors' own memory."""
    calls, options = [], SimpleNamespace()

    @contextlib.contextmanager
    def context_parallel(mesh, *, buffers, buffer_seq_dims, no_restore_buffers):
        lasting = [any(b is other for other in no_restore_buffers) for b in buffers]
        calls.append(("enter", mesh, [tuple(b.shape) for b in buffers], list(buffer_seq_dims), lasting))
        calls.append(("balanced", options.enable_load_balance))
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            part = buffer.chunk(2, dim)[1].clone()
            buffer.resize_(part.shape).copy_(part)
        F.scaled_dot_product_attention = lambda *args, **kwargs: calls.append("torch's") or PLAIN(*args, **kwargs)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = PLAIN
            calls.append("leave")

    monkeypatch.setattr(sequence, "_torch_parts", lambda: (context_parallel, lambda how: calls.append(how), options))
    return calls


def stub(device, strategy="allgather"):
    layout = SimpleNamespace(cp_size=2, cp_handler=TorchContextParallelConfig(cp_comm_strategy=strategy))
    parts = {"parallelism_config": layout, "torch_device_mesh": Mesh(), "_cp_context": None}
    return SimpleNamespace(device=torch.device(device), **parts)


@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
def test_an_accelerator_gets_torchs_own(torch_calls, strategy):
    accelerator = stub("cuda", strategy)
    assert sequence.prepare(accelerator, "cp", ("other", 3)) == ("other", 3)
    region = accelerator._cp_context
    assert isinstance(region, sequence.TorchRegion)
    base = torch.arange(24.0).reshape(8, 3)
    ids, view, gone = torch.arange(16).reshape(2, 8), base[:, 1], torch.arange(8)
    with region([ids, view, gone], [-1, 0, 0], {gone}):
        assert ids.tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]] and view.tolist() == [13.0, 16.0, 19.0, 22.0]
        assert torch.equal(base, torch.arange(24.0).reshape(8, 3))  # torch would have cut the memory behind the view
        assert region.active.positions.tolist() == [[4, 5, 6, 7]]
        q = torch.randn(1, 2, 4, 8)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        imported_by_name(q, q, q, is_causal=True)
        for call in (F.scaled_dot_product_attention, imported_by_name):
            with pytest.raises(ValueError, match="the full one"):
                call(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))
    assert F.scaled_dot_product_attention is PLAIN and region.active is None
    assert torch.equal(ids, torch.arange(16).reshape(2, 8))
    assert view._base is not None and gone.tolist() == [4, 5, 6, 7]
    shapes = [(2, 8), (8,), (8,), (1, 8)]
    # Putting back is ours, so torch keeps no copies.
    assert torch_calls[:2] == [strategy, ("enter", accelerator.torch_device_mesh, shapes, [1, 0, 0, 1], [True] * 4)]
    assert torch_calls.count("torch's") == 4 and torch_calls[-1] == "leave" and ("balanced", True) in torch_calls


class Attending(nn.Module):
    """Says whether it is causal as the attention of transformers does; without a word it is."""

    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=getattr(self, "is_causal", False))


@pytest.mark.parametrize(
    "said, balanced", [((True,), True), ((None,), True), ((False,), False), ((True, False), False)]
)
def test_only_causal_attention_is_balanced(torch_calls, said, balanced):
    """Torch refuses to balance the attention of BERT, and was asked to."""
    accelerator = stub("cuda")
    for one in said:  # prepared one after the other
        sequence.prepare(accelerator, "cp", (nn.Sequential(Attending(one)).eval(),))
    region = accelerator._cp_context
    x = torch.randn(1, 2, 8, 4)
    with region([x], [2]):
        assert torch_calls[-1] == ("balanced", balanced)
        if said == (None,):
            with pytest.raises(ValueError, match="is_causal=False.*Set `is_causal = False`"):
                Attending()(x)
        else:
            assert Attending(said[-1])(x).shape == (1, 2, 4, 4) and torch_calls[-1] == "torch's"
    odd = pytest.raises(ValueError, match="divisible by 4") if balanced else contextlib.nullcontext()
    with odd, region([torch.arange(6)], [0]):  # two parts for each rank, or one
        pass


def test_torch_has_what_the_region_sets():
    """Its options are private; a torch without this one would balance all the same."""
    assert sequence._torch_parts()[2].enable_load_balance is True


def test_torchs_own_needs_a_buffer_and_balances(torch_calls):
    accelerator = stub("cuda")
    sequence.prepare(accelerator, "cp", ())
    with pytest.raises(ValueError, match="no buffers"), accelerator._cp_context():
        pass
    message = r"10 tokens.*by 4, 2 x cp_size=2 \(.*10 = 2 x 4 \+ 2. Pad it by 2 to 12, or cut it to 8"
    with pytest.raises(ValueError, match=message), accelerator._cp_context([torch.arange(10)], [0]):
        pass
    assert torch_calls == []


def test_cpu_gets_the_reference_path_once():
    accelerator = stub("cpu", "alltoall")
    sequence.prepare(accelerator, "cp", ())
    kept = accelerator._cp_context
    sequence.prepare(accelerator, "cp", ())
    assert type(kept) is sequence.GatheringRegion and accelerator._cp_context is kept
    copied = pickle.loads(pickle.dumps(kept))  # without its group
    assert copied.group is None and copied.size == 2
    with pytest.raises(RuntimeError, match="Call `prepare` again"), copied():
        pass


# -- the region ------------------------------------------------------------------------------------------------------


class AddingOne(Region):
    def _attend(self, query, *others):
        return query + 1


def make_region():
    return AddingOne("cp", Mesh(), cuts=2)


def test_attention_is_ours_inside_alone_and_after_an_error():
    region, q = make_region(), torch.zeros(1, 1, 2, 2)
    ids = torch.arange(8)
    with pytest.raises(KeyError), region([ids], [0]):
        assert (F.scaled_dot_product_attention(q, q, q) == 1).all() and (imported_by_name(q, q, q) == 1).all()
        raise KeyError
    assert F.scaled_dot_product_attention is PLAIN and (imported_by_name(q, q, q) == 0).all()
    assert ids.tolist() == list(range(8)) and region.active is None
    with region([ids], [0]):
        assert ids.tolist() == [4, 5, 6, 7]


def test_elsewhere_than_on_cpu_notes_are_compared_once(monkeypatch):
    told = []
    monkeypatch.setattr(region_module, "same_on_all", lambda *args: told.append(args) or True)
    region = make_region()
    buffer = torch.empty(8, device="meta")
    for _ in range(3):
        region._check([buffer], [0], [])
    assert len(told) == 1
    with pytest.raises(ValueError, match="not divisible"):
        region._check([torch.empty(9, device="meta")], [0], [])
    assert len(told) == 1


# -- models ----------------------------------------------------------------------------------------------------------


class PreTrainedModel(nn.Module):
    """What a model of transformers looks like from here."""

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa", **config)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **kwargs}


class TinyForCausalLM(PreTrainedModel):
    pass


def eager():
    model = TinyForCausalLM()
    model.config._attn_implementation = "eager"
    return model


class NoPositions(PreTrainedModel):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


@cases(
    "model, said",
    (NoPositions(), "takes no position_ids"),
    (type("TinyForSequenceClassification", (PreTrainedModel,), {})(), "pools"),
    (TinyForCausalLM(is_encoder_decoder=True), "encoder-decoder"),
    (TinyForCausalLM(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    (nn.Sequential(nn.MultiheadAttention(4, 2)), "0 is a torch.nn.MultiheadAttention"),
    (nn.Sequential(eager()), "'eager'.*attn_implementation='sdpa'"),
)
def test_models_that_need_the_whole_are_refused(model, said):
    with pytest.raises(ValueError, match=said):
        models.check(model, "cp")


class Attention(nn.Module):
    is_causal = True

    def forward(self, hidden, attention_mask=None, **kwargs):
        return attention_mask, kwargs


def entered(model):
    """The model, hooked to a region that is entered."""
    region = make_region()
    models.attach(model, region)
    region.active = Active(8, torch.tensor([[4, 5, 6, 7]]))
    return model


def test_hooks_act_inside_alone_and_once():
    region = make_region()
    model = TinyForCausalLM()
    model.self_attn = Attention()
    outer = nn.ModuleList([model])
    models.attach(outer, region)
    models.attach(outer, region)
    assert [len(module._forward_pre_hooks) for module in (outer, model, model.self_attn)] == [1, 1, 1]
    assert model.self_attn(1, "mask") == ("mask", {})
    region.active = Active(8, torch.tensor([[4, 5, 6, 7]]))
    assert model.self_attn(1, "mask") == (None, {"is_causal": True})
    assert model.self_attn(1, attention_mask="mask") == (None, {"is_causal": True})
    got = model(torch.ones(1, 4))
    assert got["position_ids"] is region.active.positions and got["attention_mask"] is None
    with pytest.raises(ValueError, match="shift_labels=shifted"):
        model(torch.ones(1, 4), labels=torch.ones(1, 4))
    with pytest.raises(ValueError, match="8 / 2 = 4. Name input_ids"):
        model(torch.ones(1, 8))
    model(torch.ones(1, 4), labels=torch.ones(1, 4), shift_labels=torch.ones(1, 4))


def test_training_outside_is_said_once():
    region, model = make_region(), nn.Linear(2, 2)
    models.attach(model, region)
    models.attach(model, region)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(torch.ones(2))
        model.train()
        with torch.no_grad():
            model(torch.ones(2))
    with pytest.warns(UserWarning, match="Linear is trained outside.*cp_size=2.*nothing is saved") as caught:
        for _ in range(3):
            model(torch.ones(2))
    assert len(caught) == 1
    inside = nn.Linear(2, 2)
    models.attach(inside, region)
    with warnings.catch_warnings(), region([torch.arange(8)], [0]):
        warnings.simplefilter("error")
        inside(torch.ones(2))


def test_positions_that_do_not_start_at_zero_must_be_given(first_rank):
    model = TinyForCausalLM()
    model.position_embeddings = nn.Embedding(8, 2, padding_idx=1)
    entered(model)
    with pytest.raises(ValueError, match="without position_ids"):
        model(torch.ones(1, 4))
    given = torch.tensor([[6, 7, 8, 9]])
    assert model(torch.ones(1, 4), position_ids=given)["position_ids"] is given


def test_one_process_has_its_own_mean():
    loss = torch.tensor(2.0, requires_grad=True)
    aggregate_loss(loss * 3, 5).backward()
    assert loss.grad.item() == 3.0


@cases(
    "config, refused",
    ({"sliding_window": 4}, True),
    ({"sliding_window": 8}, False),
    ({"sliding_window": 4, "use_sliding_window": False}, False),
    ({"sliding_window": 4, "layer_types": ["full_attention"]}, False),
    ({"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}, True),
)
def test_a_window_smaller_than_the_sequence(config, refused):
    model = entered(TinyForCausalLM(**config))
    with pytest.raises(ValueError, match="window of 4 tokens") if refused else contextlib.nullcontext():
        model(torch.ones(1, 4))


# -- labels and losses -----------------------------------------------------------------------------------------------


def test_labels_shift_once():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_labels(labels).tolist() == [[2, 3, -100], [5, 6, -100]]
    assert shift_labels(labels, ignore_index=0).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert labels.tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(ValueError, match="scalar"):
        shift_labels(torch.tensor(1))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_under_attention_that_looks_ahead(first_rank, causal):
    model = TinyForCausalLM()
    model.self_attn = Attention()
    model.self_attn.is_causal = causal
    entered(model)
    whole = torch.ones(1, 8)
    assert model(torch.ones(1, 4), attention_mask=whole)["attention_mask"] is None
    whole[0, 6:] = 0
    with pytest.raises(ValueError, match="causal: False") if not causal else contextlib.nullcontext():
        model(torch.ones(1, 4), attention_mask=whole)


# -- Ulysses ---------------------------------------------------------------------------------------------------------


def ulysses(handler=None):
    layout = SimpleNamespace(sp_size=4, sp_handler=handler)
    return SimpleNamespace(parallelism_config=layout, torch_device_mesh=Mesh("sp", 4), _cp_context=None)


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_a_mesh_without_the_dimension_is_refused(axis):
    accelerator = stub("cpu") if axis == "cp" else ulysses()
    accelerator.torch_device_mesh = None
    with pytest.raises(ValueError, match=f"no dimension '{axis}'"):
        sequence.prepare(accelerator, axis, ())


def test_prepare_asks_the_configuration():
    accelerator = ulysses()
    fits = PreTrainedModel(num_attention_heads=8, num_key_value_heads=2)
    assert sequence.prepare(accelerator, "sp", (fits, "loader")) == (fits, "loader")
    assert isinstance(accelerator._cp_context, sequence.SequenceRegion)
    assert len(fits._forward_pre_hooks) == 2
    with pytest.raises(ValueError, match="PreTrainedModel has 6 heads"):
        sequence.prepare(ulysses(), "sp", (nn.Sequential(PreTrainedModel(num_attention_heads=6)),))
    nested = PreTrainedModel(num_attention_heads=8)
    nested.config.get_text_config = lambda: SimpleNamespace(num_attention_heads=6)
    with pytest.raises(ValueError, match="6 heads"):
        sequence.prepare(ulysses(), "sp", (nested,))


def test_settings_without_use_here():
    with pytest.raises(ValueError, match="flash_attention_2"):
        config = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
        sequence.prepare(ulysses(config), "sp", ())
    with pytest.warns(UserWarning, match="sp_seq_length=64 has no effect"):
        sequence.prepare(ulysses(DeepSpeedSequenceParallelConfig(sp_seq_length=64)), "sp", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator = ulysses(DeepSpeedSequenceParallelConfig(sp_seq_length=64, sp_seq_length_is_variable=False))
        sequence.prepare(accelerator, "sp", ())
    region = accelerator._cp_context
    assert region._odd_length(64) is None and "sp_seq_length=64" in region._odd_length(32)
    free = sequence.SequenceRegion(Mesh("sp", 4))
    assert free._odd_length(12) is None
    assert "6 = 1 x 4 + 2. Pad it by 2 to 8, or cut it to 4" in free._odd_length(6)


def test_tensors_without_heads_are_refused():
    flat = torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"\(2, 4, 8\)"):
        sequence.SequenceRegion(Mesh("sp", 2))._attend(flat, flat, flat, 0.0, False, None, False)
