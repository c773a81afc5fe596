"""The record of samples: picking, joining, moving and saving."""

import pytest
import torch

from lit_diffrl.rollouts import RewardSpec, Rollout


def rollout(n: int = 4, first: int = 0) -> Rollout:
    ids = torch.arange(first, first + n)
    record = Rollout(
        [f"prompt {i}" for i in ids.tolist()],
        sources=["a", "b"] * (n // 2),
        metadata=[{"i": i} for i in ids.tolist()],
        sample_ids=ids,
        group_ids=ids // 2,
        seeds=ids + 100,
        media=ids.view(-1, 1, 1, 1).expand(n, 3, 2, 2).float() / 10,
    )
    record.transitions = {"latents": ids.view(-1, 1, 1) * 10 + torch.arange(3.0).view(1, 3, 1)}
    record.rewards = {"red": ids.float() / 2}
    record.reward_specs = {"red": RewardSpec(0.5, None, ["a"])}
    return record


def same(a: Rollout, b: Rollout) -> None:
    def flat(x):
        if isinstance(x, dict):
            return {k: flat(v) for k, v in x.items()}
        return x.tolist() if isinstance(x, torch.Tensor) else x

    assert {k: flat(v) for k, v in a.__dict__.items()} == {k: flat(v) for k, v in b.__dict__.items()}


@pytest.mark.parametrize("rows", [torch.tensor([2, 0, 2]), slice(1, 3), torch.tensor([], dtype=torch.int64)])
def test_picked_samples_keep_all_that_belongs_to_them(rows):
    whole = rollout()
    ids = torch.arange(4)[rows].tolist()
    part = whole[rows]
    assert len(part) == len(ids)
    assert part.prompts == [f"prompt {i}" for i in ids]
    assert part.sources == ["ab"[i % 2] for i in ids]
    assert part.metadata == [{"i": i} for i in ids]
    assert part.sample_ids.tolist() == ids and part.seeds.tolist() == [100 + i for i in ids]
    assert part.media[:, 0, 0, 0].tolist() == pytest.approx([i / 10 for i in ids])
    assert part.rewards["red"].tolist() == [i / 2 for i in ids]
    assert part.transitions["latents"][:, 1, 0].tolist() == [10 * i + 1 for i in ids]
    assert part.reward_specs == whole.reward_specs


def test_a_row_is_one_kept_step_of_one_sample():
    batch = rollout().rows(torch.tensor([3, 0, 0]), torch.tensor([2, 0, 1]))
    assert batch.transitions["latents"][:, 0].tolist() == [32, 0, 1]
    assert batch.draws.tolist() == [2, 0, 1] and batch.sample_ids.tolist() == [3, 0, 0]
    assert batch.prompts == ["prompt 3", "prompt 0", "prompt 0"]


def test_rows_leave_the_whole_as_it_was():
    whole = rollout()
    whole.rows(torch.tensor([0]), torch.tensor([0]))
    same(whole, rollout())
    assert "draws" not in whole


def test_joined_parts_are_the_whole():
    same(Rollout.cat([rollout(2, 0), rollout(2, 2)]), rollout(4))
    same(Rollout.cat([rollout(4)[:1], rollout(4)[1:]]), rollout(4))


def test_moving_keeps_digits_and_specs():
    moved = rollout().to("cpu")
    same(moved, rollout())
    assert moved.reward_specs["red"] == RewardSpec(0.5, None, ["a"])
    assert moved.sample_ids.dtype == torch.int64 and moved.media.dtype == torch.float32


def test_without_drops_fields_and_keeps_the_whole():
    whole = rollout()
    part = whole.without("media", "transitions")
    assert "media" not in part and "transitions" not in part and "rewards" in part
    assert "media" in whole


def test_a_record_survives_a_weights_only_file(tmp_path):
    whole = rollout()
    torch.save(whole.state_dict(), tmp_path / "x.pt")
    read = Rollout.from_state(torch.load(tmp_path / "x.pt", weights_only=True))
    same(read, whole)
    assert isinstance(read.reward_specs["red"], RewardSpec) and read.reward_specs["red"].applies("a")
    assert not read.reward_specs["red"].applies("b")


def test_defaults_number_the_samples():
    plain = Rollout(["x", "y"])
    assert plain.sample_ids.tolist() == [0, 1] and plain.sources == ["", ""] and plain.metadata == [{}, {}]
    plain.metadata[0]["k"] = 1
    assert plain.metadata[1] == {}


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed", "64-true"])
def test_precision_plugins_leave_the_record_alone(precision):
    from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision

    plugin = {
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "64-true": DoublePrecision,
    }[precision]()
    assert plugin.convert_input(rollout()).rewards["red"].dtype == torch.float32
