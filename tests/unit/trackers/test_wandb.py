"""Tracking with Weights & Biases."""

from accelerate.trackers.wandb import WandBTracker


def test_a_run(library):
    library.install("wandb")
    tracker = WandBTracker("project", name="run")
    assert library.taken() == [] and tracker.tracker is None
    tracker.start()
    assert library.taken() == [("wandb.init", (), {"project": "project", "name": "run"})]
    assert tracker.tracker == "<wandb.init()>"
    tracker.store_init_configuration({"lr": 0.1})
    assert library.taken() == [("wandb.config.update", ({"lr": 0.1},), {"allow_val_change": True})]
    tracker.log({"loss": 0.5, "note": "x"}, step=3, commit=False)
    tracker.log({"loss": 0.5})
    assert library.taken() == [
        ("wandb.init().log", ({"loss": 0.5, "note": "x"},), {"step": 3, "commit": False}),
        ("wandb.init().log", ({"loss": 0.5},), {"step": None}),
    ]
    tracker.finish()
    assert library.taken() == [("wandb.init().finish", (), {})]


def test_images_and_tables(library):
    library.install("wandb")
    tracker = WandBTracker("project")
    tracker.start()
    library.taken()
    tracker.log_images({"pictures": ["one", "two"]}, step=2, commit=False)
    *images, logged = library.taken()
    assert [call[1:] for call in images] == [(("one",), {}), (("two",), {})]
    assert logged[2] == {"step": 2, "commit": False}
    tracker.log_table("table", columns=["a"], data=[[1]], step=4)
    logged = library.taken()
    assert logged[0] == ("wandb.Table", (), {"columns": ["a"], "data": [[1]], "dataframe": None})
    assert logged[1] == ("wandb.init().log", ({"table": "<wandb.Table()>"},), {"step": 4})


def test_every_rank_may_log():
    assert WandBTracker.main_process_only is False and WandBTracker.requires_logging_directory is False
