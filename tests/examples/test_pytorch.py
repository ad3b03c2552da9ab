"""Names and values of a net's arrays: of PyTorch's own layers and of others'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from flwr_perdl.clients import RidgeClient, client_app  # noqa: E402
from flwr_perdl.pytorch import features, load, norm_layers, trainable  # noqa: E402
from flwr_perdl.regression import RidgeModel  # noqa: E402
from flwr_perdl.simulations import InProcessGrid  # noqa: E402
from flwr_perdl.strategies import FederatedRidge  # noqa: E402


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


class Adapted(nn.Module):
    """A frozen layer with a buffer, an adapter that has two names, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        self.lora, self.head = nn.Linear(2, 2, bias=False), nn.Linear(2, 3)
        self.tied = nn.Sequential(self.lora)


TRAINED = ["lora.weight", "head.weight", "head.bias", "tied.0.weight"]


def test_trainable_lists_all_names_of_what_has_a_gradient() -> None:
    assert trainable(Adapted()) == TRAINED


def test_load_takes_what_messages_carry() -> None:
    torch.manual_seed(0)
    net, state = Adapted(), Adapted().state_dict()
    before = {name: one.clone() for name, one in net.state_dict().items()}
    some = {name: state[name] for name in TRAINED}
    for part in (ArrayRecord(some), some, [one.numpy() for one in some.values()]):
        net.load_state_dict(before)
        assert load(net, part, strict=False) is net
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, {**before, **some}[name], rtol=0, atol=0)
    for whole in (ArrayRecord(state), [one.double().numpy() for one in state.values()]):
        for strict in (True, False):
            net.load_state_dict(before)
            for name, value in load(net, whole, strict=strict).state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in net.head.parameters())


def with_bias(value: Any) -> dict[str, Any]:
    return {"head.weight": np.ones((3, 2)), "head.bias": value}


@pytest.mark.parametrize(
    ("arrays", "strict"),
    [
        ({"head.bias": np.ones(3)}, True),  # the others are missing
        ({"head.weight": np.ones((3, 2)), "module.head.bias": np.ones(3)}, False),
        (with_bias(np.ones(1)), False),  # would be broadcast
        (with_bias(np.array(["a", "b", "c"])), False),
        (with_bias(Array("float32", (3,), "numpy.ndarray", b"")), False),
        ([np.ones(3)], True),
        ([np.ones(3)], False),
        (with_bias(np.ones(3)), "no"),
    ],
)
def test_load_changes_nothing_where_an_array_does_not_fit(arrays: Any, strict: Any) -> None:
    net = Adapted()
    before = {name: one.clone() for name, one in net.state_dict().items()}
    with pytest.raises(ValueError, match="strict" if strict == "no" else "array"):
        load(net, arrays, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_other_input_is_refused_by_name() -> None:
    for function in (norm_layers, trainable, lambda net: load(net, {})):
        with pytest.raises(TypeError, match="net"):
            function({"bn": 3})
    for function in (norm_layers, trainable):
        with pytest.raises(ValueError, match="net"):
            function(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TypeError, match="arrays"):
        load(nn.Linear(2, 2), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_features_are_those_of_the_body_in_evaluation(dtype: Any) -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(dtype)
    X, y = torch.randn(5, 3, dtype=dtype), torch.arange(5)
    batches = [(X[:3], y[:3]), {"img": X[3:], "label": y[3:]}]
    before = {name: value.clone() for name, value in body.state_dict().items()}
    Z, labels = features(body, batches)
    assert body.training
    assert all(torch.equal(value, before[name]) for name, value in body.state_dict().items())
    assert Z.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    with torch.no_grad():
        wanted = body.eval()(X).double().numpy()
    np.testing.assert_allclose(Z, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    np.testing.assert_array_equal(labels, y)
    features(body, batches)
    assert not body.training


def test_heads_are_learned_in_one_exchange_from_features() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(6, 32), nn.ReLU())
    X = torch.randn(4, 60, 2, 3)
    y = (body(X.flatten(0, 1)) @ torch.randn(32, 3)).argmax(dim=1).reshape(4, 60)

    def make_client(context: Any) -> RidgeClient:
        i = int(context.node_config["partition-id"])
        return RidgeClient(*features(body, [(X[i], y[i])]), context)

    strategy = FederatedRidge("shared", classes=3, features=0)
    strategy.start(InProcessGrid(client_app(make_client), 4))
    model = RidgeModel.of(strategy.result.model_of(0))
    accuracies = [
        np.mean(model.predict(features(body, [(X[i], y[i])])[0]) == y[i].numpy()) for i in range(4)
    ]
    assert min(accuracies) > 0.8


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ((object(), []), TypeError, "net"),
        ((nn.Flatten(), []), ValueError, "loader"),
        ((nn.Flatten(), [(torch.ones(1, 2),)]), ValueError, "loader"),
    ],
)
def test_features_of_what_is_no_body_or_no_batch_are_refused(
    given: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=f"^{named}"):
        features(*given)
