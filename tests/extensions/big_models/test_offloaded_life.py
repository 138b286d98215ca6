"""What becomes of offloaded models: they are trained through, interrupted, changed, copied, saved, shared, taken apart."""

import gc
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint

import offload_samples as samples
from accelerate import Accelerator, cpu_offload, disk_offload, load_checkpoint_and_dispatch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import align_module_device, offload_state_dict, offload_weight
from offload_models import References, batches, ids


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
@pytest.mark.parametrize("way", [*samples.MAPPED, *samples.WHOLE])
def test_gradients_of_inputs_pass_through(way, prefetch, references):
    reference = references("stack")
    results = []
    with samples.prefetching(prefetch):
        for model in (reference.make(), reference.offloaded(way, {"": "disk"})):
            kept = []
            # The gradient needs every layer's weights long after the layer has run.
            hook = model.embedding.register_forward_hook(lambda module, args, out, kept=kept: kept.append(out) or out)
            outputs = [model(**batch) for batch in reference.batches[:3]]
            hook.remove()
            results.append([torch.autograd.grad(o.square().sum(), i)[0] for o, i in zip(outputs, kept, strict=True)])
    assert all(samples.same(mine, other) for mine, other in zip(*results, strict=True))


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
@pytest.mark.parametrize("way", [*samples.MAPPED, *samples.WHOLE])
def test_inference_mode_and_failed_forwards_leave_nothing_behind(way, prefetch, references):
    reference = references("branches")
    with samples.prefetching(prefetch):
        model = reference.offloaded(way, {"": "disk"})
        with torch.inference_mode():
            reference.check(model)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(ids(1))
            reference.check(model)
        output = model(**reference.batches[0])
        assert output.requires_grad and samples.same(output.detach(), reference.results[0])
        output.sum().backward()
        with pytest.raises(ArithmeticError):
            model(ids(1))
        if way not in samples.EMPTY:
            reference.check_removal(model)


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
def test_weights_changed_between_forwards_are_used(prefetch, references):
    reference = references("branches")
    layer = "layers.3"
    plain, batch = reference.make(), reference.batches[0]
    with torch.no_grad():
        plain.get_submodule(layer).weight.add_(1)
    changed = plain.get_submodule(layer).weight.detach()

    def in_the_map(model):
        weights = model.get_submodule(layer)._hf_hook.weights_map
        weights.dataset["layers.3.weight"] = changed

    def by_name(model):
        module = model.get_submodule(layer)
        with align_module_device(module, "cpu"):
            module.weight.data.copy_(changed)

    for change in (in_the_map, by_name):
        with samples.prefetching(prefetch):
            model = cpu_offload(reference.make(), execution_device="cpu")
            for _ in range(2):
                model(**batch)
            change(model)
            assert samples.same(model(**batch), plain(**batch)), change.__name__


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
def test_nothing_is_left_running_or_open(prefetch, references):
    reference = references("branches")
    threads = set(threading.enumerate())
    opened = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with samples.prefetching(prefetch):
        model = reference.offloaded("shards", {"": "disk"})
        reference.check(model)
        del model
    left = set(threading.enumerate()) - threads
    for _ in range(100):
        gc.collect()  # more than once, since the thread may have been at work for the model
        for thread in left:
            thread.join(0.05)
        left = {thread for thread in left if thread.is_alive()}
        if not left:
            break
    assert not left, left
    assert len(set(os.listdir("/proc/self/fd")) - opened) == 0 if opened else True


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
@pytest.mark.parametrize("index", ["loader's", "folder's", "none"])
def test_a_file_replaced_between_forwards_is_used(index, prefetch, references):
    reference = references("branches")
    folder = reference.new_folder()
    plain, batch = reference.make(), reference.batches[0]
    with samples.prefetching(prefetch):
        model = disk_offload(reference.make(), folder, execution_device="cpu")
        for number in (3, 0):
            for _ in range(2):
                model(**batch)
            with torch.no_grad():
                plain.layers[number].weight.add_(1)
            weight, name = plain.layers[number].weight, f"layers.{number}.weight"
            if index == "folder's":
                offload_state_dict(folder, {name: weight})
            else:
                known = model.layers[number]._hf_hook.weights_map.dataset.index
                offload_weight(weight, name, folder, index=known if index == "loader's" else None)
            assert samples.same(model(**batch), plain(**batch)), number


@pytest.mark.parametrize("name", ["branches", pytest.param("stack", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["disk_offload", *(pytest.param(w, marks=pytest.mark.slow) for w in ("cpu_offload", "cast"))]
)
def test_compiled(way, name, references, recwarn):
    """Graphs break at hooks, and weights are elsewhere again after each forward."""
    reference = references(name)
    model = reference.offloaded(way, {"": "disk"})
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        reference.compare(reference.run(compiled), way)
        assert all(parameter.is_meta for parameter in model.parameters())
    reference.check(model)
    torch.compiler.reset()
    assert not [warning for warning in recwarn if "Dynamo" in str(warning.message)]


def _bytes_of(checkpoint):
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    return {file.name: file.read_bytes() for file in files}


def _doubling(model):
    """Have each layer double its weights in place before it runs."""
    for layer in model.layers:
        attribute = "_old_forward" if hasattr(layer, "_old_forward") else "forward"
        forward = getattr(layer, attribute)

        def doubled(x, layer=layer, forward=forward):
            with torch.no_grad():
                for parameter in layer.parameters(recurse=False):
                    parameter.mul_(2)
            return forward(x)

        setattr(layer, attribute, doubled)
    return model


@pytest.mark.parametrize("form", samples.FORMS)
def test_checkpoint_is_never_written(form, references, tmp_path):
    """Weights may be mapped from the checkpoint's files; what is done to them stays in the model."""
    reference = references("branches")
    before = _bytes_of(reference.checkpoints[form])
    for device_map in ({"": "cpu"}, {"": "disk"}, {"embedding": "cpu", "layers": "disk"}):
        model = load_checkpoint_and_dispatch(
            reference.make(empty=True), reference.checkpoints[form], device_map, offload_folder=tmp_path / "offload"
        )
        mine, wanted = (_doubling(one)(**reference.batches[0]) for one in (model, reference.make()))
        assert samples.same(mine, wanted), device_map
    assert _bytes_of(reference.checkpoints[form]) == before


@pytest.mark.parametrize("way", [*samples.MAPPED, *samples.WHOLE])
def test_requires_grad_is_kept(way, references):
    reference = references("branches")

    def frozen():
        model = reference.make()
        model.layers[1].requires_grad_(False)
        return model

    wanted = {name: parameter.requires_grad for name, parameter in frozen().named_parameters()}
    model = samples.Reference(samples.Sample(frozen, batches), torch.float32, reference.new_folder()).offloaded(
        way, {"embedding": "cpu", "layers": "disk"}
    )
    for _ in range(2):
        reference.check(model)
        assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    model.layers[3].requires_grad_(False)  # between forwards, when its weights are elsewhere
    model(**reference.batches[0])
    assert not model.layers[3].weight.requires_grad
    if way not in samples.EMPTY:
        remove_hook_from_submodules(model)
        assert not model.layers[3].weight.requires_grad and model.layers[0].weight.requires_grad
        assert model.layers[2].weight.is_leaf


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, prefetch, references):
    """Forwards run again during the backward pass, in the opposite order."""
    reference = references("stack")
    results = []
    with samples.prefetching(prefetch):
        for model in (reference.make(), reference.offloaded("shards", {"embedding": "cpu", "blocks": "disk"})):
            for _ in range(2):
                x = model.embedding(ids(6)).detach().requires_grad_()
                y = x
                for block, norm in model.blocks.values():
                    y = norm(torch.utils.checkpoint.checkpoint(block, y, use_reentrant=reentrant))
                y.square().sum().backward()
            results.append(x.grad)
    assert samples.same(*results)


@pytest.mark.parametrize("prefetch", samples.PREFETCHES)
def test_models_in_threads_of_their_own(prefetch, references):
    reference = references("branches")
    with samples.prefetching(prefetch), ThreadPoolExecutor(3) as pool:
        folder = reference.new_folder()
        models = [disk_offload(reference.make(), folder, execution_device="cpu") for _ in range(3)]
        for model in models:
            reference.check(model)  # the order is learned in one thread and used in another
        list(pool.map(lambda model: [reference.check(model) for _ in range(5)], models, timeout=60))


@pytest.mark.parametrize("form", samples.FORMS)
def test_saved_over_its_own_checkpoint(form, references, tmp_path):
    reference = references("stack")
    checkpoint = samples.write_checkpoint(reference.state, tmp_path / "checkpoint", form)
    device_map = {"embedding": "cpu", "blocks.a": "disk", "blocks.b": "disk"}
    model = load_checkpoint_and_dispatch(
        reference.make(empty=True), checkpoint, device_map, offload_folder=tmp_path / "offload"
    )
    reference.check(model)
    Accelerator(cpu=True).save_model(model, tmp_path / "checkpoint", max_shard_size="1KB")
    reference.check(model)
    if form == "bin":
        checkpoint.unlink()
    again = load_checkpoint_and_dispatch(reference.make(empty=True), tmp_path / "checkpoint", {"": "disk"})
    reference.check(again)


def test_an_offload_folder_of_the_peer(references, tmp_path):
    """As 1.15.0 writes it: raw bytes, and an index that knows dtype and shape only."""
    reference = references("stack", torch.bfloat16)
    index = {}
    for name, tensor in reference.state.items():
        (tmp_path / f"{name}.dat").write_bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    (tmp_path / "index.json").write_text(json.dumps(index))
    model = disk_offload(reference.make(), tmp_path, execution_device="cpu")
    reference.compare(reference.run(model), "peer's folder")
    reference.check_removal(model)


_CHILD = """
import os, signal, sys, torch, warnings
from safetensors.torch import save_file
from torch import nn
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.extensions.big_models import prefetch

prefetch.SMALLEST_ON_CPU = 0  # that small weights are read ahead, and waited for
plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
save_file({name: tensor.double() for name, tensor in plain.state_dict().items()}, sys.argv[1])
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
load_checkpoint_and_dispatch(model, sys.argv[1], {"": "disk"}, dtype=torch.float32)
x = torch.randn(2, 6)
for _ in range(3):
    assert torch.equal(model(x), plain(x))
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork next to the threads of libraries
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if all(torch.equal(model(x), plain(x)) for _ in range(3)) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(model(x), plain(x))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("prefetch", ["0", "1"])
def test_a_forked_process_goes_on_and_the_program_ends(prefetch, tmp_path):
    """A server loads a model once and forks; a thread that reads ahead is not in the child."""
    environment = {**os.environ, "ACCELERATE_OFFLOAD_PREFETCH": prefetch, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "model.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
