"""Roles: one backbone as several policies."""

import copy

import pytest
import torch

from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.sampling.noise import randn


@pytest.fixture(params=["full", "lora"])
def policy(request, sd35_folder):
    torch.manual_seed(0)
    policy = SD3Policy(sd35_folder, lora=LoRA(rank=2, alpha=4) if request.param == "lora" else None)
    policy.load()
    for p in policy.parameters():  # a fresh adapter changes nothing: move it
        if p.requires_grad:
            p.data += 0.05 * torch.randn_like(p)
    return policy


def velocity(policy):
    size = policy.native_size()
    x = randn(policy.latent_shape(size), [3])
    return policy.velocity(x, torch.full((1,), 400.0), policy.encode_prompts(["a red fox"]), size=size).detach()


def move(policy):
    for p in policy.parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn_like(p)


def test_a_role_keeps_the_weights_that_it_was_made_of(policy):
    before = velocity(policy)
    policy.roles.add("old")
    move(policy)
    after = velocity(policy)
    with torch.no_grad(), policy.roles.use("old"):
        assert (velocity(policy) - before).abs().max() == 0
    assert (velocity(policy) - after).abs().max() == 0
    assert (after - before).abs().max() > 1e-4


def test_the_reference_is_the_model_before_training(sd35_folder):
    for lora in (None, LoRA(rank=2, alpha=4)):
        policy = SD3Policy(sd35_folder, lora=lora)
        policy.load()
        base = velocity(policy)
        policy.roles.add("reference")
        move(policy)
        with torch.no_grad(), policy.roles.use("reference"):
            assert (velocity(policy) - base).abs().max() == 0


def test_using_a_role_leaves_what_is_trained_as_it_was(policy):
    policy.roles.add("old")
    policy.roles.add("reference")
    trained = {k for k, p in policy.named_parameters() if p.requires_grad}
    for name in ("old", "reference"):
        with torch.no_grad(), policy.roles.use(name):
            pass
    assert {k for k, p in policy.named_parameters() if p.requires_grad} == trained
    assert trained and not any(".old." in k or "reference" in k for k in trained)


def test_a_role_is_refused_while_gradients_are_recorded(policy):
    policy.roles.add("old")
    with pytest.raises(RuntimeError, match="no_grad"), policy.roles.use("old"):
        pass


def test_the_policy_is_back_after_an_error_in_a_role(policy):
    policy.roles.add("old")
    move(policy)
    live = velocity(policy)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), policy.roles.use("old"):
        1 / 0  # noqa: B018
    assert (velocity(policy) - live).abs().max() == 0


def test_following_is_an_exponential_average(policy):
    policy.roles.add("old")
    old = {k: copy.deepcopy(p.data) for k, p in policy.named_parameters() if ".old." in k}
    move(policy)
    policy.roles.follow("old", 0.75)
    state = dict(policy.named_parameters())
    for key, before in old.items():
        live = state[key.replace("roles.copies.old", "transformer").replace(".old.", ".default.")]
        torch.testing.assert_close(state[key].data, 0.75 * before + 0.25 * live.data, rtol=1e-5, atol=1e-7)


def test_an_unknown_role_is_named(policy):
    with pytest.raises(KeyError, match="teacher_3"), torch.no_grad(), policy.roles.use("teacher_3"):
        pass


def test_checkpoints_leave_frozen_weights_out(policy):
    policy.roles.add("old")
    policy.roles.add("reference")
    kept = policy.trainable_state(policy.state_dict())
    assert any(".old." in k for k in kept)
    assert not any("reference" in k for k in kept)
    if policy.lora is not None:
        assert all(".lora_" in k for k in kept)
