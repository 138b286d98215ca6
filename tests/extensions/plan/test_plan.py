"""Plans: which layouts fit and which do not, the file that launching takes, and the estimate next to what torch allocates."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.devices import table
from accelerate.extensions.configure import config_utils
from accelerate.extensions.plan import activations, ceilings
from accelerate.extensions.plan import command as plan
from accelerate.extensions.plan.activations import measure
from accelerate.extensions.plan.torch_private import convolution_scratch
from accelerate.extensions.reports import device_specs
from accelerate.extensions.reports.estimator import Layout, memory, resting, traffic
from accelerate.extensions.simulate.torch_private import shapes_only
from cases import cases

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "num_hidden_layers": 5}
LLAMA |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


class Block(nn.Module):
    """A layer that keeps its input for the backward pass."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.sigmoid(self.layer(x))


class Net(nn.Module):
    """Equal blocks."""

    _no_split_modules = ("Block",)

    def __init__(self, count=6, width=64):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def batch(size, sequence):
    return {"x": torch.ones(size, sequence, 64)}


def test_activations_are_measured_and_blocks_that_are_left_out_are_put_back():
    """Manually: each block keeps its output, 64 numbers a token, for itself and the next one."""
    profile = measure(Net, batch, Layout(micro_batch=2), 8)
    kept = 4 * 64 * 16
    forward = [segment for segment in profile.segments if not segment.backward and segment.unit]
    assert [segment.unit for segment in forward] == [f"blocks.{number}" for number in range(6)]
    # The input of the first block is the batch; a product is there until its sigmoid is.
    assert [segment.end for segment in forward] == [kept * (2 + number) for number in range(6)]
    assert [segment.peak - segment.end for segment in forward] == [kept] * 6
    assert profile.flops == 6 * 2 * 16 * 64 * 64 * 3 - 2 * 16 * 64 * 64, "the batch needs no gradient"
    whole = measure(lambda: Net(3), batch, Layout(micro_batch=2), 8)
    larger = measure(Net, batch, Layout(micro_batch=4), 8)
    assert larger.segments == profile.extended(measure(Net, batch, Layout(), 8), 4).segments
    assert len(whole.segments) == len(profile.segments) - 6


class Both(nn.Module):
    """Two lists of equal blocks, as an encoder and a decoder have."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Net(6), Net(2)

    def forward(self, x):
        return self.encoder(x) + self.decoder(x)


def test_blocks_are_put_back_into_the_list_that_they_were_taken_from(monkeypatch):
    short = measure(Both, batch, Layout(micro_batch=2), 8)
    monkeypatch.setattr(activations, "_RUN", 100)
    whole = measure(Both, batch, Layout(micro_batch=2), 8)
    found, wanted = (
        [(each.unit, each.peak, each.end) for each in profile.segments if each.unit] for profile in (short, whole)
    )
    assert found == wanted
    assert short.flops == whole.flops


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="convolutions have other kernels")
def test_a_convolution_of_the_cpu_has_its_copies():
    """As torch's profiler saw it for 96 and 64 channels of 64 x 64: copies of input and weight, and with the gradient all three."""
    with shapes_only():
        x, w, out = torch.empty(2, 96, 64, 64), torch.empty(64, 96, 3, 3), torch.empty(2, 64, 64, 64)
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        forward = convolution_scratch(torch.ops.aten.convolution.default, (x, w, None, *options), out)
        arguments = (out, x, w, [64], *options, [True] * 3)
        backward = convolution_scratch(torch.ops.aten.convolution_backward.default, arguments, (x, w, None))
        assert convolution_scratch(torch.ops.aten.add.Tensor, (x, x), x) == 0
    assert (forward, backward) == (3145728 + 221184, 2097152 + 3145728 + 221184)


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_a_rank_that_shares_sequences_has_a_part_of_the_activations(llama, axis):
    """Attention exchanges its keys, or its heads, and what it sends is counted; the process has joined no group afterwards."""
    build, inputs = plan.load(llama)
    whole, part = (measure(build, inputs, Layout(fsdp=True, **options), 64) for options in ({}, {axis: 2}))
    assert 0.5 < max(each.peak for each in part.segments) / max(each.peak for each in whole.segments) < 0.6
    # Keys and values to one other, or queries, keys, values and results to half each; in forward and in backward.
    token = {"cp": 2 * 2 * 32, "sp": 64 + 32 + 32 + 64}[axis]
    (sent,) = [each for each in traffic(part, Layout(dp_shard=1, fsdp=True, **{axis: 2})) if each.dimension == axis]
    assert (sent.collective, sent.bytes) == ("all_to_all", 5 * 2 * 32 * token * 4)
    assert not torch.distributed.is_initialized()

    def masked(size, sequence):
        return {**inputs(size, sequence), "attention_mask": torch.ones(size, sequence, dtype=torch.long)}

    part = measure(build, masked, Layout(fsdp=True, **{axis: 2}), 64)
    found = {
        each.collective: each.bytes for each in traffic(part, Layout(fsdp=True, **{axis: 2})) if each.dimension == axis
    }
    # The ranks show each other of each token its place, its position, whether it is real, and whether positions were named.
    assert found == {sent.collective: sent.bytes, "all_gather": 4 * 64 * 4}


def test_a_model_that_recomputes_is_also_measured_without(llama):
    build, inputs = plan.load(llama)

    def recomputing():
        model = build()
        model.gradient_checkpointing_enable()
        return model

    plain, again = (measure(build, inputs, Layout(checkpointing=on), 64).segments for on in (False, True))
    assert measure(recomputing, inputs, Layout(), 64).segments == plain != again


def test_a_peak_has_what_rests_beside_activations():
    profile = measure(Net, batch, Layout(micro_batch=2), 8)
    rest = resting(profile.inventory, Layout())
    parameters = 4 * 6 * 64 * 64
    assert (rest.parameters, rest.gradients, rest.optimizer) == (parameters, parameters, 2 * parameters)
    one, ddp, sharded = (memory(profile, layout) for layout in (Layout(), Layout(dp_replicate=2), Layout(dp_shard=4)))
    assert ddp.total - one.total == ddp.gathered == parameters, "the buckets"
    assert (sharded.parameters, sharded.optimizer) == (parameters // 4, parameters // 2)
    assert one.total >= 4 * parameters
    assert memory(profile, Layout(dp_shard=4, offload=True)).host == parameters


@pytest.mark.parametrize(
    "layout, parts", [(Layout(), 1), (Layout(dp_shard=4), 4), (Layout(dp_replicate=2, zero=3), 2)]
)
def test_frozen_weights_rest_without_gradients_and_moments(layout, parts):
    def frozen():
        model = Net()
        model.blocks[1:].requires_grad_(False)
        return model

    rest = resting(measure(frozen, batch, layout, 8).inventory, layout)
    one = 4 * 64 * 64
    assert rest.parameters == 6 * one // parts
    # DeepSpeed has the trained weights in the optimizer, too.
    assert (rest.gradients, rest.optimizer) == (one // parts, (3 if layout.zero else 2) * one // parts)


def test_what_cannot_be_measured():
    class Looks(Net):
        def forward(self, x):
            return x.sum() if x.sum().item() > 0 else x.mean()

    with pytest.raises(ValueError, match="looks at values"):
        measure(Looks, batch, Layout(), 1)
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        measure(Net, batch, Layout(checkpointing=True), 1)


def test_table_of_devices():
    assert device_specs.device_spec("H100-80GB").memory == 80 * 10**9
    with pytest.raises(ValueError, match="'k80' is not in the table; choose one of b200-180gb"):
        device_specs.device_spec("k80")
    with pytest.raises(ValueError, match="choose one of infiniband-ndr"):
        device_specs.link("x")
    assert all("http" in row.source and "http" in row.node.source for row in device_specs.DEVICES.values())
    assert (
        device_specs.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
        and device_specs.peak_flops("Tesla V100-SXM2-32GB") == 125e12
    )
    assert device_specs.peak_flops("NVIDIA H100 PCIe") is device_specs.peak_flops("GeForce") is None


def words(model, *more):
    return ("plan", str(model), "--gpus", "4", "--gpu", "l4-24gb", "--global_batch", "8", *more)


@pytest.fixture
def llama(place):
    pytest.importorskip("transformers")
    (place / "llama").mkdir()
    (place / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (place / "train.py").touch()
    return "llama"


def test_plan_of_a_configuration_and_the_file_that_launch_takes(accelerate, llama, place):
    status, out, err = accelerate(*words(llama, "--gpus", "2", "--sequence", "32", "--write", "plan.yaml"))
    assert status == 0, err
    parts = ["layout", "DDP 2", "FSDP2 2", "ZeRO 3, 2 ranks", "tp_size=2", "cp_size=2", "sp_size=2", "plan.yaml: "]
    assert all(part in out for part in parts), out
    status, out, err = accelerate("launch", "--config_file", "plan.yaml", "--cpu", "--dry-run", "train.py")
    assert status == 0 and "num_processes" in out, err


def test_experts_are_split_where_a_model_can_split_them(accelerate, place):
    pytest.importorskip("transformers", minversion="5.23")
    content = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (place / "config.json").write_text(json.dumps(content))
    build, inputs = plan.load("config.json")
    profiles = plan.Profiles(build, inputs, 32)
    assert profiles.experts == 4
    whole, split = (Layout(dp_shard=2, fsdp=True, precision="bf16", ep=ep) for ep in (1, 2))
    assert split in plan.layouts(2, 1, 32, "bf16", 4)
    assert split not in plan.layouts(2, 1, 32, "bf16") and split not in plan.layouts(2, 1, 32, "bf16", 3)
    experts = 5 * 4 * 3 * 64 * 128
    profile = profiles.of(split)
    assert sum(item.elements for item in profile.inventory.parameters if item.split == 2) == experts // 2
    mine = [resting(profiles.of(layout).inventory, layout).parameters for layout in (whole, split)]
    assert mine[0] == mine[1], "the same part of all, cut in another way"
    sent = {(each.dimension, each.collective): each.bytes for each in traffic(profile, split)}
    gathered = {(each.dimension, each.collective): each.bytes for each in traffic(profiles.of(whole), whole)}
    assert gathered["dp_shard", "reduce_scatter"] - sent["dp_shard", "reduce_scatter"] == 2 * experts
    # Two tokens' worth of numbers of each token there and back, in forward and backward, next to the counts.
    assert sent["ep", "all_to_all"] == 5 * (4 * 2 * 32 * 64 * 2 + 2 * 2 * 8)


@cases(
    "layout, said",
    (Layout(cp=2, fsdp=True, micro_batch=4), "maybe_context_parallel"),
    (Layout(dp_shard=4, ep=2, fsdp=True), "ParallelismConfig(dp_replicate_size=1, dp_shard_size=4, ep_size=2)"),
    (Layout(dp_replicate=2, checkpointing=True), "gradient_checkpointing_enable"),
    (Layout(dp_shard=2, fsdp=True, checkpointing=True), "a batch size of 1, and"),
)
def test_what_a_file_cannot_say_is_told(layout, said):
    text = plan.in_the_program(layout)
    assert said in text and len(text.splitlines()) == (1 if said.startswith("a batch") else 2)


@cases(
    "layout",
    Layout(dp_replicate=2, dp_shard=2, fsdp=True, checkpointing=True),
    Layout(dp_shard=2, cp=2, fsdp=True, offload=True),
    Layout(dp_shard=2, sp=2, fsdp=True),
    Layout(dp_shard=2, tp=2, fsdp=True, precision="bf16"),
    Layout(dp_replicate=4, zero=2, accumulation=4),
    Layout(dp_replicate=4),
    ids=plan.name_of,
)
def test_the_file_of_each_kind_of_layout_is_taken(accelerate, place, layout):
    (place / "train.py").touch()
    config_utils.write("plan.yaml", plan.configuration(layout, 2))
    if layout.shards and layout.tp * layout.ep > 1:  # with the launcher's default `prepare` refuses it
        assert "fsdp_cpu_ram_efficient_loading: false" in (place / "plan.yaml").read_text()
    here = ["--cpu"] if layout == Layout(dp_replicate=4) else []  # MULTI_GPU needs GPUs
    status, out, err = accelerate("launch", *here, "--config_file", "plan.yaml", "--dry-run", "train.py")
    assert status == 0, err
    named = {
        "zero_stage": layout.zero,
        "parallelism_config_cp_size": layout.cp,
        "parallelism_config_sp_size": layout.sp,
        "parallelism_config_tp_size": layout.tp,
    }
    for name, value in named.items():
        assert value in (None, 1) or any(name in line and str(value) in line for line in out.splitlines()), out


def test_plan_says_why_layouts_do_not_fit(accelerate, place, monkeypatch):
    (place / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(1024, 1024)\n\n    def forward(self, x):\n        return self.layer(x)\n\n\n"
        "class Own(nn.Sequential):\n    _no_split_modules = ('Block',)\n\n\n"
        "def wide():\n    return Own(Block(), Block()), lambda batch, sequence: {'input': torch.ones(batch, sequence * 10**6, 1024)}\n"
    )
    monkeypatch.syspath_prepend(place)
    status, out, err = accelerate(*words("own:wide", "--sequence", "16", "--write", "x.yaml"))
    assert status == 2 and "No layout fits" in err and not (place / "x.yaml").exists()
    assert "DDP 4: activations" in out and "use cp_size=2" in out
    assert "tp_size is 2, but Own has no tensor-parallel plan" in out


def test_what_is_refused(refused, place):
    assert "one of MODEL and --script" in refused("plan", "--gpus", 1, "--gpu", "l4-24gb", "--global_batch", 1)
    assert "--global_batch is missing" in refused("plan", "x", "--gpus", 1, "--gpu", "l4-24gb")
    assert "gives no model" in refused(*words("no.such:thing"))
    for options, message in (
        (("--gpu", "k80"), "choose one of b200"),
        (("--gpus", 3, "--nodes", 2), "--nodes=2 does not divide"),
        (("--gpus", 0), "--gpus is 0"),
        (("--efficiency", 0), "--efficiency is 0.0 and"),
        (("--overlap", 1.5), "--overlap 1.5; pass parts of 1"),
        (("--gpu", "v100-32gb"), "no arithmetic"),
    ):
        assert message in refused(*words("x", *options))


PROGRAM = """
import sys
import torch
from accelerate import Accelerator


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(1000, int(sys.argv[1]))

    def forward(self, tokens, mask, scale=1.0):
        assert mask.shape == tokens.shape and scale == 2.0
        return self.layer(tokens).mean(-1)


accelerator = Accelerator(gradient_accumulation_steps=3)
print(accelerator.num_processes, "ranks")
model = Net()
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros(1000, 48, dtype=torch.long), batch_size=5)
{prepare}
for batch in loader:
    accelerator.backward(model(batch, mask=batch > 0, scale=2.0).mean())
    raise AssertionError("a plan takes no step")
"""
PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"


def write_program(place, prepare=PREPARED, optimizer="SGD"):
    (place / "train.py").write_text(PROGRAM.replace("{optimizer}", optimizer).replace("{prepare}", prepare))


@pytest.mark.parametrize("optimizer, moments", [("SGD", 0), ("Adagrad", 4), ("AdamW", 8)])
def test_plan_of_a_program(accelerate, place, optimizer, moments):
    """The model, its sizes, the accumulation and the state of the optimizer are those of the program; nothing of it is allocated."""
    write_program(place, optimizer=optimizer)
    line = ["plan", "--gpus", "4", "--gpu", "l4-24gb", "--json", "--script", "train.py"]
    status, out, err = accelerate(*line, "1000000")  # weights of 4 GB
    assert status == 0 and "4 ranks" in err, err
    found = {row["name"]: row for row in json.loads(out)}
    layout = found["FSDP2 4"]["layout"]
    assert (layout["micro_batch"], layout["accumulation"], layout["state"]) == (5, 3, moments)
    needs = found["FSDP2 4"]["memory"]
    assert (needs["parameters"], needs["optimizer"]) == (10**9, 10**9 // 4 * moments)
    assert "FSDP2 2, cp_size=2" in found and "FSDP2 1, cp_size=4" in found, "48 tokens"
    assert not torch.distributed.is_initialized() and "RANK" not in os.environ


def test_plan_of_a_program_that_prepares_its_model_twice(accelerate, place):
    """The watch on the first call is not a part of the model that is planned."""
    write_program(place, f"{PREPARED}; model = accelerator.prepare(model)")
    with pytest.warns(UserWarning, match="prepared"):
        status, out, err = accelerate("plan", "--gpus", "1", "--gpu", "l4-24gb", "--script", "train.py", "64")
    assert status == 0 and "train.py (Net) on 1 x" in out and "one process" in out, err


def test_plan_of_a_program_that_searches_for_its_batch_size(accelerate, place):
    """The ranks meet through the store, whose others are made up."""
    search = "from accelerate.utils import find_executable_batch_size\n"
    search += "find_executable_batch_size(starting_batch_size=4)(lambda batch_size: print(batch_size))()\n"
    write_program(place, search + PREPARED)
    status, out, err = accelerate("plan", "--gpus", "2", "--gpu", "l4-24gb", "--script", "train.py", "64")
    assert status == 0 and "DDP 2" in out, err


def test_options_of_a_plan_of_a_program(accelerate, place):
    write_program(place)
    sizes = ["--micro_batch", "2", "--global_batch", "16", "--sequence", "100"]
    line = ["plan", "--gpus", "2", "--gpu", "l4-24gb", *sizes, "--script", "train.py", "64"]
    status, out, err = accelerate(*line)
    assert status == 0, err
    assert "train.py (Net) on 2 x l4-24gb" in out and "16 sequences of 100 a step" in out
    [row] = [line for line in out.splitlines() if line.startswith("DDP 2 ")]
    assert "2 x 4" in row


@cases(
    "prepare, said",
    ("loader = ()", "'train.py 8' prepares no model."),
    (f"{PREPARED}; loader = ()", "'train.py 8' calls no model that it has prepared."),
    ("raise RuntimeError('no data')", "fails before it calls a model that it has prepared: RuntimeError('no data')"),
)
def test_a_program_without_a_model(accelerate, place, prepare, said):
    write_program(place, prepare)
    status, out, err = accelerate("plan", "--gpus", "2", "--gpu", "l4-24gb", "--script", "train.py", "8")
    assert (status, out) == (2, "") and said in err


def test_rates_are_measured_where_a_device_of_the_kind_is_here(accelerate, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    line = ["plan", str(tmp_path), *["--gpus", "1", "--gpu", "h100-80gb", "--global_batch", "4", "--sequence", "64"]]
    status, _, told = accelerate(*line, "--measure")
    assert status == 2 and "which is the CPU, and --gpu is h100-80gb" in told
    here = SimpleNamespace(type="cuda", current=lambda: torch.device("cpu"))
    here.namespace = lambda: SimpleNamespace(get_device_name=lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(table, "detect", lambda: here)
    monkeypatch.setattr(ceilings, "measured", partial(ceilings.measured, side=64, copied=1 << 16))
    status, printed, told = accelerate(*line, "--measure")
    assert status == 0 and "measured on this machine" in printed, told
    assert "989 TFLOP/s" not in printed and "989 TFLOP/s" in accelerate(*line)[1]
