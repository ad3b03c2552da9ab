"""Names of a PyTorch net's arrays; PyTorch is imported when a function is called."""

from __future__ import annotations

import re
from typing import Any

from flwr_perdl.core.checks import check_kind
from flwr_perdl.core.extras import load_extra

__all__ = ["norm_layers"]

#: How PyTorch calls the types of normalization layers, and other libraries theirs:
#: ``BatchNorm2d``, ``LayerNorm``, ``FrozenBatchNorm2d``, ``LlamaRMSNorm``.
_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)


def norm_layers(net: Any) -> list[str]:
    """Return the names of all arrays of a net's normalization layers, buffers too.

    For FedBN: ``PersonalizedFedAvg(norm_layers(net))``. A layer is found by its type, or one that
    it inherits from, and not by its own name, which in torchvision's nets may be ``downsample.1``.

    Parameters
    ----------
    net : torch.nn.Module
        The net.

    Returns
    -------
    list of str
        Names of ``net.state_dict()``, in its order.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        If ``net`` is none of its modules.
    ValueError
        If it has no normalization layer with arrays.

    Examples
    --------
    >>> from torch import nn
    >>> from flwr_perdl.pytorch import norm_layers
    >>> norm_layers(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    ['1.weight', '1.bias']
    """
    nn = load_extra("torch.nn", "norm_layers")
    check_kind("net", net, nn.Module, "a torch.nn.Module")
    layers = {
        name
        for name, module in net.named_modules(remove_duplicate=False)
        if any(_NORM.search(kind.__name__) for kind in type(module).__mro__)
    }
    names = [name for name in net.state_dict() if name.rpartition(".")[0] in layers]
    if not names:
        raise ValueError(f"net must have a normalization layer, got none in {type(net).__name__}.")
    return names
