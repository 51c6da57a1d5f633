"""The name of a GPU's architecture, for records with its features and for tile sizes without them."""

from types import SimpleNamespace

import pytest
import torch

from nsa.kernels.gpu_versions import architecture_of

pytest.importorskip("triton", reason="it is in the dev extra")
from nsa.kernels.triton import tuning


@pytest.mark.parametrize(
    ("hip", "properties", "recorded", "tuned"),
    [
        (None, dict(major=9, minor=0), "sm_90", "sm_90"),
        ("6.4", dict(gcnArchName="gfx942:sramecc+:xnack-"), "gfx942:sramecc+:xnack-", "gfx942"),
    ],
)
def test_features_are_recorded_and_do_not_change_tiles(monkeypatch, hip, properties, recorded, tuned):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert architecture_of(torch.device("cuda", 0)) == architecture_of(0) == recorded
    assert tuning._architecture.__wrapped__(0) == tuned
