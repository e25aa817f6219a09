"""Rotary frequencies against their formulas, written out for one pair of features at a time."""

import math

import pytest
import torch

from lightning_boost.config import RopeScaling
from lightning_boost.model.rotary import rotary_tables
from tests.models import small_config

HEAD_SIZE, CONTEXT, THETA = 8, 64, 10000.0


def _linear(frequency):
    return frequency / 4.0


def _llama3(frequency):
    """Hugging Face's rule: by the wavelength, against the context divided by the low and by the high factor."""
    wavelength = 2 * math.pi / frequency
    if wavelength < CONTEXT / 4.0:
        return frequency
    if wavelength > CONTEXT / 1.0:
        return frequency / 4.0
    smooth = (CONTEXT / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 4.0 + smooth * frequency


@pytest.mark.parametrize(
    ("rope_type", "formula"), [(None, lambda frequency: frequency), ("linear", _linear), ("llama3", _llama3)]
)
def test_frequencies_follow_the_formula(rope_type, formula):
    scaling = rope_type and RopeScaling(rope_type=rope_type, factor=4.0, original_max_position_embeddings=CONTEXT)
    config = small_config(rope_scaling=scaling, rope_theta=THETA)
    positions = torch.arange(200)
    cosines, sines = rotary_tables(positions, len(positions), config, like=torch.zeros(1))
    for pair in range(HEAD_SIZE // 2):
        angles = positions.double() * formula(THETA ** (-2 * pair / HEAD_SIZE))
        for feature in (pair, pair + HEAD_SIZE // 2):
            torch.testing.assert_close(cosines[:, feature].double(), angles.cos(), atol=2e-5, rtol=0)
            torch.testing.assert_close(sines[:, feature].double(), angles.sin(), atol=2e-5, rtol=0)


def test_the_dynamic_base_grows_beyond_the_context():
    scaling = RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=CONTEXT)
    scaled, plain = (small_config(rope_scaling=given) for given in (scaling, None))
    like = torch.zeros(1)
    inside = torch.arange(CONTEXT)
    assert torch.equal(rotary_tables(inside, CONTEXT, scaled, like)[0], rotary_tables(inside, CONTEXT, plain, like)[0])
    beyond = torch.arange(200)
    base = THETA * (2.0 * 200 / CONTEXT - 1.0) ** (HEAD_SIZE / (HEAD_SIZE - 2))
    angles = beyond.double() * base ** (-2 / HEAD_SIZE)
    torch.testing.assert_close(
        rotary_tables(beyond, 200, scaled, like)[0][:, 1].double(), angles.cos(), atol=2e-5, rtol=0
    )
