"""Rounds as a trainer runs them."""

import math

import lightning as L
import pytest
import torch

from lit_diffrl.algorithms import RVM, FlowGRPO
from lit_diffrl.callbacks import FunctionReward
from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.rollouts.geometry import draw_prompts
from tests import helpers


class Spy(L.Callback):
    """Remembers the rounds and the updates."""

    def __init__(self):
        self.rounds, self.steps, self.batches = [], [], []

    def on_rollout_end(self, trainer, module, rollout):
        self.rounds.append(rollout)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append((trainer.current_epoch, batch))

    def on_train_epoch_end(self, trainer, module):
        self.steps.append(trainer.global_step)


def module(folder: str, lr: float = 1.0, **options) -> FlowGRPO:
    torch.manual_seed(0)
    options = {"num_steps": 4, "clip": 1.0} | options
    return FlowGRPO(SD3Policy(folder), optimizer=lambda p: torch.optim.SGD(p, lr=lr), **options)


def fit(folder, prompts, *callbacks, trainer=None, model=None, **data):
    """Train on 6 samples a round, 3 trained steps each, and give what was seen of it."""
    spy, model = Spy(), model or module(folder)
    run = helpers.trainer(spy, *callbacks, **(trainer or {}))
    data = {"prompts_per_round": 2, "group_size": 3, "rollout_batch_size": 6, "batch_size": 18} | data
    run.fit(model, datamodule=helpers.data(prompts, **data))
    return run, model, spy


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.policy.parameters()])


def scoring(*scores) -> L.Callback:
    """A reward whose n-th call gives the n-th of ``scores``, each a number, a list, or a function of the rollout."""
    calls = iter(scores)

    def scripted(rollout):
        score = next(calls)
        score = score(rollout) if callable(score) else score
        return score if isinstance(score, torch.Tensor) else torch.tensor(score).float().expand(len(rollout)).clone()

    reward = FunctionReward(scripted)
    reward.name = "scripted"
    return reward


@pytest.fixture(scope="module")
def start(sd35_folder):
    policy = SD3Policy(sd35_folder)
    policy.load()
    return torch.cat([p.detach().flatten().double() for p in policy.parameters()])


def test_any_size_of_micro_batch_makes_the_same_update(sd35_folder, prompt_file, start):
    ends = {}
    for batch_size in (18, 6, 3, 2, 1, 4):  # in the last case the last micro-batch holds 2 of 4 rows
        run, model, spy = fit(sd35_folder, prompt_file, trainer={"max_epochs": 1}, batch_size=batch_size)
        assert run.global_step == 1 and len(spy.batches) == math.ceil(18 / batch_size)
        ends[batch_size] = flat(model)
    moved = (ends[18] - start).norm()
    assert moved > 1e-3
    for end in ends.values():
        assert (end - ends[18]).norm() / moved < 2e-4
        assert (end - ends[18]).norm() / start.norm() < 1e-6


def test_the_update_is_the_gradient_of_the_mean_loss(sd35_folder, prompt_file, start):
    """Of all rows of the round at once, by hand."""
    _, model, spy = fit(sd35_folder, prompt_file, trainer={"max_epochs": 1}, batch_size=4)
    again = module(sd35_folder)
    again.configure_model()
    again.policy.eval()
    whole = spy.rounds[0]
    rows = whole.rows(torch.arange(6).repeat_interleave(3), torch.arange(3).repeat(6))
    type(again).update_in_round, kept = 1, type(again).update_in_round
    try:
        again.loss(rows)[0].mean().backward()
    finally:
        type(again).update_in_round = kept
    gradient = torch.cat([p.grad.flatten().double() for p in again.policy.parameters()])
    torch.testing.assert_close(flat(model) - start, -gradient, atol=2e-4 * gradient.norm().item(), rtol=0)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_updates_of_a_round_are_counted_by_the_trainer(sd35_folder, prompt_file, updates):
    run, _, spy = fit(sd35_folder, prompt_file, trainer={"max_epochs": 4}, updates_per_round=updates, batch_size=4)
    assert run.global_step == 4 * updates
    assert spy.steps == [updates * (i + 1) for i in range(4)]


def test_every_row_of_a_round_is_learnt_from_once(sd35_folder, prompt_file):
    _, _, spy = fit(sd35_folder, prompt_file, updates_per_round=2, batch_size=4)
    for epoch in range(2):
        batches = [b for e, b in spy.batches if e == epoch]
        rows = [(i, d) for b in batches for i, d in zip(b.sample_ids.tolist(), b.draws.tolist())]
        assert sorted(rows) == [(i, d) for i in range(6) for d in range(3)]
        halves = [{i for b in batches[k : k + 3] for i in b.sample_ids.tolist()} for k in (0, 3)]
        assert len(halves[0]) == 3 and not halves[0] & halves[1]  # an update has all rows of its samples
        whole = spy.rounds[epoch]
        for b in batches:
            assert torch.equal(b.advantages, whole.advantages[b.sample_ids])
            picked = whole.transitions["log_prob"][b.sample_ids, b.draws]
            assert torch.equal(b.transitions["log_prob"], picked)


def test_rounds_draw_the_prompts_of_their_number_with_noise_of_their_own(sd35_folder, prompt_file):
    _, _, spy = fit(sd35_folder, prompt_file, trainer={"max_epochs": 3})
    texts = prompt_file.read_text().splitlines()
    for round_, rollout in enumerate(spy.rounds):
        assert rollout.prompts == [texts[i] for i in draw_prompts(1, round_, 2, 6) for _ in range(3)]
        assert rollout.group_ids.tolist() == [0, 0, 0, 1, 1, 1] and rollout.sample_ids.tolist() == list(range(6))
    assert sorted(p for r in spy.rounds for p in set(r.prompts)) == sorted(texts)
    noises = torch.cat([r.transitions["latents"][:, 0] for r in spy.rounds]).flatten(1)
    assert (torch.cdist(noises, noises) + 100 * torch.eye(18)).min() > 1
    assert len({s for r in spy.rounds for s in r.seeds.tolist()}) == 18


def test_a_prompt_drawn_twice_in_a_round_makes_two_groups(sd35_folder, tmp_path):
    prompts = tmp_path / "one.txt"
    prompts.write_text("a red fox\n")
    scores = lambda r: torch.tensor([0.0, 1.0, 2.0, 10.0, 11.0, 12.0])  # noqa: E731
    _, _, spy, error = only(scoring(scores), sd35_folder, prompts, 1)
    assert not error and set(spy.rounds[0].prompts) == {"a red fox"}
    assert spy.rounds[0].advantages.tolist() == pytest.approx([-1.2246, 0, 1.2246] * 2, abs=1e-3)


def test_samples_do_not_depend_on_how_many_are_drawn_at_once(sd35_folder, prompt_file):
    rounds = [
        fit(sd35_folder, prompt_file, trainer={"max_epochs": 1}, rollout_batch_size=size)[2].rounds[0]
        for size in (6, 4, 1)
    ]
    for other in rounds[1:]:
        assert torch.equal(other.transitions["latents"][:, 0], rounds[0].transitions["latents"][:, 0])
        assert other.prompts == rounds[0].prompts and torch.equal(other.seeds, rounds[0].seeds)
        torch.testing.assert_close(other.media, rounds[0].media, atol=1e-5, rtol=0)
        torch.testing.assert_close(other.rewards["red"], rounds[0].rewards["red"], atol=1e-6, rtol=0)


def only(reward: L.Callback, folder, prompts, rounds: int, **data):
    """Train with this reward alone."""
    spy, model = Spy(), module(folder)
    run = helpers.trainer(max_epochs=rounds)
    run.callbacks = [c for c in run.callbacks if not getattr(c, "is_reward", False)] + [reward, spy]
    data = {"prompts_per_round": 2, "group_size": 3, "rollout_batch_size": 6, "batch_size": 18} | data
    try:
        run.fit(model, datamodule=helpers.data(prompts, **data))
    except RuntimeError as error:
        return run, model, spy, str(error)
    return run, model, spy, ""


NAN = math.nan


def test_rounds_without_a_valid_reward_do_no_update_and_end_the_run(sd35_folder, prompt_file, start):
    run, model, spy, error = only(scoring(*[NAN] * 5), sd35_folder, prompt_file, 5, max_unscored_rounds=3)
    assert "no sample got a valid reward in 3 rounds in a row (data.max_unscored_rounds)" in error
    assert run.global_step == 0 and torch.equal(flat(model), start)
    assert len(spy.rounds) == 3 and not spy.batches


def test_a_scored_round_starts_the_count_of_unscored_ones_anew(sd35_folder, prompt_file):
    scores = [NAN, NAN, lambda r: torch.arange(6.0), NAN, NAN, lambda r: torch.arange(6.0)]
    run, _, spy, error = only(scoring(*scores), sd35_folder, prompt_file, 6, max_unscored_rounds=3)
    assert not error and run.global_step == 2 and len(spy.rounds) == 6
    assert [epoch for epoch, _ in spy.batches] == [2, 5]
    assert run.callback_metrics["reward/mean"] == pytest.approx(2.5)


def test_a_sample_whose_reward_failed_is_left_out_of_the_update(sd35_folder, prompt_file, start):
    scores = lambda r: torch.tensor([1.0, NAN, 3.0, 1.0, 2.0, 3.0])  # noqa: E731
    _, model, spy, error = only(scoring(scores), sd35_folder, prompt_file, 1)
    assert not error
    rollout = spy.rounds[0]
    assert rollout.valid.tolist() == [True, False, True, True, True, True]
    assert rollout.advantages.tolist() == pytest.approx([-1, 0, 1, -1.2246, 0, 1.2246], abs=1e-3)
    end = flat(model)
    assert end.isfinite().all() and not torch.equal(end, start)


def test_flat_rewards_leave_the_weights_as_they_are(sd35_folder, prompt_file, start):
    run, model, _, error = only(scoring(0.1, 0.1), sd35_folder, prompt_file, 2)
    assert not error and run.global_step == 2
    assert torch.equal(flat(model), start)
    assert run.callback_metrics["reward/flat_groups"] == 1


def test_a_run_without_rewards_is_refused_at_its_start(sd35_folder, prompt_file):
    run = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    with pytest.raises(ValueError, match="no reward: add one"):
        run.fit(module(sd35_folder), datamodule=helpers.data(prompt_file))


@pytest.mark.parametrize("mine", [2, 7])
def test_accumulation_that_contradicts_the_data_is_refused(sd35_folder, prompt_file, mine):
    with pytest.raises(ValueError, match=rf"accumulate_grad_batches is {mine}, .* 18 rows .*batch_size 4 are 5\."):
        fit(sd35_folder, prompt_file, trainer={"accumulate_grad_batches": mine}, batch_size=4)


def test_updates_that_do_not_divide_the_round_are_refused_before_a_model_is_loaded(sd35_folder, prompt_file):
    model = module(sd35_folder)
    model.policy.load = lambda: pytest.fail("loaded")
    with pytest.raises(ValueError, match=r"6 samples .*updates_per_round 5"):
        helpers.trainer().fit(model, datamodule=helpers.data(prompt_file, group_size=3, updates_per_round=5))


def test_algorithms_that_compare_samples_refuse_groups_of_one(sd35_folder, prompt_file):
    with pytest.raises(ValueError, match="group_size is 1: the advantage compares"):
        fit(sd35_folder, prompt_file, group_size=1)


def test_overfitting_draws_the_same_samples_again(sd35_folder, prompt_file):
    _, _, spy = fit(sd35_folder, prompt_file, trainer={"overfit_batches": 1.0})
    assert spy.rounds[0].prompts == spy.rounds[1].prompts and torch.equal(spy.rounds[0].seeds, spy.rounds[1].seeds)


def test_the_gradient_is_clipped_to_the_norm_of_the_trainer(sd35_folder, prompt_file, start):
    _, model, _ = fit(sd35_folder, prompt_file, trainer={"max_epochs": 1, "gradient_clip_val": 1e-3})
    assert (flat(model) - start).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_a_group_may_be_split_over_rollout_batches_and_updates(sd35_folder, prompt_file):
    torch.manual_seed(0)
    model = RVM(SD3Policy(sd35_folder, lora=LoRA(rank=2, alpha=4)), num_steps=2, solver="dpm2")
    run, _, spy = fit(
        sd35_folder,
        prompt_file,
        model=model,
        updates_per_round=3,
        rollout_batch_size=4,
        batch_size=1,
        trainer={"max_epochs": 1},
    )
    assert run.global_step == 3
    for group in (slice(0, 3), slice(3, 6)):
        assert spy.rounds[0].advantages[group].sum().abs() < 1e-4


def test_rewards_that_leave_nothing_to_learn_from_are_refused_before_the_model_loads(sd35_folder, prompt_file):
    reward = helpers.red()
    reward.weight = 0.0
    module = helpers.algorithm("rvm_reference", sd35_folder)
    run = helpers.trainer()
    run.callbacks = [c for c in run.callbacks if not getattr(c, "is_reward", False)] + [reward]
    with pytest.raises(ValueError, match="weight 0"):
        run.fit(module, datamodule=helpers.data(prompt_file))
    assert module.policy.pipeline is None


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_a_sample_that_went_astray_does_not_spoil_the_update_of_its_siblings(sd35_folder, prompt_file, name):
    module = helpers.algorithm(name, sd35_folder)
    collect = module.collect

    def astray(rollout, round_):
        rollout = collect(rollout, round_)
        for x in [rollout.media, *rollout.transitions.values(), *([rollout.latents] if "latents" in rollout else [])]:
            if x.ndim > 2:
                x[3] = math.nan
        return rollout

    module.collect = astray
    run = helpers.trainer(max_epochs=1)
    data = helpers.data(prompt_file)
    run.fit(module, datamodule=data)
    assert run.callback_metrics["reward/failed"] == 1
    assert run.callback_metrics["train/skipped_updates"] == 0
    assert run.callback_metrics["train/grad_norm"] > 0
    assert all(p.isfinite().all() for p in helpers.weights(module).values())


def test_masked_samples_are_in_no_metric(sd35_folder, prompt_file):
    module = helpers.algorithm("flow_grpo", sd35_folder)
    collect = module.collect

    def astray(rollout, round_):
        rollout = collect(rollout, round_)
        rollout.media[2] = math.nan
        for x in rollout.transitions.values():
            x[2] = math.nan if x.ndim > 2 else x[2] + 5  # a log-probability that is off
        return rollout

    module.collect = astray
    run = helpers.trainer(max_epochs=1)
    run.fit(module, datamodule=helpers.data(prompt_file))
    assert run.callback_metrics["train/first_ratio_deviation_max"] <= 1e-6
    assert run.callback_metrics["train/clip_fraction"] == 0


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_without_a_reward_is_refused_before_the_model_loads(sd35_folder, prompt_file, stage):
    module = helpers.algorithm("rvm_reference", sd35_folder)
    run = helpers.trainer()
    run.callbacks = [c for c in run.callbacks if not getattr(c, "is_reward", False)]
    with pytest.raises(ValueError, match="no reward"):
        getattr(run, stage)(module, datamodule=helpers.data(prompt_file))
    assert module.policy.pipeline is None


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_precisions_that_round_weights_and_noise_levels_are_refused(sd35_folder, prompt_file, precision):
    module = helpers.algorithm("rvm_reference", sd35_folder)
    with pytest.raises(ValueError, match=r"trainer\.precision"):
        helpers.trainer(precision=precision).fit(module, datamodule=helpers.data(prompt_file))
