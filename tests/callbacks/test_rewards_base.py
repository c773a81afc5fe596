import math

import pytest
import torch

from lit_diffrl.callbacks import FunctionReward, PromptMatch, Reward, as_reward
from lit_diffrl.rollouts import RewardSpec, RolloutDataModule
from tests.callbacks.stand_in import PROMPTS, Counter, loader, media, rollout, trainer

NAN = math.nan


class Brightness(Reward):
    calls = None

    def score(self, rollout):
        self.calls = [*(self.calls or []), len(rollout)]
        return rollout.media.flatten(1).mean(1)


class VideoOnly(Brightness):
    requires = "video"


class ImageOnly(Brightness):
    requires = "image"


def run(reward, x, tmp_path="."):
    reward.on_rollout_batch_end(trainer(tmp_path, reward), Counter(), x)
    return x.rewards[reward.name]


def steps(n=4):
    """n pictures, constant 0, .1, .2, ..."""
    return torch.arange(n).div(10).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).clone()


def test_scores_are_scaled_shifted_float32_and_carry_their_spec():
    reward = Brightness(weight=-2.0, gate=0.5, scale=10, shift=1)
    x = rollout(steps())
    scores = run(reward, x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert x.reward_specs == {"brightness": RewardSpec(-2.0, 0.5, None)}


@pytest.mark.parametrize("size, calls", [(None, [5]), (1, [1] * 5), (2, [2, 2, 1]), (7, [5])])
def test_chunks_score_the_same(size, calls):
    reward = Brightness(batch_size=size)
    x = rollout()
    assert torch.equal(run(reward, x), x.media.flatten(1).mean(1))
    assert reward.calls == calls


def test_applies_to_its_sources_and_is_absent_elsewhere():
    reward = Brightness(applies_to=["a"])
    scores = run(reward, rollout(steps(), sources=["a", "b", "a", ""]))
    torch.testing.assert_close(scores, torch.tensor([0.0, NAN, 0.2, NAN]), equal_nan=True)
    assert reward.calls == [2]


def test_a_batch_without_its_source_is_not_a_failure():
    reward = Brightness(applies_to=["a"])
    scores = run(reward, rollout(steps()))
    assert scores.isnan().all() and reward.calls is None


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda x: (x * 255).byte(), "divide by 255"),
        (lambda x: x * 2 - 1, r"it looks like \[-1, 1\]"),
        (lambda x: x + 0.5, "from 0.5.* to 1.5.*rescale"),
        (lambda x: (x * 255).round(), "it looks like 0..255: divide by 255"),
        (lambda x: x.permute(0, 2, 3, 1), "permute"),
        (lambda x: x[0], "needs images"),
    ],
    ids=["uint8", "minus one to one", "out of range", "0 to 255", "channels last", "no batch"],
)
def test_a_batch_of_the_wrong_form_is_refused(spoil, said):
    x = rollout()
    x.media = spoil(x.media)
    with pytest.raises(ValueError, match=f"the reward brightness.*{said}"):
        run(Brightness(), x)


def test_a_hundredth_beyond_the_range_is_rounding():
    x = rollout(steps())
    x.media[0] -= 0.009
    assert run(Brightness(), x).isfinite().all()
    x.media[0] -= 0.002
    with pytest.warns(UserWarning, match=r"1 of 4 samples leave \[0, 1\], with values from -0.011 to -0.011"):
        assert run(Brightness(), x).isnan().tolist() == [True, False, False, False]


def test_no_media_are_named():
    with pytest.raises(ValueError, match="needs media"):
        run(Brightness(), rollout().without("media"))


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_sample_with_broken_media_is_masked_alone(bad):
    x = rollout(steps())
    x.media[1, 0, 0, 0] = bad
    reward = Brightness()
    with pytest.warns(UserWarning, match="brightness.*not finite"):
        scores = run(reward, x)
    torch.testing.assert_close(scores, torch.tensor([0.0, NAN, 0.2, 0.3]), equal_nan=True)


@pytest.mark.parametrize("bad", [-0.5, 1.5])
def test_a_sample_with_media_out_of_range_is_masked_alone_and_the_range_is_said_once(bad, recwarn):
    x = rollout(steps())
    x.media[1, 0, 0, 0], x.media[2] = bad, NAN
    reward = Brightness()
    for _ in range(2):
        scores = run(reward, x)
    torch.testing.assert_close(scores, torch.tensor([0.0, NAN, NAN, 0.3]), equal_nan=True)
    (said,) = [str(w.message) for w in recwarn if "brightness" in str(w.message)]
    low, high = min(bad, 0.1), max(bad, 0.1)
    assert "1 of 4 samples are not finite" in said
    assert f"1 of 4 samples leave [0, 1], with values from {low} to {high}" in said


def test_a_batch_that_leaves_the_range_whole_is_of_the_wrong_form_whatever_is_not_finite_in_it():
    x = rollout(media(n=3, value=-0.5))
    x.media[1] = NAN
    with pytest.raises(ValueError, match=r"from -0.5 to -0.5: it looks like \[-1, 1\]"):
        run(Brightness(), x)


class Fragile(Brightness):
    """Raises for a batch with a picture of .1, and gives infinity for .2."""

    def score(self, rollout):
        scores = super().score(rollout)
        if scores.sub(0.1).abs().min() < 1e-6:
            raise RuntimeError("cannot read 0.1")
        return torch.where(scores.sub(0.2).abs() < 1e-6, math.inf, scores)


def test_a_sample_that_raises_is_masked_alone():
    reward = Fragile()
    with pytest.warns(UserWarning, match="cannot read 0.1"):
        scores = run(reward, rollout(steps()))
    torch.testing.assert_close(scores, torch.tensor([0.0, NAN, NAN, 0.3]), equal_nan=True)


def test_a_first_batch_that_fails_whole_is_a_mistake():
    with pytest.raises(RuntimeError, match=r"any of the first 3 samples.*division by zero"):
        run(as_reward("broken", lambda x: 1 / 0), rollout(steps(3)))
    with pytest.raises(RuntimeError, match="their media are not finite"):
        run(Brightness(), rollout(media(n=2, value=NAN)))


def test_a_later_batch_that_fails_whole_is_masked():
    reward = Fragile()
    run(reward, rollout(steps(1)))
    with pytest.warns(UserWarning, match="masked"):
        scores = run(reward, rollout(media(n=2, value=0.1)))
    assert scores.isnan().all()


@pytest.mark.parametrize(
    "wrong", [lambda x: x.media.mean(), lambda x: x.media.mean((1, 2, 3))[:, None], lambda x: [1.0]]
)
def test_a_wrong_shape_is_named(wrong):
    with pytest.raises(ValueError, match=r"must give a tensor \(5,\)"):
        run(as_reward("wrong", wrong), rollout())


class WithParts(Brightness):
    parts = ("low", "high")

    def score(self, rollout):
        rollout.rewards["low"] = rollout.media.flatten(1).amin(1)
        rollout.rewards["high"] = torch.where(rollout.media.flatten(1).amax(1) > 0.25, 1.0, NAN)
        return super().score(rollout)


def test_parts_are_watched_without_weight_and_their_nan_is_no_failure():
    reward = WithParts(weight=3.0, batch_size=3, applies_to=["a"], scale=2)
    x = rollout(steps(), sources=["a", "a", "a", "a"])
    run(reward, x)
    torch.testing.assert_close(x.rewards["with_parts"], torch.tensor([0.0, 0.2, 0.4, 0.6]))
    torch.testing.assert_close(x.rewards["with_parts/low"], torch.tensor([0.0, 0.1, 0.2, 0.3]))
    torch.testing.assert_close(x.rewards["with_parts/high"], torch.tensor([NAN, NAN, NAN, 1.0]), equal_nan=True)
    assert x.reward_specs["with_parts/low"] == RewardSpec(0.0, None, ["a"])


def test_the_rollout_keeps_what_it_has_and_the_reward_sees_no_other_rewards():
    x = rollout(steps(), transitions={"log_prob": torch.ones(4, 2)})
    run(as_reward("first", lambda r: torch.ones(len(r))), x)
    seen = []
    run(as_reward("second", lambda r: seen.append((r.rewards, r.transitions)) or torch.zeros(len(r))), x)
    assert seen == [({}, {})]
    assert list(x.rewards) == ["first", "second"] and torch.equal(x.transitions["log_prob"], torch.ones(4, 2))


def test_names():
    class JPEGSize2Big(Brightness):
        pass

    def redness(rollout):
        return rollout.media[:, 0].mean((1, 2))

    assert JPEGSize2Big().name == "jpeg_size2_big"
    assert FunctionReward(redness).name == "redness"
    assert as_reward("sharp", Brightness()).state_key == "Brightness[sharp]"
    with pytest.raises(TypeError, match=r"'sharp' is .*must be a Reward"):
        as_reward("sharp", Brightness)


def test_two_rewards_of_one_name_are_refused(tmp_path):
    a, b = Brightness(), as_reward("brightness", lambda r: torch.ones(len(r)))
    with pytest.raises(ValueError, match="'brightness': another reward has it"):
        trainer(tmp_path, a, b, max_steps=1).fit(Counter(), loader())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, f"`{name}` is a figure of all rewards together") for name in ("reward", "mean", "std", "failed")),
        ("flat_groups", "`flat_groups` is a figure"),
        ("", "it is empty"),
        ("match/soft", "what follows `/` is a part"),
    ],
)
def test_a_name_that_the_log_has_for_something_else_is_refused(tmp_path, name, why):
    with pytest.raises(ValueError, match=f"Brightness cannot have the name '{name}': {why}"):
        trainer(tmp_path, as_reward(name, Brightness()), max_steps=1).fit(Counter(), loader())


@pytest.mark.parametrize(("part", "why"), [("std", "`reward/spread/std` is logged of every reward"), ("", "is empty")])
def test_a_part_that_the_log_has_for_something_else_is_refused(tmp_path, part, why):
    class Spread(Brightness):
        parts = ("low", part)

    with pytest.raises(ValueError, match=f"Spread cannot have a part '{part}'.*{why}"):
        trainer(tmp_path, Spread(), max_steps=1).fit(Counter(), loader())


@pytest.mark.parametrize("cls, kind, fits", [
    (VideoOnly, "image", False), (ImageOnly, "video", False), (ImageOnly, "image", True), (Brightness, "video", True),
])  # fmt: skip
def test_media_kind_must_fit_the_policy(tmp_path, cls, kind, fits):
    fit = lambda: trainer(tmp_path, cls(), max_steps=1).fit(Counter(kind), loader(), loader())  # noqa: E731
    if fits:
        return fit()
    with pytest.raises(
        ValueError, match=f"{cls().name} .* scores {cls.requires}s, but the policy Module makes {kind}s"
    ):
        fit()


class Heavy(Brightness):
    """Notes where its weights were loaded to, and keeps one."""

    def __init__(self, loaded, **kwargs):
        super().__init__(**kwargs)
        self.loaded = loaded

    def load(self, device):
        self.loaded.append(str(device))
        self.kept = torch.ones(1)


def test_loading_happens_once_and_never_to_predict(tmp_path):
    loaded = []
    reward, module = Heavy(loaded), Counter()
    assert loaded == []
    trainer(tmp_path, reward).predict(module, loader())
    assert loaded == []
    trainer(tmp_path, reward, max_steps=1).fit(module, loader(), loader())
    trainer(tmp_path, reward).validate(module, loader(), verbose=False)
    assert loaded == ["cpu"]


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_nothing_is_loaded_before_the_start_up_checks_of_all_rewards_and_the_model(tmp_path, stage):
    class Refuses(Counter):
        def setup(self, stage):
            raise ValueError("the model refuses")

    loaded = []
    for module, last, said in ((Counter(), VideoOnly(), "video_only"), (Refuses(), Brightness(), "the model refuses")):
        with pytest.raises(ValueError, match=said):
            getattr(trainer(tmp_path, Heavy(loaded), last), stage)(module, loader())
    assert loaded == []


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_models_are_loaded_before_the_first_samples_are_drawn(tmp_path, stage):
    loaded, seen = [], []

    class Sees(Counter):
        def training_step(self, batch, batch_idx):
            seen.append(list(loaded))
            return super().training_step(batch, batch_idx)

    module = Sees(make=lambda m: seen.append(list(loaded)) or rollout())
    options = {"max_steps": 1, "limit_val_batches": 0} if stage == "fit" else {}
    getattr(trainer(tmp_path, Heavy(loaded), **options), stage)(module, loader())
    assert seen == [["cpu"]]


def test_a_model_loaded_in_validation_can_be_used_in_training(tmp_path):
    reward = Heavy([])
    trainer(tmp_path, reward).validate(Counter(), loader(), verbose=False)
    assert not reward.kept.is_inference()


def test_unknown_sources_are_found_at_start(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "source": "ocr"}\n{"prompt": "y", "source": "pick"}\n')
    data = RolloutDataModule(
        tmp_path / "p.jsonl", prompts_per_round=2, group_size=2, rollout_batch_size=2, batch_size=2
    )
    run = trainer(tmp_path)
    run.datamodule = data
    reward = Brightness(applies_to=["ocr", "pikc"])
    with pytest.raises(ValueError, match="names 'pikc', but the prompts have the sources 'ocr', 'pick'"):
        reward._check_sources(run)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"weight": NAN}, "weight of the reward brightness is nan"),
        ({"scale": math.inf}, "scale"),
        ({"gate": NAN}, "gate"),
        ({"batch_size": 0}, "batch_size of the reward brightness is 0"),
        ({"applies_to": []}, "list of prompt sources"),
        ({"applies_to": "ocr"}, "list of prompt sources"),
    ],
)
def test_wrong_settings_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        Brightness(**options)


def test_scores_keep_their_digits_under_autocast():
    left = torch.full((1, 64), 1 + 2**-10)
    reward = as_reward("product", lambda r: (left @ torch.ones(64, len(r)))[0] / 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(reward, rollout()), torch.full((5,), 1 + 2**-10))


@pytest.fixture
def half_precision_by_default():
    """As inside of the steps of a run in ``bf16-true``."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_keep_their_digits_where_new_tensors_are_half_precision(half_precision_by_default):
    digits = 1 + 2**-10
    scores = run(as_reward("listed", lambda r: torch.tensor([digits] * len(r))), rollout())
    assert scores.dtype == torch.float32 and scores.tolist() == [digits] * 5
    assert torch.get_default_dtype() == torch.bfloat16


def test_the_default_dtype_comes_back_where_scoring_fails(half_precision_by_default):
    with pytest.raises(ValueError, match="must give a tensor"):
        run(as_reward("wrong", lambda r: r.media.mean()), rollout())
    assert torch.get_default_dtype() == torch.bfloat16


def square(colour, ground):
    picture = torch.tensor(ground).div(255).view(3, 1, 1).expand(3, 32, 32).clone()
    picture[:, 10:15, 12:17] = torch.tensor(colour).div(255).view(3, 1, 1)
    return picture


@pytest.mark.parametrize("mode", ["soft", "strict", "mean"])
def test_prompt_match(mode):
    x = rollout(torch.stack([square((220, 40, 40), (10, 10, 10))] * 3))
    x.prompts = ["one red square on black", "one blue square on black", PROMPTS[0]]
    reward = PromptMatch(mode=mode)
    with pytest.warns(UserWarning, match="cannot read the prompt 'a red fox'"):
        scores = run(reward, x)
    wrong = {"soft": 0.25, "strict": 0.0, "mean": 0.125}[mode]
    torch.testing.assert_close(scores, torch.tensor([1.0, wrong, NAN]), equal_nan=True)
    torch.testing.assert_close(x.rewards["prompt_match/strict"], torch.tensor([1.0, 0.0, NAN]), equal_nan=True)
    torch.testing.assert_close(x.rewards["prompt_match/color"], torch.tensor([1.0, 0.0, NAN]), equal_nan=True)
    assert x.rewards["prompt_match/position"].isnan().all()
