import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lit_diffrl.callbacks import EMA
from lit_diffrl.policies.saved import weights_of
from tests.callbacks.stand_in import Counter, loader, trainer


class Watch(Callback):
    """Notes the average and the live weight after every update."""

    def __init__(self, ema):
        self.ema, self.averages, self.live = ema, [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.averages += [self.ema.average[k].item() for k in self.ema.average]
        self.live.append(module.weight.item())


class SaveInValidation(Callback):
    def __init__(self, path):
        self.path = path

    def on_validation_batch_end(self, trainer, module, *_):
        trainer.save_checkpoint(self.path)


class Fails(Callback):
    def on_validation_batch_end(self, *_):
        raise RuntimeError("broken reward")


def fit(tmp_path, ema, *callbacks, module=None, updates=3, ckpt=None, **options):
    module = module or Counter()
    watch = Watch(ema)
    options = {"max_epochs": 1, "limit_val_batches": 0, **options}
    run = trainer(tmp_path, ema, watch, *callbacks, **options)
    run.fit(module, loader(updates * run.accumulate_grad_batches), loader(), ckpt_path=ckpt)
    return module, watch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_averages_once_an_update(tmp_path, accumulate):
    _, watch = fit(tmp_path, EMA(0.9), accumulate_grad_batches=accumulate)
    assert watch.live[accumulate - 1 :: accumulate] == [1, 2, 3]
    assert watch.averages[accumulate - 1 :: accumulate] == pytest.approx([0.1, 0.29, 0.561], abs=1e-6)


def test_warmup_forgets_the_beginning(tmp_path):
    _, watch = fit(tmp_path, EMA(0.9, warmup=True))
    assert watch.averages == pytest.approx([0.9, 1.8, 2.7], abs=1e-6)


def test_a_later_start_copies_the_weights_of_that_update(tmp_path):
    _, watch = fit(tmp_path, EMA(0.9, start_step=2), updates=4)
    assert watch.averages == pytest.approx([2.0, 2.1, 2.29], abs=1e-6)


def test_before_the_start_validation_and_the_end_see_live_weights(tmp_path):
    ema = EMA(0.9, start_step=1000)
    module, _ = fit(tmp_path, ema, updates=8, val_check_interval=4, limit_val_batches=1)
    assert module.seen == [4, 8] and module.weight.item() == 8 and not ema.average


def test_validation_sees_the_average_and_training_goes_on_live(tmp_path):
    module, watch = fit(tmp_path, EMA(0.9), val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=-1)
    assert module.seen == pytest.approx([0, 0.1, 0.29, 0.561], abs=1e-6)
    assert watch.live == [1, 2, 3] and module.weight.item() == 3


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_see_the_average_of_a_checkpoint(tmp_path, stage):
    ema = EMA(0.9)
    fit(tmp_path, ema, ModelCheckpoint(tmp_path, filename="a"), enable_checkpointing=True)
    for callbacks, expected in (([EMA(0.9)], 0.561), ([], 3)):
        module, seen = Counter(), []
        module.make = lambda m, seen=seen: seen.append(m.weight.item())
        module.validation_step = module.test_step = lambda batch, i, m=module: m.make(m)
        module.on_validation_epoch_end = module.on_test_epoch_end = lambda: None
        getattr(trainer(tmp_path, *callbacks), stage)(module, loader(), ckpt_path=tmp_path / "a.ckpt")
        assert seen == pytest.approx([expected], abs=1e-6) and module.weight.item() == 3


def test_an_exception_in_validation_leaves_the_live_weights(tmp_path):
    ema, module = EMA(0.9), Counter()
    with pytest.raises(RuntimeError, match="broken reward"):
        fit(tmp_path, ema, Fails(), module=module, limit_val_batches=1)
    assert module.seen == pytest.approx([0.561], abs=1e-6)
    assert module.weight.item() == 3 and not ema.swapped_in


def test_a_checkpoint_within_validation_has_live_weights_and_resumes_exactly(tmp_path):
    path = tmp_path / "mid.ckpt"
    fit(tmp_path, EMA(0.9), SaveInValidation(path), limit_val_batches=1)
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["weight"].item() == 3
    assert weights_of(saved, "ema")["weight"].item() == pytest.approx(0.561, abs=1e-6)
    assert set(weights_of(saved, "ema")) == {"weight", "frozen"}

    _, whole = fit(tmp_path, EMA(0.9), updates=5)
    ema, module = EMA(0.9), Counter()
    trainer(tmp_path, ema, max_steps=5, limit_val_batches=0).fit(module, loader(3), loader(), ckpt_path=path)
    assert module.weight.item() == 5 and ema.average["weight"].item() == whole.averages[-1]


def test_warmup_goes_on_where_it_was(tmp_path):
    _, whole = fit(tmp_path, EMA(0.99, warmup=True), updates=4)
    fit(tmp_path, EMA(0.99, warmup=True), ModelCheckpoint(tmp_path, filename="w"), updates=2, enable_checkpointing=True)
    ema = EMA(0.99, warmup=True)
    fit(tmp_path, ema, updates=2, max_epochs=2, ckpt=tmp_path / "w.ckpt")
    assert ema.average["weight"].item() == whole.averages[-1]


def test_it_keeps_trainable_parameters_only_in_float32(tmp_path):
    ema = EMA(0.999)
    module, _ = fit(tmp_path, ema, module=Counter(dtype=torch.bfloat16), limit_val_batches=1)
    assert {k: (v.dtype, v.numel()) for k, v in ema.average.items()} == {"weight": (torch.float32, 1)}
    # 0.001 + 0.002 + 0.003, of which bfloat16 would keep two digits
    assert ema.average["weight"].item() == pytest.approx(0.005996001, rel=1e-5)
    assert module.weight.item() == 3 and module.weight.dtype == torch.bfloat16


def test_another_models_average_is_refused(tmp_path):
    fit(tmp_path, EMA(), ModelCheckpoint(tmp_path, filename="a"), enable_checkpointing=True)
    module = Counter()
    module.strict_loading = False
    module.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="has 1 tensors, the model trains 2; 1 are not in both, the first being extra"):
        trainer(tmp_path, EMA()).validate(module, loader(), ckpt_path=tmp_path / "a.ckpt")


def test_a_checkpoint_without_average_says_so():
    with pytest.raises(ValueError, match="holds no average"):
        weights_of({"state_dict": {}, "callbacks": {}}, "ema")


@pytest.mark.parametrize("options, said", [({"decay": 1.0}, "decay of EMA is 1.0"), ({"start_step": -1}, "start_step")])
def test_wrong_settings_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        EMA(**options)


def test_the_average_of_a_subclass_is_found_in_its_checkpoint(tmp_path):
    class Slower(EMA):
        pass

    fit(tmp_path, Slower(0.9), ModelCheckpoint(tmp_path, filename="s"), enable_checkpointing=True)
    saved = torch.load(tmp_path / "s.ckpt", weights_only=True)
    assert weights_of(saved, "ema")["weight"].item() == pytest.approx(0.561, abs=1e-6)
