"""Names and values of a PyTorch model's arrays; PyTorch is imported when a function is called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_flag, check_kind
from flwr_perdl.core.extras import load_extra
from flwr_perdl.core.models import DTYPES
from flwr_perdl.core.npy import view_file

__all__ = ["features", "load", "norm_layers", "trainable"]

#: Types such as ``BatchNorm2d`` and ``LayerNorm``, other libraries' ``LlamaRMSNorm`` too.
_NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)


def features(net: Any, loader: Iterable[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what a frozen body makes of all samples, and their labels: data of a `RidgeClient`.

    ``RidgeClient(*features(net.body, loader), context)`` learns heads in one exchange
    (`flwr_perdl.strategies.FederatedRidge`). Neither gradients nor dropout are computed.

    Parameters
    ----------
    net : torch.nn.Module
        The body; its training mode is as before afterwards.
    loader : iterable of batches
        Each a pair of inputs and labels, or a mapping of two such values, as of a ``DataLoader``.

    Returns
    -------
    Z : ndarray of shape (n_samples, n_features)
        Outputs, flattened; float64 if the body's are, else float32.
    y : ndarray of shape (n_samples, ...)
        Labels.

    Raises
    ------
    ImportError, TypeError, ValueError
        If PyTorch is not installed, ``net`` is not a module, there is no batch, or one is no pair.

    Examples
    --------
    >>> import torch
    >>> from flwr_perdl.pytorch import features
    >>> batches = [(torch.ones(2, 3, 4), torch.tensor([0, 1]))]
    >>> Z, y = features(torch.nn.Flatten(), batches)
    >>> Z.shape, y.tolist()
    ((2, 12), [0, 1])
    """
    torch = _torch("features", net)
    device = next((one.device for one in [*net.parameters(), *net.buffers()]), None)
    was_training, found = net.training, list[tuple[NDArray[Any], NDArray[Any]]]()
    net.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                pair = [*batch.values()] if isinstance(batch, Mapping) else [*batch]
                if len(pair) != 2:
                    raise ValueError(
                        f"loader must have pairs of inputs and labels, got {len(pair)}."
                    )
                outputs = net(pair[0].to(device)).flatten(1).cpu()
                outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
                found.append((outputs.numpy(), pair[1].cpu().numpy()))
    finally:
        net.train(was_training)
    if not found:
        raise ValueError("loader must have at least one batch, got none.")
    Z, y = zip(*found, strict=True)
    return np.concatenate(Z), np.concatenate(y)


def norm_layers(net: Any) -> list[str]:
    """Return the names of all arrays of a model's normalization layers, buffers included.

    For FedBN: ``PersonalizedFedAvg(norm_layers(net))``. Layers are found by type, base classes
    included, and not by name, which in torchvision's models may be ``downsample.1``.

    Parameters
    ----------
    net : torch.nn.Module
        The model.

    Returns
    -------
    list of str
        Names of ``net.state_dict()``, in its order.

    Raises
    ------
    ImportError, TypeError, ValueError
        If PyTorch is not installed, or ``net`` is not a module, or has no such layer.

    Examples
    --------
    >>> from torch import nn
    >>> from flwr_perdl.pytorch import norm_layers
    >>> norm_layers(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    ['1.weight', '1.bias']
    """
    _torch("norm_layers", net)
    layers = {
        name
        for name, module in net.named_modules(remove_duplicate=False)
        if any(_NORM.search(kind.__name__) for kind in type(module).__mro__)
    }
    names = [name for name in net.state_dict() if name.rpartition(".")[0] in layers]
    if not names:
        raise ValueError(f"net must have a normalization layer, got none in {type(net).__name__}.")
    return names


def trainable(net: Any) -> list[str]:
    """Return the names of a model's parameters that require a gradient, such as LoRA's.

    ``ArrayRecord({name: net.state_dict()[name] for name in trainable(net)})`` has only these.

    Parameters
    ----------
    net : torch.nn.Module
        The model.

    Returns
    -------
    list of str
        Names of ``net.state_dict()``, in its order; all names of a tied parameter.

    Raises
    ------
    ImportError, TypeError, ValueError
        As `norm_layers`; or if no parameter requires a gradient.

    Examples
    --------
    >>> from torch import nn
    >>> from flwr_perdl.pytorch import trainable
    >>> trainable(nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2)))
    ['1.weight', '1.bias']
    """
    _torch("trainable", net)
    found = {n for n, p in net.named_parameters(remove_duplicate=False) if p.requires_grad}
    if not found:
        raise ValueError(f"net must have parameters to train, got none in {type(net).__name__}.")
    return [name for name in net.state_dict() if name in found]


def load(net: Any, arrays: Any, *, strict: bool = True) -> Any:
    """Copy the arrays of a message into a model, and return the model.

    Parameters
    ----------
    net : torch.nn.Module
        The model; its arrays keep their dtypes and devices.
    arrays : ArrayRecord, mapping of str to array, or sequence of arrays
        ``msg.content["arrays"]``, or a NumPyClient's ``parameters``, in the model's order.
    strict : bool, default True
        Whether these must be all of the model's arrays. If not, the others keep their values, and
        a sequence may have only the `trainable` ones.

    Returns
    -------
    torch.nn.Module
        ``net``.

    Raises
    ------
    ImportError, TypeError, ValueError
        If PyTorch is not installed, or an array does not match the model, which is then unchanged.

    Examples
    --------
    >>> from torch import nn
    >>> from flwr_perdl.pytorch import load
    >>> load(nn.Linear(2, 1), {"bias": [3.0]}, strict=False).bias.item()
    3.0
    """
    torch = _torch("load", net)
    check_kind("arrays", arrays, (Mapping, Sequence), "arrays by name, or a sequence of arrays")
    strict, own = check_flag("strict", strict), net.state_dict()
    if isinstance(arrays, Sequence):
        names = list(own) if strict or len(arrays) == len(own) else trainable(net)
        if len(arrays) != len(names):
            raise ValueError(f"arrays must be {len(names)}, as in the net, got {len(arrays)}.")
        arrays = dict(zip(names, arrays, strict=True))
    if wrong := arrays.keys() ^ own.keys() if strict else arrays.keys() - own.keys():
        name = min(wrong, key=str)
        raise ValueError(f"arrays must have the net's names, got {'no ' * (name in own)}{name!r}.")
    # Checked where they lie, all of them, and then copied one at a time.
    views = {
        name: view_file(array.data)[0] if isinstance(array, Array) else np.asarray(array)
        for name, array in arrays.items()
    }
    for name, view in views.items():
        shape, got = tuple(own[name].shape), f"{view.dtype} of shape {view.shape}"
        if view.dtype not in DTYPES or view.shape != shape:
            raise ValueError(f"arrays must have numbers of shape {shape} as {name!r}, got {got}.")
    for name, view in views.items():
        own[name].copy_(torch.tensor(view))
    return net


def _torch(purpose: str, net: Any) -> Any:
    torch = load_extra("torch", purpose, "pytorch")
    check_kind("net", net, torch.nn.Module, "a torch.nn.Module")
    return torch
