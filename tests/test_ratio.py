"""Before the first update the network that learns is the one that drew: every likelihood ratio is 1."""

import pytest
import torch

from lit_diffrl.algorithms import FlowGRPO
from lit_diffrl.policies import LoRA, SD3Policy
from tests import helpers


class Frozen(torch.optim.SGD):
    """An optimiser that leaves the weights as they are."""

    def __init__(self, params):
        super().__init__(params, lr=0.0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("batch_size", "bound"), [(4, 1e-6), (2, 1e-5), (1, 1e-5)])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_ratio_is_one_before_the_first_update_with_lora_dropout(
    sd35_folder, prompt_file, precision, batch_size, bound, guidance_scale
):
    torch.manual_seed(0)
    module = FlowGRPO(
        SD3Policy(sd35_folder, lora=LoRA(rank=4, alpha=8, dropout=0.5)),
        num_steps=5,
        guidance_scale=guidance_scale,
        optimizer=Frozen,
    )
    seen = []
    loss = module.loss

    def spy(batch):
        rows, metrics = loss(batch)
        seen.append(metrics["first_ratio_deviation_max"].max().item())
        return rows, metrics

    module.loss = spy

    class Awake(helpers.L.Callback):
        """The up-projections of a fresh adapter are 0, and dropout before them shows nowhere."""

        def on_fit_start(self, trainer, module):
            for p in module.policy.parameters():
                if p.requires_grad:
                    p.data.normal_(0, 0.1)

    data = helpers.data(prompt_file, prompts_per_round=2, group_size=2, rollout_batch_size=4, batch_size=batch_size)
    helpers.trainer(Awake(), max_epochs=1, precision=precision).fit(module, datamodule=data)
    assert len(seen) == 16 // batch_size
    assert max(seen) <= bound


def test_ratio_leaves_one_after_an_update(sd35_folder, prompt_file):
    module = helpers.algorithm("flow_grpo", sd35_folder)
    run = helpers.trainer(max_epochs=1)
    run.fit(module, datamodule=helpers.data(prompt_file, updates_per_round=2))
    assert run.callback_metrics["train/first_ratio_deviation_max"] <= 1e-6
    assert run.callback_metrics["train/ratio_deviation"] > 1e-6
