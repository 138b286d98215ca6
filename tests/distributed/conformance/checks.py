"""What every strategy has to pass; each check is called on all ranks, and returns what is wrong."""

import contextlib
import gc
import os
import weakref
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from accelerate.utils import set_seed
from distributed.conformance import model as zoo
from distributed.conformance.strategies import Strategy
from distributed.conformance.training import Run, accelerator_for, tensors_apart
from distributed.scripts.expect import warned
from distributed.scripts.harness import everywhere, shared_folder

STEPS, RESUMED, FEW = 5, 3, 2
# bf16 has 8 bits of mantissa: losses of about 3.5 agree to two digits, clipped AdamW steps of at most RATE to a few of them.
# Bytes of a bucket of weights, in which several small tensors fit, and the names of which one comes.
BUCKET, TIED = 2000, {"head.weight", "words.weight"}
BF16_LOSS, BF16_WEIGHT = 0.05, 4 * FEW * zoo.RATE


def equals_one_process(strategy: Strategy) -> list[str]:
    """Several steps with accumulation, clipping and a schedule equal those of one process on the whole batch."""
    run = Run(strategy, STEPS)
    expected = zoo.reference(STEPS, strategy.groups)
    assert min(expected.norms) > zoo.MAX_NORM, "the norm does not bite"
    trace = run.train()
    told = everywhere((trace.losses, trace.norms, trace.rates))
    apart = [] if all(other == told[0] for other in told) else ["the ranks know different losses, norms or rates"]
    return apart + run.apart(trace, expected)


def accumulates_what_one_batch_has(strategy: Strategy) -> list[str]:
    """Four micro-batches to a step equal one micro-batch of the same samples."""
    parts = Run(strategy, 2 * FEW, options={"window": 4}).train()
    run = Run(strategy, 2 * FEW, samples=4 * zoo.SAMPLES, options={"window": 1})
    return run.apart(run.train(), parts)


def trains_two_models(strategy: Strategy) -> list[str]:
    """Two models of one program, a step of each in turn: both equal one process."""
    first = Run(strategy, FEW)
    second = Run(strategy, FEW, seed=99, accelerator=first.accelerator)
    runs, traces = (first, second), [zoo.Trace([], [], [], {}) for _ in range(2)]
    for _ in zip(*(run.steps_of(trace) for run, trace in zip(runs, traces, strict=True)), strict=True):
        pass
    found = []
    for run, trace in zip(runs, traces, strict=True):
        trace.weights.update(run.weights())
        found += run.apart(trace, zoo.reference(FEW, strategy.groups, seed=run.seed))
    return found


def has_its_part(strategy: Strategy) -> list[str]:
    """A rank has the share of the parameters that the strategy is for: nothing falls back to whole replicas in silence."""
    run = Run(strategy, 1)
    whole = sum(parameter.numel() for parameter in zoo.build().parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in run.model.parameters()]
    part = strategy.part or 1 / run.accelerator.num_processes
    found = sum(parameter.numel() for parameter in local) / whole
    # Flat parameters are padded, and the last of several ranks may have less.
    return [] if abs(found / part - 1) < 0.1 else [f"has {found:.3f} of the parameters, not {part:.3f}"]


def synchronises_each_batch(strategy: Strategy) -> list[str]:
    """`sync_each_batch` exchanges more often, and changes nothing else."""
    run = Run(strategy, FEW, options={"sync_each_batch": True})
    return run.apart(run.train(), zoo.reference(FEW, strategy.groups))


def holds_gradients_back(strategy: Strategy) -> list[str]:
    """`no_sync` manually, then a backward pass outside of it: one step of the whole batch."""
    run = Run(strategy, 1)
    accelerator = run.accelerator
    held, last = list(run.loader)
    with accelerator.no_sync(run.model):
        run.loss(*held)
    run.loss(*last)
    norm = float(accelerator.clip_grad_norm_(run.model.parameters(), zoo.MAX_NORM))
    run.optimizer.step()
    expected = zoo.reference(1, strategy.groups)
    close = abs(norm - expected.norms[0]) < strategy.tolerance
    found = [] if close else [f"norm {norm} not {expected.norms[0]}"]
    weights = run.weights()
    return found + (tensors_apart(weights, expected.weights, strategy.tolerance) if weights else [])


def clips_by_value(strategy: Strategy) -> list[str]:
    """Clipping by value equals that of one process, or is refused with what to do instead."""
    run = Run(strategy, FEW)
    try:
        trace = run.train(clip="value")
    except NotImplementedError as error:
        return [] if "clip_grad_norm_" in str(error) else [str(error)]
    return run.apart(trace, zoo.reference(FEW, strategy.groups, "value"))


def computes_in_bf16(strategy: Strategy) -> list[str]:
    """Under bf16 the losses follow those of float32, and the weights stay in float32."""
    run = Run(strategy, FEW, options={"mixed_precision": "bf16"})
    trace, expected = run.train(), zoo.reference(FEW, strategy.groups)
    apart = max(abs(one - other) for one, other in zip(trace.losses, expected.losses, strict=True))
    found = [] if apart < BF16_LOSS else [f"losses differ by {apart:.3f} (allowed {BF16_LOSS})"]
    if apart == 0.0:
        found.append("losses equal those of float32, so nothing was computed in bf16")
    found += [f"{name} is {value.dtype}" for name, value in trace.weights.items() if value.dtype != torch.float32]
    return found + (tensors_apart(trace.weights, expected.weights, BF16_WEIGHT) if trace.weights else [])


def prepares_once(strategy: Strategy) -> list[str]:
    """Whatever is prepared again, outer or inner, comes back as it is, with one warning, and nothing is wrapped twice."""
    run = Run(strategy, FEW)
    accelerator = run.accelerator
    before = [type(part).__name__ for part in run.model.modules()]
    again = {
        run.model: (run.model, run.plain, accelerator.unwrap_model(run.model)),
        run.optimizer: (run.optimizer, run.bare),
        run.loader: (run.loader,),
        run.scheduler: (run.scheduler, run.scheduler.scheduler),
    }
    for expected, objects in again.items():
        for given in objects:
            with warned(1, "already prepared", at="accelerator.prepare"):
                assert accelerator.prepare(given) is expected, type(given)
    with warned(1, "already prepared", at="prepare_model"):
        assert accelerator.prepare_model(run.plain) is run.model
    with warned(4, "already prepared", at="accelerator.prepare"):
        both = accelerator.prepare(run.plain, run.bare)
        assert both == (run.model, run.optimizer)
        assert accelerator.prepare(*both) == both
    counts = [len(getattr(accelerator, f"_{kind}s")) for kind in ("model", "optimizer", "dataloader", "scheduler")]
    assert counts == [1] * 4, counts
    assert [type(part).__name__ for part in run.model.modules()] == before
    return run.apart(run.train(), zoo.reference(FEW, strategy.groups))


def continues_after_loading(strategy: Strategy) -> list[str]:
    """A run that is saved amid an epoch and loaded into another model has the same weights, and continues as it would have."""
    middle: dict[str, torch.Tensor] = {}

    def save(step: int) -> None:
        if step == RESUMED - 2:
            run.accelerator.save_state(place)
            middle.update(run.weights())

    with shared_folder() as folder:
        place = os.path.join(folder, "checkpoint")
        run = Run(strategy, RESUMED)
        whole = run.train(at=save)
        run = Run(strategy, RESUMED, seed=99)
        run.accelerator.load_state(place)
        found = tensors_apart(run.weights(), middle, 0.0)
        rest = run.train()
    tail = type(whole)(whole.losses[-2:], whole.norms[-2:], whole.rates[-2:], whole.weights)
    # The sum of more than two numbers depends on their order, which DDP changes after the first step of a model.
    return found + run.apart(rest, tail, tolerance=0.0 if run.accelerator.num_processes <= 2 else 1e-6)


def has_plain_weights(strategy: Strategy) -> list[str]:
    """State dict, exported file and unwrapped model are those of the model that the user built."""
    run = Run(strategy, FEW)
    accelerator = run.accelerator
    run.train(stop=1)
    assert isinstance(accelerator.unwrap_model(run.model), zoo.Model), type(accelerator.unwrap_model(run.model))
    weights = run.weights()
    found: list[str] = []
    with shared_folder() as folder:
        accelerator.save_model(run.model, folder)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            plain = zoo.build(seed=3)
            found += tensors_apart(weights, {name: weights[name] for name in plain.state_dict()}, 0.0)
            missing, extra = plain.load_state_dict(load_file(os.path.join(folder, "model.safetensors")), strict=False)
            assert not extra and set(missing) <= {"head.weight", "words.weight"} and len(missing) < 2, (missing, extra)
            found += tensors_apart(plain.state_dict(), weights, 0.0)
        accelerator.wait_for_everyone()
    return found


def streams_whole_weights(strategy: Strategy) -> list[str]:
    """After each step every rank gets each tensor whole, once, under the user's name, in buckets; and the training is the same."""
    run, found = Run(strategy, FEW), []

    def stream(step: int) -> None:
        weights, got = everywhere(run.weights())[0], {}
        for bucket in run.accelerator.stream_weights(run.model, bucket_bytes=BUCKET):
            if not bucket or len(bucket) > 1 and sum(value.nbytes for value in bucket.values()) > BUCKET:
                found.append(f"a bucket of {list(bucket)}")
            got |= {name: value.cpu() for name, value in bucket.items()}
            own = {parameter.data_ptr() for parameter in run.model.parameters()} - {0}  # XLA has no addresses
            found.extend(f"{name} is the model's memory" for name, value in bucket.items() if value.data_ptr() in own)
        if bucket or len(weights.keys() - got.keys()) != 1 or not weights.keys() - got.keys() <= TIED:
            found.append(f"names {sorted(got)}, after them {list(bucket)}")
        found.extend(tensors_apart(got, {name: weights[name] for name in got}, 0.0))
        half = {}
        for bucket in run.accelerator.stream_weights(run.model, dtype=torch.bfloat16):
            half |= {name: value.cpu() for name, value in bucket.items()}
        found.extend(tensors_apart(half, {name: value.bfloat16() for name, value in got.items()}, 0.0))

    trace = run.train(at=stream)
    return found + run.apart(trace, zoo.reference(FEW, strategy.groups))


def runs_alone_on_whole_parameters(strategy: Strategy) -> list[str]:
    """In `whole_parameters` each rank runs forwards of its own number, as the plain model does; the training is the same."""
    run, found = Run(strategy, FEW), []
    device = run.accelerator.device
    tokens, places, _ = (part[:2] for part in zoo.data(1))

    def compare(step: int) -> None:
        plain = zoo.build()
        plain.load_state_dict(everywhere(run.weights())[0])
        with torch.no_grad(), run.accelerator.whole_parameters(run.model) as whole:
            for _ in range(1 if strategy.same_batch > 1 else 1 + run.accelerator.process_index):
                logits = whole(tokens.to(device), places.to(device)).cpu()
            gap = (logits - plain(tokens, places)).abs().max().item()
        found.extend([f"logits differ by {gap:.2e} after step {step}"] if not gap <= strategy.tolerance else [])

    try:
        trace = run.train(at=compare)
    except NotImplementedError as error:
        return [] if "stream_weights" in str(error) else [str(error)]
    return found + run.apart(trace, zoo.reference(FEW, strategy.groups))


def gathers_each_sample_once(strategy: Strategy) -> list[str]:
    """`gather_for_metrics` over an epoch that does not divide has every sample once, or once for each part of its sequence."""
    accelerator = accelerator_for(strategy)
    model = zoo.build()
    if strategy.arrives:
        strategy.arrives(model)
    optimizer, rows = zoo.optimizer_of(model, strategy.groups), TensorDataset(torch.arange(13))
    _, _, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for (batch,) in loader]).tolist()
    copies = strategy.same_batch if strategy.splits_sequence else 1
    return [] if sorted(seen) == sorted(list(range(13)) * copies) else [f"samples {sorted(seen)}"]


def reports(strategy: Strategy) -> list[str]:
    """The reports of memory and precision can be printed amid a training."""
    run = Run(strategy, FEW, options={"mixed_precision": "bf16"})
    run.train(stop=1)
    told = str(run.accelerator.precision_report(run.model)), str(run.accelerator.memory_report())
    return [f"the report is {text!r}" for text in told if not text.strip()]


def lets_go(strategy: Strategy) -> list[str]:
    """After `free_memory` nothing holds the model, and another one can be prepared."""
    run = Run(strategy, FEW)
    run.train(stop=1)
    accelerator = run.accelerator
    alive = {"prepared": weakref.ref(run.model), "plain": weakref.ref(run.plain)}
    del run
    accelerator.free_memory()
    gc.collect()
    found = [f"the {what} model is still alive" for what, ref in alive.items() if ref()]
    with warned(0, "already prepared"):
        Run(strategy, FEW, accelerator=accelerator).train(stop=1)
    return found


_ALL = (
    *(
        equals_one_process,
        accumulates_what_one_batch_has,
        trains_two_models,
        has_its_part,
        synchronises_each_batch,
        holds_gradients_back,
        clips_by_value,
        computes_in_bf16,
    ),
    *(
        prepares_once,
        continues_after_loading,
        has_plain_weights,
        streams_whole_weights,
        runs_alone_on_whole_parameters,
        gathers_each_sample_once,
        reports,
        lets_go,
    ),
)
CHECKS: dict[str, Callable[[Strategy], list[str]]] = {check.__name__: check for check in _ALL}


@contextlib.contextmanager
def turned_on(strategy: Strategy):
    """Set a strategy's variables, and forget what the one before left."""
    kept = dict(os.environ)
    os.environ.update(strategy.environment)
    set_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
        gc.collect()
        gc.freeze()  # what is alive now is of libraries, and every later collection would pass over it
