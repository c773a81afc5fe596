import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_diffrl.callbacks import RichRolloutProgressBar, TQDMRolloutProgressBar
from lit_diffrl.rollouts import hooks
from tests.callbacks.stand_in import Counter, loader, rollout, trainer


class Rolls(Callback):
    """Announces ten samples, of which five are drawn at a time, and looks at the bar in between."""

    def __init__(self, look, fail=False):
        self.look, self.fail, self.seen = look, fail, []

    def on_train_epoch_start(self, trainer, module):
        bar = trainer.progress_bar_callback
        hooks.call(trainer, "on_rollout_start", 10)
        for _ in range(2):
            self.seen.append(self.look(bar))
            hooks.call(trainer, "on_rollout_batch_end", rollout())
        self.seen.append(self.look(bar))
        if self.fail:
            raise RuntimeError("reward server gone")
        hooks.call(trainer, "on_rollout_end", rollout())
        self.seen.append(self.look(bar))


def look_rich(bar):
    return [(t.completed, t.total) for t in bar.progress.tasks if t.description.strip() == "Rollout"]


def look_tqdm(bar):
    return [(bar._rollout.n, bar._rollout.total)] if bar._rollout is not None else []


BARS = [(RichRolloutProgressBar, look_rich), (TQDMRolloutProgressBar, look_tqdm)]


@pytest.mark.parametrize("bar, look", BARS)
def test_the_rollout_is_counted_and_then_gone(tmp_path, bar, look):
    rolls = Rolls(look)
    trainer(tmp_path, bar(), rolls, max_epochs=2).fit(Counter(), loader(2), loader())
    assert rolls.seen == [[(0, 10)], [(5, 10)], [(10, 10)], []] * 2


@pytest.mark.parametrize("bar, look", BARS)
def test_a_rollout_that_fails_leaves_nothing_behind(tmp_path, bar, look):
    callback = bar()
    with pytest.raises(RuntimeError, match="server gone"):
        trainer(tmp_path, callback, Rolls(look, fail=True), max_epochs=2).fit(Counter(), loader(2), loader())
    trainer(tmp_path, callback).validate(Counter(), loader(), verbose=False)


@pytest.mark.parametrize("bar, look", BARS)
def test_the_number_of_the_run_is_not_shown_and_rounds_count_from_one(tmp_path, bar, look):
    shown = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            module.log("x", 1.5, prog_bar=True)
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))

        def on_train_epoch_end(self, trainer, module):
            bar = trainer.progress_bar_callback
            rich = isinstance(bar, RichRolloutProgressBar)
            shown.append(bar.progress.tasks[0].description.strip() if rich else bar.train_progress_bar.desc.strip(": "))

    trainer(tmp_path, bar(), Look(), max_epochs=2, logger=CSVLogger(tmp_path)).fit(Counter(), loader(1), loader())
    assert "v_num" not in shown[0] and shown[2]["x"] == 1.5
    assert [shown[1], shown[3]] == ["Round 1/2", "Round 2/2"]
