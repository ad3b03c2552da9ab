"""FedBN's list of arrays, of PyTorch's own layers and of others'."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flwr_perdl.pytorch import norm_layers  # noqa: E402


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's: buffers alone, and no subclass of PyTorch's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(2))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)


class Own(nn.BatchNorm1d):
    """A subclass under another name."""


class PreNorm(nn.Module):
    """Wraps what is none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.RMSNorm(2)


class NormalizedLinear(nn.Linear):
    """Is none."""


def net() -> Any:
    block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    shared = nn.GroupNorm(1, 2)
    layers = [block, nn.Linear(2, 2), nn.LayerNorm(2), Own(2), FrozenBatchNorm2d(), shared, shared]
    layers += [PreNorm(nn.Linear(2, 2)), NormalizedLinear(2, 2), nn.InstanceNorm2d(2)]
    return nn.Sequential(*layers)


def test_all_arrays_of_normalization_layers_are_listed_and_no_others() -> None:
    batch = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    wanted = [f"{at}.{name}" for at in ("0.1", "2", "3") for name in batch if at != "2"]
    wanted += ["2.weight", "2.bias", "4.weight", "7.norm.weight"]
    wanted += [f"{at}.{name}" for at in (5, 6) for name in ("weight", "bias")]
    found = norm_layers(net())
    assert sorted(found) == sorted(wanted)
    assert [name for name in net().state_dict() if name in found] == found


def test_other_input_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="net"):
        norm_layers({"bn": 3})
    with pytest.raises(ValueError, match="net"):
        norm_layers(nn.Linear(2, 2))
