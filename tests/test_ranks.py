"""Two processes draw, score, compare and learn as one does."""

import lightning as L
import pytest
import torch

from lit_diffrl.policies import SD3Policy
from lit_diffrl.rollouts import Rollout
from tests import helpers

pytestmark = pytest.mark.distributed


class Report(L.Callback):
    """Leaves what a rank saw in a file, since nothing else comes back from a forked process."""

    def __init__(self, folder):
        self.folder, self.rounds = folder, []

    def on_rollout_end(self, trainer, module, rollout):
        fields = ("prompts", "sample_ids", "group_ids", "seeds", "reward", "advantages", "valid")
        seen = {name: getattr(rollout, name) for name in fields}
        # What was drawn: the noise of the start, or the clean samples that came of it.
        seen["drawn"] = rollout.latents if "latents" in rollout else rollout.transitions["latents"][:, 0]
        self.rounds.append(seen)

    def on_fit_end(self, trainer, module):
        metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if not k.startswith(("time/", "cost/"))}
        seen = {"rounds": self.rounds, "metrics": metrics, "scores": module.scores, "weights": helpers.weights(module)}
        torch.save(seen | {"steps": trainer.global_step}, self.folder / f"{trainer.global_rank}.pt")


def run(name, folder, prompts, out, ranks, *callbacks, ckpt=None, rounds=2):
    """Three samples a rank of three groups of two, so that one group is on both; one value of what each rank saw."""
    out.mkdir(exist_ok=True)
    torch.manual_seed(ranks)  # nothing may come from the global generator
    module = helpers.algorithm(name, folder)
    rate = 2.0 if name in ("flash_grpo", "jagg") else 0.1  # more than rounding
    module.optimizer = lambda p: torch.optim.SGD(p, lr=rate)
    many = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {}
    trainer = helpers.trainer(Report(out), *callbacks, max_epochs=rounds, limit_val_batches=None, **many)
    options = dict(prompts_per_round=3, group_size=2, rollout_batch_size=2, batch_size=2, updates_per_round=3)
    data = helpers.data(prompts, **options)
    data.val_prompts = data.val_prompts[:5]  # two ranks cannot halve them
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return [torch.load(out / f"{rank}.pt") for rank in range(ranks)]


def joined(reports, round_, name):
    parts = [r["rounds"][round_][name] for r in reports]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [x for part in parts for x in part]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("a red fox\na blue bird\na green frog\na gold fish\na grey wolf\na white cat\n")
    return path


@pytest.fixture(scope="module", params=["flow_grpo", "nft", "flash_grpo", "jagg"])
def one_and_two(request, sd35_folder, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param)
    return tuple(run(request.param, sd35_folder, prompts, out / str(ranks), ranks) for ranks in (1, 2))


def test_two_ranks_draw_and_compare_the_samples_of_one(one_and_two):
    one, two = one_and_two
    for round_ in range(2):
        assert joined(two, round_, "prompts") == joined(one, round_, "prompts")
        for name in ("sample_ids", "group_ids", "seeds", "valid"):
            assert torch.equal(joined(two, round_, name), joined(one, round_, name)), name
        for name, bound in (("drawn", 1e-4), ("reward", 1e-5), ("advantages", 5e-3)):
            torch.testing.assert_close(joined(two, round_, name), joined(one, round_, name), atol=bound, rtol=0)
    assert joined(two, 0, "group_ids").tolist() == [0, 0, 1, 1, 2, 2]
    assert two[0]["rounds"][0]["sample_ids"].tolist() == [0, 1, 2]  # the second group is on both ranks
    assert not torch.equal(joined(one, 0, "drawn"), joined(one, 1, "drawn"))


def test_two_ranks_learn_what_one_learns(one_and_two, sd35_folder):
    one, two = one_and_two
    assert [r["steps"] for r in (*one, *two)] == [6, 6, 6]
    policy = SD3Policy(sd35_folder)
    policy.load()
    start = torch.cat([v.detach().flatten() for v in policy.transformer.state_dict().values()])

    def flat(report):
        return torch.cat([v.flatten() for k, v in report["weights"].items() if k.startswith("transformer.")])

    moved = (flat(one[0]) - start).norm()
    assert moved / start.norm() > 1e-4
    for rank in two:
        assert (flat(rank) - flat(one[0])).norm() / moved < 1e-4
    assert torch.equal(flat(two[0]), flat(two[1]))


def test_metrics_of_two_ranks_are_those_of_one(one_and_two):
    one, two = one_and_two
    assert two[0]["metrics"].keys() == one[0]["metrics"].keys() == two[1]["metrics"].keys()
    for name, value in one[0]["metrics"].items():
        if "ratio" in name or "clip" in name:
            continue  # of the size of rounding
        if name.startswith("train/gradient_"):
            continue  # of the one group that each rank looks at
        for rank in two:
            assert rank["metrics"][name] == pytest.approx(value, rel=2e-2, abs=1e-4), name


def test_an_odd_number_of_prompts_is_validated_on_two_ranks_as_on_one(one_and_two):
    one, two = one_and_two
    for rank in two:
        for name, scores in one[0]["scores"].items():
            assert len(scores) == 5
            torch.testing.assert_close(rank["scores"][name], scores, atol=1e-5, rtol=0)
        assert rank["metrics"]["val/reward"] == pytest.approx(one[0]["scores"]["reward"].mean().item(), abs=1e-5)


class SaveInside(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:  # the end of the first of three updates
            trainer.save_checkpoint(self.path)


def test_a_round_that_is_half_learnt_on_two_ranks_is_taken_up_on_two(sd35_folder, prompts, tmp_path):
    path = tmp_path / "inside.ckpt"
    straight = run("flow_grpo", sd35_folder, prompts, tmp_path / "straight", 2, SaveInside(path), rounds=1)
    loops = torch.load(path, weights_only=True)["loops"]["fit_loop"]
    ranks = loops["state_dict"]["combined_loader"][0]["ranks"]
    buffers = [Rollout.from_state(rank["buffer"]) for rank in ranks]
    assert [b.sample_ids.tolist() for b in buffers] == [[0, 1, 2], [3, 4, 5]]
    resumed = run("flow_grpo", sd35_folder, prompts, tmp_path / "resumed", 2, ckpt=path, rounds=1)
    for a, b in zip(straight, resumed):
        assert all(torch.equal(a["weights"][k], b["weights"][k]) for k in a["weights"])
        learnt = [k for k in a["metrics"] if k.startswith(("train/", "reward/"))]
        assert learnt and all(a["metrics"][k] == b["metrics"][k] for k in learnt)
    with pytest.raises(ValueError, match="inside a round, which cannot go on with world_size 1 instead of 2"):
        run("flow_grpo", sd35_folder, prompts, tmp_path / "one", 1, ckpt=path, rounds=1)
