"""The verifier of online RMSNorm where blocks are run again in backward."""

import json

import pytest
import torch

from lightning_boost import BoostParallelStrategy, LowRankLinear
from lightning_boost.callbacks.online_rms_norm_verifier import FILE_NAME, OnlineRMSNormVerifier
from tests.models import whole
from tests.processes import run_processes
from tests.users_module import WIDTH, UsersModule, loader, trainer_for


class _Alike(UsersModule):
    """Has norms with latents of one shape, three times 8 and two times 12: one's could be taken for another's."""

    def __init__(self):
        super().__init__()
        for layer in self.net.model.layers:
            layer.mlp.gate_proj, layer.mlp.up_proj = (LowRankLinear(WIDTH, 50, 12, activation="silu") for _ in range(2))


def _recomputed(folder, recompute, verify):
    torch.manual_seed(0)
    module, callbacks = _Alike(), [OnlineRMSNormVerifier(every_n_steps=2)] if verify else []
    strategy = BoostParallelStrategy(2, recompute=recompute)
    trainer_for(strategy=strategy, callbacks=callbacks, default_root_dir=folder).fit(module, loader())
    return {name: whole(parameter).detach().numpy() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("recompute", ["low_rank", "block"])
def test_blocks_that_run_again_take_none_of_the_comparison_s_latents(recompute, tmp_path):
    plain, verified = (run_processes(_recomputed, 2, tmp_path, recompute, verify)[0] for verify in (False, True))
    assert json.loads((tmp_path / FILE_NAME).read_text())["steps"] == [0, 2]
    assert [name for name, weight in plain.items() if (weight != verified[name]).any()] == []
