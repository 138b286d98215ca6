"""The patches of the Trainer's losses: which shapes they take, and the arithmetic. The runs are in tests/interop."""

import dataclasses
import importlib
import types

import pytest
import torch
import transformers

import transformers_patch
from cases import cases
from transformers_patch import __main__ as program
from transformers_patch import engine, registry
from transformers_patch.errors import UnsupportedVersion
from transformers_patch.losses import (
    PATCHES,
    _agreed_form,
    _auxiliary,
    _items,
    _router_sums,
    _sharing,
    auxiliary_weight,
)

ENTRIES = [entry for entry in registry.ENTRIES if entry.part == "losses"]


def supported():
    try:
        return all(entry.check().needed for entry in ENTRIES)
    except UnsupportedVersion:
        return False


newer = pytest.mark.skipif(not supported(), reason="the losses are patched in newer releases")


def at(entry):
    """What an entry patches."""
    owner = importlib.import_module(entry.target.partition(":")[0])
    for name in entry.target.partition(":")[2].split("."):
        owner = vars(owner)[name]
    return owner


def test_every_patch_has_its_entry():
    assert {entry.name for entry in ENTRIES} == set(PATCHES)
    for entry in ENTRIES:
        patch = PATCHES[entry.name]
        assert entry.target.endswith(f":{patch.owner}.{patch.name}")


@newer
def test_they_are_applied_when_asked_for_and_taken_back_exactly():
    before = [at(entry) for entry in ENTRIES]
    transformers_patch.apply(checkpoints=True)
    assert [at(entry) for entry in ENTRIES] == before
    with transformers_patch.applied(losses=True):
        assert not {at(entry) for entry in ENTRIES} & {*before}
        assert {patch.applied for patch in transformers_patch.status() if patch.part == "losses"} == {"losses"}
    assert [at(entry) for entry in ENTRIES] == before


@newer
def test_run_takes_them(tmp_path, monkeypatch):
    script = tmp_path / "task.py"
    script.write_text("print()", "utf-8")
    asked = []
    monkeypatch.setattr(engine, "apply", lambda *words: asked.append(words))
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [""])
    assert program.main(["run", "--losses", str(script)]) == 0 and asked == [("preserve", False, True)]


def test_an_older_release_is_refused_for_them_alone(monkeypatch):
    older = [
        dataclasses.replace(entry, versions=">=99") if entry.part == "losses" else entry for entry in registry.ENTRIES
    ]
    monkeypatch.setattr(engine, "ENTRIES", tuple(older))
    with pytest.raises(UnsupportedVersion, match="compute_loss was written for >=99.*Nothing was changed"):
        transformers_patch.apply(losses=True)
    assert not any(patch.applied for patch in transformers_patch.status())
    assert program.main(["status"]) == 0
    transformers_patch.apply()


def test_a_module_that_a_release_has_not_is_a_matter_of_the_release():
    absent = dataclasses.replace(ENTRIES[0], target="transformers.not_there_at_all:A.b")
    with pytest.raises(UnsupportedVersion, match=r"has no module transformers\.not_there_at_all"):
        absent.check()


@pytest.mark.parametrize("name", PATCHES)
def test_another_shape_is_refused(name):
    patch = PATCHES[name]
    module = types.ModuleType("borrowed")
    assert "has no function" in patch.examine(module).problems[0]

    def other(self, something):
        return something

    setattr(module, patch.owner, type(patch.owner, (), {patch.name: other}))
    takes, reads = patch.examine(module).problems
    assert f"{patch.name} takes (self, something)" in takes and all(word in reads for word in patch.reads)


class Model(torch.nn.Module):
    def __init__(self, config, **numbers):
        super().__init__()
        self.config = config
        vars(self).update(numbers)


def test_a_trainer_that_counts_the_auxiliary_loss_once_is_refused():
    """As with the pull request that `tools/upstream_patches` writes: both together would take too much away."""

    class Trainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            names = (
                self.label_smoother,
                self.model_accepts_loss_kwargs,
                self.accelerator.num_processes,
                self.get_tp_size(),
            )
            return average_auxiliary_loss(self, model, names)  # noqa: F821

    found = PATCHES["loss"].examine(types.SimpleNamespace(Trainer=Trainer, __name__="trainer"))
    assert found.problems == ("compute_loss has the repair already, or another one: it uses average_auxiliary_loss",)


def test_a_layer_that_shares_accumulated_gradients_is_refused():
    class ReplicatedWithGradAllReduce:
        def install_forward(self, module, mesh):
            def hooked(parameter):
                parameter.register_post_accumulate_grad_hook(mesh.all_reduce)
                parameter.register_hook(mesh)

            return hooked

    layers = types.SimpleNamespace(ReplicatedWithGradAllReduce=ReplicatedWithGradAllReduce, __name__="layers")
    (problem,) = PATCHES["loss_replicas"].examine(layers).problems
    assert problem == "install_forward has the repair already, or another one: it uses register_hook"


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize("average, items", [(True, 3.0), (False, 6.0)])
def test_tokens_of_one_rank_are_not_divided_whether_the_trainer_has_the_repair_or_not(repaired, average, items):
    def original(self, batch_samples, device):
        sums = self.args.average_tokens_across_devices
        return torch.tensor(6.0) / (1 if repaired and not sums else self.get_tp_size())

    assert _items(original)(trainer(average=average), [], None) == items


def test_the_weight_is_found_where_models_keep_it():
    plain = transformers.LlamaConfig()
    assert auxiliary_weight(Model(plain)) is None and auxiliary_weight(torch.nn.Linear(1, 1)) is None
    assert auxiliary_weight(Model(plain, aux_loss_coef=0.2)) == 0.2
    assert auxiliary_weight(Model(transformers.MixtralConfig(router_aux_loss_coef=0.3))) == 0.3
    # The model adds by the number that it has kept, whatever became of its configuration.
    config = transformers.MixtralConfig(router_aux_loss_coef=0.3)
    assert auxiliary_weight(Model(config, router_aux_loss_coef=0.0)) == 0.0
    nested = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(router_aux_loss_coef=0.4))
    assert auxiliary_weight(Model(nested)) == 0.4


def trainer(ranks=4, shared=2, average=True, cards=1, **changes):
    arguments = types.SimpleNamespace(average_tokens_across_devices=average, n_gpu=cards)
    known = {"label_smoother": None, "compute_loss_func": None, "model_accepts_loss_kwargs": True}
    known |= {"current_gradient_accumulation_steps": 5, "loss_is_scaled_for_ga": None, "args": arguments}
    known |= {"model": Model(None, router_aux_loss_coef=0.5), "get_tp_size": lambda: shared}
    known |= {"accelerator": types.SimpleNamespace(num_processes=ranks)}
    return types.SimpleNamespace(**{**known, **changes})


@cases(
    "made, training, times",
    ({}, True, 2 - 1 / 5),  # two replicas, five micro-batches
    ({}, False, 2 - 1),
    ({"average": False}, True, 1 - 1 / 5),
    ({"ranks": 1, "shared": 1, "cards": 3}, True, 3 - 1 / 5),  # one process that splits its batches
    ({"loss_is_scaled_for_ga": False}, True, 2 - 1),
)
def test_what_is_too_much_of_the_auxiliary_loss(made, training, times):
    outputs = {"aux_loss": torch.tensor(2.0)}
    added = _auxiliary(trainer(**made), torch.nn.Identity().train(training), {}, outputs, 7)
    assert added.item() == pytest.approx(-0.5 * 2.0 * times)


@cases(
    "changes, outputs, items",
    ({}, {"loss": torch.tensor(1.0)}, 7),
    ({}, (torch.tensor(1.0),), 7),
    ({}, {"aux_loss": torch.tensor(2.0)}, None),  # the Trainer divides all of such a loss itself
    ({"model_accepts_loss_kwargs": False}, {"aux_loss": torch.tensor(2.0)}, 7),
    ({"label_smoother": len}, {"aux_loss": torch.tensor(2.0)}, 7),  # the loss is not the model's
    ({"compute_loss_func": len}, {"aux_loss": torch.tensor(2.0)}, 7),
    ({"model": Model(None)}, {"aux_loss": torch.tensor(2.0)}, 7),
)
def test_where_nothing_is_too_much(changes, outputs, items):
    assert _auxiliary(trainer(**changes), torch.nn.Identity(), {}, outputs, items) is None


@pytest.mark.usefixtures("process_group")
def test_the_form_of_an_auxiliary_loss_is_found_or_said_to_be_unknown():
    layers = list(torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(3)))
    mask = torch.arange(12) < 7
    accelerator = types.SimpleNamespace(mixed_precision="no")
    told = trainer(accelerator=accelerator, args=types.SimpleNamespace(process_index=0))
    for chosen, counted in ((1, None), (2, None), (3, mask.float()), (8, None)):
        choices, probabilities, tokens = _router_sums(layers, chosen, counted)
        rows = torch.cat([layer if counted is None else layer[mask] for layer in layers]).softmax(-1)
        assert tokens == len(rows) and torch.allclose(probabilities, rows.sum(0))
        assert choices.sum(1).tolist() == [len(rows)] * chosen and choices[0].equal(
            rows.argmax(-1).bincount(minlength=8).float()
        )
        auxiliary = 8 * (choices.sum(0) * probabilities).sum() / tokens**2
        # The model may not have been given the mask.
        assert _agreed_form(told, auxiliary, layers, mask.float(), None) == chosen
    for changed, given in ((auxiliary * 1.01, layers), (auxiliary, [])):
        with pytest.warns(
            UserWarning, match="Model has no router_logits among its outputs, or an auxiliary loss that"
        ):
            assert _agreed_form(told, changed, given, None, None) == 0


def test_what_was_summed_is_shared_before_it_is_summed_again():
    def summed(weight):  # over two ranks with equal gradients
        weight.grad.mul_(2)

    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_hook(_sharing(weight, 2))
    weight.register_post_accumulate_grad_hook(summed)
    for count in (1, 2, 3):
        weight.sum().backward()
        assert weight.grad.tolist() == [2.0 * count] * 3
