"""Replica groups through torchft: real processes that are killed and return, compared with a simulation of plain torch."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accelerate import Accelerator
from accelerate.extensions.replicas.data import Share, ShareSampler
from accelerate.extensions.replicas.replicas import Replicas
from accelerate.extensions.replicas.settings import FaultToleranceKwargs
from accelerate.utils import GradScalerKwargs
from cases import cases
from distributed.conftest import plain_environment
from extensions.replicas.scripts import replica_run

SCRIPT = Path(replica_run.__file__)
LIMIT_S = 900


@dataclass
class Outcome:
    """What the groups of a run wrote: their lines, and their weights at the end."""

    options: dict
    begun: dict
    committed: dict
    ended: dict

    def history(self, survivor):
        """Return the micro-batches of each committed step, of all groups that took part in it, each with its weight."""
        for line in self.committed[survivor]:
            shares = [line["batches"]]
            for name, lines in self.begun.items():
                if name == survivor:
                    continue
                begun = [other for other in lines if (other["step"], other["count"]) == (line["step"], line["count"])]
                if line["count"] > 1 and begun:
                    shares.append(begun[-1]["batches"])
            assert len(shares) == line["count"], (line, shares)
            yield line, shares


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains replica groups until all have ended."""
    monkeypatch.setenv("RUST_LOG", "error")  # of torchft, whose servers log each quorum
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=10, heartbeat_timeout_ms=1500
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    groups = []

    def train(names="ab", processes=1, restarts=None, **options):
        # Not by TORCHFT_LIGHTHOUSE: with variables of torch, processes start cold.
        options = {"processes": processes, "lighthouse": lighthouse.address(), **options}
        variables = {"OPTIONS": json.dumps(options), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
        variables |= {"RUST_LOG": "error", "SCHEDULE_PORT": str(store.port)}
        environment = {**plain_environment(tmp_path), **variables}
        launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
        launch += [
            "--num_processes",
            str(processes),
            "--max_restarts",
            str(restarts or 0),
            "--monitor_interval",
            "0.1",
        ]
        launched = [] if restarts is None and processes == 1 else launch[1:]
        for name in names:
            command = [sys.executable, *launched, str(SCRIPT), str(tmp_path), name]
            with open(tmp_path / f"{name}.out", "w") as output:
                groups.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        statuses = [group.wait(LIMIT_S) for group in groups]
        texts = "".join(f"\n== {name}\n" + (tmp_path / f"{name}.out").read_text()[-6000:] for name in names)
        assert statuses == [0] * len(groups), texts
        lines = {
            name: [json.loads(line) for line in (tmp_path / f"{name}-0.jsonl").read_text().splitlines()]
            for name in names
        }
        begun, committed = (
            {name: [line for line in lines[name] if line["kind"] == kind] for name in names}
            for kind in ("begun", "committed")
        )
        return Outcome(
            {"processes": processes, **options},
            begun,
            committed,
            {name: torch.load(tmp_path / f"{name}.pt") for name in names},
        )

    yield train
    for group in groups:
        group.kill()
    lighthouse.shutdown()


def simulate(outcome, survivor):
    """Repeat the steps of a run in plain torch, each with the batches that its groups used; return the weights."""
    settings = {**replica_run.options(outcome.options)}
    history = list(outcome.history(survivor))
    starts = (replica_run.build(ord(name)) for name in outcome.begun)
    model, optimizer, scheduler = next(
        built for built in starts if replica_run.digest(built[0].parameters()) == history[0][0]["first"]
    )
    data = replica_run.Numbers(settings["samples"])
    for line, shares in history:
        for batches in shares:
            for ids, weight in batches:
                loss = (model(data.inputs[ids]) - data.targets[ids]).square().mean()
                (loss * weight / settings["accumulation"] / line["count"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        for _ in range(settings["processes"]):
            scheduler.step()
        optimizer.zero_grad()
        assert scheduler.get_last_lr()[0] == pytest.approx(line["rate"])
    return model.state_dict()


def assert_as_simulated(outcome, survivor="a"):
    expected = simulate(outcome, survivor)
    for name in outcome.ended:
        torch.testing.assert_close(outcome.ended[name]["weights"], expected, rtol=0, atol=1e-9)
    weights = [ended["weights"] for ended in outcome.ended.values()]
    assert all(torch.equal(other[key], value) for other in weights[1:] for key, value in weights[0].items())


def assert_used_once(outcome, survivor="a"):
    """Each sample counts once in each epoch, and no step is missing."""
    settings = replica_run.options(outcome.options)
    used = Counter()
    for line, shares in outcome.history(survivor):
        for batches in shares:
            used.update((line["epoch"], index) for ids, weight in batches if weight for index in ids)
    assert used == Counter(
        (epoch, index) for epoch in range(settings["epochs"]) for index in range(settings["samples"])
    )
    steps = [line["step"] for line in outcome.committed[survivor]]
    assert steps == list(range(len(steps)))


def assert_returned_exactly(outcome, survivor, returned):
    """A group that returns begins with the weights of the survivor, bit for bit, and so it stays."""
    at = {line["step"]: line for line in outcome.committed[survivor]}
    for line in outcome.committed[returned]:
        assert (line["first"], line["last"]) == (at[line["step"]]["first"], at[line["step"]]["last"])


# Whole runs.


def test_two_groups_train_as_two_replicas(train):
    # 11 batches: the last accumulation step of an epoch has 3 of 4, and one group repeats a batch.
    outcome = train(min=2, samples=42, accumulation=2)
    assert all(line["count"] == 2 for line in outcome.committed["a"]) and len(outcome.committed["a"]) == 6
    assert_as_simulated(outcome)
    assert_used_once(outcome)


def kills(number, seed=0):
    """Return where a group dies in each start, at random."""
    draw = random.Random(seed)
    phases = ("read", "forward", "backward", "step")
    return {str(start): [draw.choice(phases), draw.randrange(1, 4)] for start in range(number)}


def killed(train, number, lost="b", **options):
    """Train two groups, of which one is killed so often; check all that must hold, and return the outcome."""
    survivor = "ab".replace(lost, "")
    outcome = train(restarts=number, kills={lost: kills(number)}, peer={survivor: lost}, solo=2, **options)
    starts = {(line["start"], line["count"]) for line in outcome.committed[lost]}
    assert starts == {(start, 2) for start in range(number + 1)}
    assert_as_simulated(outcome, survivor)
    assert_used_once(outcome, survivor)
    assert_returned_exactly(outcome, survivor, lost)
    assert outcome.ended[survivor]["failures"] <= number
    return outcome


def test_survivor_continues_without_a_killed_group_which_returns(train):
    killed(train, 1, samples=400, epochs=2)


@pytest.mark.slow
def test_three_groups_train_as_three_replicas(train):
    outcome = train("abc", min=3, samples=40, accumulation=2, epochs=3)
    assert all(line["count"] == 3 for line in outcome.committed["a"])
    assert_as_simulated(outcome)
    assert_used_once(outcome)


@pytest.mark.slow
def test_survivor_loses_no_step_in_twenty_kills(train):
    outcome = killed(train, 20, samples=2400, epochs=4)
    counts = Counter(line["count"] for line in outcome.committed["a"])
    print(f"steps by groups: {dict(counts)}, not committed: {outcome.ended['a']['failures']}")


@pytest.mark.slow
def test_group_that_holds_the_store_returns(train):
    killed(train, 4, lost="a", samples=2400, epochs=2)


@pytest.mark.slow
@cases("fsdp", False, True)
def test_group_of_two_ranks_returns(train, fsdp):
    """DDP or FSDP2 in each group, torchft between them."""
    killed(train, 2, processes=2, samples=4000, epochs=2, fsdp=fsdp)


# The shares of an epoch.


@cases("length, counts", (11, [2]), (11, [3]), (7, [1, 3, 2]), (1, [4]))
def test_shares_cover_an_epoch_once(length, counts):
    """Groups come and go after each round; each batch has the weight of one batch in the mean of its round."""
    used, first, order = Counter(), 0, iter(counts)
    while first < length:
        count = next(order, counts[-1])
        shares = [Share(first, rank, count, length) for rank in range(count)]
        readers = [iter(ShareSampler(range(length), share)) for share in shares]
        round_weights = [(next(reader), share.weight(0)) for reader, share in zip(readers, shares, strict=True)]
        assert sum(weight for _, weight in round_weights) == pytest.approx(count)
        used.update(batch for batch, weight in round_weights if weight)
        first = shares[0].used_after(1)
    assert used == Counter(range(length))


def test_each_group_has_as_many_rounds():
    samplers = [ShareSampler(range(10), Share(2, rank, 3, 10)) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == [[2, 5, 8], [3, 6, 9], [4, 7, 9]]
    assert [len(sampler) for sampler in samplers] == [3, 3, 3]
    assert [sampler.share.weight(2) for sampler in samplers] == [1.5, 1.5, 0.0]


# One group, in this process.


@pytest.fixture
def run(monkeypatch):
    """Return a function that makes an Accelerator with replica groups, which has prepared a model, an optimizer and a loader."""
    monkeypatch.setenv("RUST_LOG", "error")
    coordination = pytest.importorskip("torchft.coordination", reason="needs torchft")
    lighthouse = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=10, heartbeat_timeout_ms=300
    )
    runs = []

    def run(optimizer_class=torch.optim.SGD, count=6, handler=None, **options):
        handler = {"lighthouse": lighthouse.address(), "timeout_s": 20, **(handler or {})}
        handlers = [FaultToleranceKwargs(**handler), GradScalerKwargs(init_scale=16.0)]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **options)
        runs.append(accelerator)
        model = torch.nn.Linear(1, 1)
        loader = torch.utils.data.DataLoader(torch.arange(float(count)).unsqueeze(1), batch_size=2, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer_class(model.parameters(), lr=0.1), loader)

    yield run
    for accelerator in runs:
        accelerator.end_training()
    lighthouse.shutdown()


def test_position_is_in_checkpoints(run, tmp_path):
    accelerator, model, optimizer, loader = run()
    samples = []
    for epoch in range(2):
        for batch in accelerator.replica_batches(loader, epoch):
            samples += batch.flatten().tolist()
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.replicas.step == 4:
                accelerator.save_state(tmp_path / "checkpoint")
                break
    assert len(samples) == 8
    accelerator.end_training()
    accelerator, model, optimizer, loader = run()
    accelerator.load_state(tmp_path / "checkpoint")
    for epoch in range(2):  # the first one is finished, and yields nothing
        for batch in accelerator.replica_batches(loader, epoch):
            assert epoch == 1
            samples += batch.flatten().tolist()
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.replicas.step == 6
    assert Counter(samples) == Counter({float(sample): 2 for sample in range(6)})
    with pytest.raises(RuntimeError, match="Call it before replica_batches"):
        accelerator.load_state(tmp_path / "checkpoint")


def test_checkpoint_without_a_position_is_refused(run, tmp_path):
    plain = Accelerator(cpu=True)
    plain.prepare(torch.nn.Linear(1, 1))
    plain.save_state(tmp_path / "plain")
    accelerator, *_ = run()
    with pytest.raises(ValueError, match=r"has no replicas\.json"):
        accelerator.load_state(tmp_path / "plain")


@cases("precision", "no", "fp16")
def test_step_that_is_not_committed_changes_nothing(run, precision):
    accelerator, model, optimizer, loader = run(mixed_precision=precision)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    attempts = []
    with pytest.warns(UserWarning, match="was not committed"):
        for batch in accelerator.replica_batches(loader, 0):
            before = model.weight.detach().clone()
            accelerator.backward(model(batch).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if not attempts:  # as if the averages of this step had not arrived
                accelerator.replicas._manager.report_error(RuntimeError("lost"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            attempts.append((batch.tolist(), optimizer.step_was_skipped, torch.equal(before, model.weight)))
    assert [skipped for _, skipped, _ in attempts] == [True, False, False, False]
    assert attempts[0][0] == attempts[1][0] and attempts[0][2] and not attempts[1][2]
    assert scheduler.get_last_lr() == [0.1 * 0.5**3] and accelerator.replicas.failures == 1
    if precision == "fp16":
        assert accelerator.scaler.state_dict()["_growth_tracker"] == 3


def train_two_steps(accelerator, model, optimizer):
    for _ in range(2):
        torch.manual_seed(accelerator.replicas.step)
        accelerator.replicas._is_open, accelerator.replicas._is_committed = True, None
        accelerator.backward(model(torch.rand(2, 1)).mean())
        accelerator.replicas._is_committed = True
        optimizer.step()
        optimizer.zero_grad()


def test_state_of_a_peer_is_taken_over_in_full(run):
    from accelerate.extensions.replicas import state as replicas_state

    transport = replicas_state.PlainTransport(timeout=timedelta(seconds=20), num_chunks=0)
    first, model, optimizer, _ = run(torch.optim.Adam, mixed_precision="fp16")
    first.register_for_checkpointing(torch.nn.BatchNorm1d(2))
    scheduler = first.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    train_two_steps(first, model, optimizer)
    scheduler.step()
    first._custom_objects[0].running_mean += 3
    state = replicas_state.capture(first)
    transport.send_checkpoint([1], 7, state, timedelta(seconds=20))
    received = transport.recv_checkpoint(0, transport.metadata(), 7, timedelta(seconds=20))
    second, other, other_optimizer, _ = run(torch.optim.Adam, mixed_precision="fp16")
    second.register_for_checkpointing(torch.nn.BatchNorm1d(2))
    second.prepare(torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5))
    replicas_state.restore(second, received)
    assert str(replicas_state.capture(second)) == str(state)
    for accelerator, trained, stepped in ((first, model, optimizer), (second, other, other_optimizer)):
        train_two_steps(accelerator, trained, stepped)
    assert torch.equal(model.weight, other.weight)
    transport.send_checkpoint([1], 8, {"path": Path("x")}, timedelta(seconds=20))
    with pytest.raises(Exception, match="PosixPath was not an allowed global"):
        transport.recv_checkpoint(0, transport.metadata(), 8, timedelta(seconds=20))
    transport.shutdown()


def test_models_that_differ_are_refused(run):
    from accelerate.extensions.replicas import state as replicas_state

    accelerator, *_ = run()
    state = replicas_state.capture(accelerator)
    with pytest.raises(ValueError, match="prepared 2 optimizers, and this one 1"):
        replicas_state.restore(accelerator, {**state, "optimizers": state["optimizers"] * 2})
    wider = {**state["models"][0], "weight": torch.zeros(2, 1)}
    with pytest.raises(ValueError, match="differs from that of a peer in \\['weight'\\]"):
        replicas_state.restore(accelerator, {**state, "models": [wider]})


def test_misuse_in_a_loop_is_refused(run):
    accelerator, model, optimizer, loader = run()
    inputs = torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="outside of a step of the replica groups"):
        accelerator.backward(model(inputs).mean())
    for batch in accelerator.replica_batches(loader, 0):
        with pytest.raises(RuntimeError, match="no gradients were averaged"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="Use one loop at a time"):
            next(accelerator.replica_batches(loader, 0))
        accelerator.backward(model(batch).mean())
        model.require_backward_grad_sync = False  # as in LocalSGD
        with pytest.raises(RuntimeError, match="inside LocalSGD or no_sync"):
            optimizer.step()
        del model.require_backward_grad_sync
        optimizer.step()
        with pytest.raises(RuntimeError, match="outside of a step"):
            accelerator.backward(model(batch).mean())
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="epoch=0, which this process has finished"):
        next(accelerator.replica_batches(loader, 0))
    with pytest.raises(RuntimeError, match="no prepared optimizer has stepped"):
        list(accelerator.replica_batches(loader, 1))


def test_state_that_no_peer_could_load_is_refused(run):
    class Odd:
        def state_dict(self):
            return {"path": Path("x")}

        def load_state_dict(self, state):
            pass

    accelerator, _, _, loader = run()
    accelerator.register_for_checkpointing(Odd())
    with pytest.raises(TypeError, match="The state of objects holds more than tensors and plain data"):
        next(accelerator.replica_batches(loader, 0))


def test_waiting_for_groups_ends(run):
    accelerator, _, _, loader = run(handler={"min_replicas": 2, "quorum_timeout_s": 0.3})
    with pytest.raises(RuntimeError, match="fewer than min_replicas=2|No quorum of replica groups"):
        next(accelerator.replica_batches(loader, 0))


def test_lighthouse_that_is_not_there_is_named(run):
    accelerator, _, _, loader = run(handler={"lighthouse": "http://localhost:1", "timeout_s": 0.5})
    with pytest.raises(RuntimeError, match="at the lighthouse http://localhost:1 within timeout_s=0.5"):
        next(accelerator.replica_batches(loader, 0))


def test_two_backward_passes_of_a_repeated_batch_count_nothing(run):
    accelerator, model, optimizer, loader = run()
    accelerator.replicas._share, accelerator.replicas._rounds = Share(0, 1, 2, 1), 1
    accelerator.replicas._is_open, accelerator.replicas.count = True, 1
    loss = model(torch.ones(1, 1)).sum()
    for share, gradient in ((Share(0, 1, 2, 1), 0.0), (Share(0, 0, 2, 1), 2.0), (Share(0, 0, 2, 2), 3.0)):
        accelerator.replicas._share = share
        accelerator.backward(loss, retain_graph=True)
        assert model.weight.grad.item() == gradient


def test_loaders_without_positions_are_refused(run):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(4, 1))

    accelerator, _, _, loader = run()
    stream = accelerator.prepare(torch.utils.data.DataLoader(Stream()))
    for refused in (stream, [1], accelerator.skip_first_batches(loader, 1)):
        with pytest.raises(ValueError, match="replica_batches\\(\\) got"):
            next(accelerator.replica_batches(refused, 0))


# Settings.


@cases(
    "settings, message",
    ({"min_replicas": 0}, "min_replicas=0"),
    ({"timeout_s": -1.0}, "timeout_s=-1.0"),
    ({"backend": "mpi"}, "backend='mpi'"),
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FaultToleranceKwargs(**settings)


def test_variable_that_overrides_a_setting_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "5")
    with pytest.raises(ValueError, match="would use it instead of timeout_s=60.0"):
        FaultToleranceKwargs()


def test_run_without_torchft_names_the_package(monkeypatch):
    monkeypatch.setattr("accelerate.extensions.replicas.replicas.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install torchft"):
        Accelerator(cpu=True, kwargs_handlers=[FaultToleranceKwargs(lighthouse="http://localhost:1")])


def test_run_without_lighthouse_is_refused(monkeypatch):
    monkeypatch.setattr("accelerate.extensions.replicas.replicas.find_spec", lambda name: True)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE is not set"):
        Accelerator(cpu=True, kwargs_handlers=[FaultToleranceKwargs()])
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    assert FaultToleranceKwargs().address() == "http://localhost:1"


@cases(
    "changes, message",
    ({"_strategy": SimpleNamespace(name="deepspeed")}, "strategy 'deepspeed'"),
    ({"_strategy": SimpleNamespace(name="megatron")}, "strategy 'megatron'"),
    ({"_strategy": SimpleNamespace(name="fsdp1")}, "strategy 'fsdp1'"),
    ({"parallelism_config": SimpleNamespace(tp_size=1, cp_size=1, sp_size=1, pp_size=2)}, "pp_size=2"),
    ({"fp8_enabled": True}, "mixed_precision='fp8'"),
    ({"gradient_state": SimpleNamespace(sync_with_dataloader=False)}, "sync_with_dataloader=False"),
)
def test_runs_that_cannot_work_are_refused(monkeypatch, changes, message):
    monkeypatch.setattr("accelerate.extensions.replicas.replicas.find_spec", lambda name: True)
    settings = FaultToleranceKwargs(lighthouse="http://localhost:1")
    plain = {"parallelism_config": None, "_strategy": SimpleNamespace(name="ddp"), "fp8_enabled": False}
    run = SimpleNamespace(**{"fault_tolerance_handler": settings, **plain, **changes})
    with pytest.raises(ValueError, match=re.escape(message)):
        Replicas.attach(run)


def test_run_without_replica_groups_has_no_replica_batches():
    accelerator = Accelerator(cpu=True)
    assert accelerator.replicas is None
    with pytest.raises(RuntimeError, match="has no replica groups"):
        accelerator.replica_batches([], 0)
