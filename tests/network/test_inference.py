from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

from flwr_perdl.network import CombinationMatrix, InMemoryNetwork, Topology, metropolis_weights
from flwr_perdl.network.combine import LONG
from flwr_perdl.network.inference import ATC, ConsensusADMM, exact_dual, infer
from flwr_perdl.network.objectives import HuberNMF, Objective, SparseSVD
from tests.network.objectives import INFERENCE, each_of, four

OBJECTIVES = four(0.2, 0.5, beta=0.1)
#: Biclustering infers as SparseSVD does.
LOSSES = [OBJECTIVES[0], *OBJECTIVES[2:]]
each, every = each_of(LOSSES), each_of(OBJECTIVES)
every_method = pytest.mark.parametrize("method", INFERENCE)


def problem(
    objective: Objective,
    n_agents: int = 8,
    n_atoms: int = 1,
    n_features: int = 12,
    n_samples: int = 3,
    seed: int = 0,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw samples with some large entries (Huber's bounds are met), and unit atoms."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((n_agents, n_atoms, n_features))
    X = rng.standard_normal((n_samples, n_features))
    X += 5 * (rng.random(X.shape) < 0.2) * rng.random(X.shape)
    if objective.nonnegative:
        W, X = np.abs(W), np.abs(X)
    return X, list(W / np.linalg.norm(W, axis=2, keepdims=True))


def by_cvxpy(
    objective: Objective, x: np.ndarray, W: np.ndarray, low: float = -99.0, high: float = 99.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, in these bounds, and duals from a general convex solver, by (21) as it is."""
    y, z = cp.Variable(len(W)), cp.Variable(W.shape[1])
    if np.isfinite(objective.bound):
        eta = objective.strong_convexity
        loss = cp.sum(cp.huber(x - z, eta)) / (2 * eta)
    else:
        loss = cp.sum_squares(x - z) / 2
    penalty = objective.gamma * cp.norm1(y) + objective.delta / 2 * cp.sum_squares(y)
    low = 0.0 if objective.nonnegative else low
    limits = [z == W.T @ y, y >= low, y <= high]
    tight = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
    cp.Problem(cp.Minimize(loss + penalty), limits).solve(solver=cp.CLARABEL, **tight)
    u = x - z.value
    nu = np.clip(u / objective.strong_convexity, -objective.bound, objective.bound)  # (55)
    return y.value, nu


def decibels(found: np.ndarray, truth: np.ndarray) -> float:
    """Return the paper's signal-to-noise ratio of Section IV-A, of the worst sample and agent."""
    noise = ((found - truth) ** 2).sum(axis=-1)
    with np.errstate(divide="ignore"):
        return float((10 * np.log10((truth**2).sum(axis=-1) / noise)).min())


@every
@pytest.mark.parametrize("n_atoms", [1, 3])
def test_what_has_no_bias_agrees_with_cvxpy(objective: Objective, n_atoms: int) -> None:
    X, D = problem(objective, n_atoms=n_atoms, n_samples=2)
    exact, graph = exact_dual(objective, X, D), Topology.erdos_renyi(8, 0.4, seed=n_atoms)
    limits: dict[str, Any] = {"n_rounds": 4000, "tolerance": 1e-8}
    methods = ("admm", "exact_diffusion")
    inferred = [infer(objective, X, D, graph, method=method, **limits) for method in methods]
    assert [found.converged for found in inferred] == [True, True]
    for i, x in enumerate(X):
        codes, nu = by_cvxpy(objective, x, np.concatenate(D))
        for found in (exact, *inferred):
            assert decibels(np.concatenate([C[i] for C in found.codes]), codes) >= 100
            assert decibels(found.nu[..., i, :], nu) >= 100
    assert (np.abs(exact.gap) <= 1e-12 * exact.cost).all()
    if isinstance(objective, HuberNMF):
        assert (np.abs(exact.nu) == 1).any()


@pytest.mark.parametrize("n_atoms", [5, 16])
@each_of(OBJECTIVES[:3])
def test_a_tolerance_bounds_the_error_of_the_exact_dual(objective: Objective, n_atoms: int) -> None:
    rng = np.random.default_rng(0)
    X, W = rng.standard_normal((20, 9)), rng.standard_normal((16, 9))
    W = objective.project_dictionary(W / np.linalg.norm(W, axis=1, keepdims=True))[:n_atoms]
    exact = exact_dual(objective, X, [W])
    for tolerance in (0.05, 1e-7):
        found = exact_dual(objective, X, [W], tolerance=tolerance)
        error = np.linalg.norm(found.nu - exact.nu, axis=1) / np.linalg.norm(X, axis=1)
        assert (error <= tolerance).all()
        np.testing.assert_allclose(found.codes[0], exact.codes[0], atol=100 * tolerance)
    assert np.abs(found.nu - exact.nu).max() > 0  # it stops before the exact solution


@pytest.mark.parametrize("eta", [0.2, 0.001])
def test_the_exact_dual_of_float32_is_that_of_float64_rounded(eta: float) -> None:
    objective = HuberNMF(0.1, 0.1, eta)
    X, D = problem(objective, n_agents=30, n_features=30, n_samples=20)
    X, D = X.astype(np.float32), [W.astype(np.float32) for W in D]
    ours = exact_dual(objective, X, D)
    wide = exact_dual(objective, X.astype(float), [W.astype(float) for W in D])
    for mine, theirs in zip((*ours.codes, *ours[1:]), (*wide.codes, *wide[1:]), strict=True):
        np.testing.assert_array_equal(mine, theirs.astype(np.float32))


def program(kind: type[Any], objective: Objective, **options: Any) -> Any:
    shape = {"n_atoms": options.pop("atoms", 1), "n_features": options.pop("features", 12)}
    X, D = problem(objective, n_agents=6, **shape)
    topology = Topology.erdos_renyi(6, 0.5, seed=3)
    return kind(objective, topology, D, X, **options)


def estimates(found: Any, n_rounds: int, **network: Any) -> np.ndarray:
    run = InMemoryNetwork(found.topology, **network).run(found, n_rounds)
    nu: np.ndarray = run.observed["nu"]
    return nu


def by_hand(
    o: Objective, x: Any, D: Any, A: Any, mu: float, n_rounds: int, informed: Any = None
) -> Any:
    """Return every agent's estimate after rounds of ATC (31), (37), agent by agent."""
    N = len(D)
    informed = range(N) if informed is None else informed
    nu = [np.zeros(len(x)) for _ in range(N)]
    for _ in range(n_rounds):
        psi = []
        for k, W in enumerate(D):
            gradient = o.conjugate_gradient(nu[k]) / N + o.code(W @ nu[k]) @ W  # (62)
            psi.append(nu[k] - mu * (gradient - (k in informed) * x / len(informed)))
        nu = [o.project(sum(A[k, j] * psi[j] for j in range(N))) for k in range(N)]
    return np.array(nu)


@each
def test_atc_is_the_papers_recursion(objective: Objective) -> None:
    atc = program(ATC, objective, step=0.1, informed=[1, 4], atoms=2)
    A = metropolis_weights(atc.topology).matrix.toarray()
    for i, x in enumerate(atc.X):
        nu = by_hand(objective, x, atc.dictionaries, A, 0.1, 15, [1, 4])
        np.testing.assert_allclose(estimates(atc, 15)[:, i], nu, atol=1e-12)


@pytest.mark.parametrize("n_features", [12, LONG + 3])
@pytest.mark.parametrize("on_a_network", [False, True])
def test_atc_takes_any_doubly_stochastic_weights(n_features: int, on_a_network: bool) -> None:
    objective, n = SparseSVD(0.2, 0.5), 16
    X, D = problem(objective, n_agents=n, n_features=n_features)
    A = 0.5 * np.eye(n) + 0.3 * np.roll(np.eye(n), 1, axis=1) + 0.2 * np.roll(np.eye(n), 3, axis=1)
    topology = Topology((A + A.T > 0) - np.eye(n))
    weights = CombinationMatrix(A, topology)
    network = InMemoryNetwork(topology, weights) if on_a_network else weights
    found = infer(objective, X, D, network, method="atc", step=0.1, n_rounds=40, tolerance=0)
    for i, x in enumerate(X):
        np.testing.assert_allclose(
            found.nu[:, i], by_hand(objective, x, D, A, 0.1, 40), rtol=0, atol=1e-12
        )
    with pytest.raises(ValueError, match=r"^network"):
        infer(objective, X, D, network, method="exact_diffusion")


@dataclass(frozen=True)
class Boxed(SparseSVD):
    """An elastic net whose codes are bounded, (5)-(6)."""

    low: float
    high: float

    def code(self, S: np.ndarray) -> np.ndarray:
        return np.clip(super().code(S), self.low, self.high)

    def regulariser(self, Y: np.ndarray) -> np.ndarray:
        inside = ((self.low <= Y) & (self.high >= Y)).all(axis=-1)
        return np.where(inside, super().regulariser(Y), np.inf)

    def regulariser_conjugate(self, S: np.ndarray) -> np.ndarray:
        Y = self.code(S)
        return (S * Y).sum(axis=-1) - super().regulariser(Y)


@pytest.mark.parametrize(("seed", "n_features"), [(0, 12), (1, LONG + 3)])
def test_codes_may_be_bounded_with_the_diffusions(seed: int, n_features: int) -> None:
    low, high = np.random.default_rng(seed).uniform([-0.6, 0.05], [0.0, 0.6])
    objective = Boxed(0.1, 0.5, low, high)
    X, D = problem(objective, n_agents=16, n_features=n_features, n_samples=2, seed=seed)
    topology = Topology.small_world(16, 4, 0.3, seed=seed)
    found = infer(objective, X, D, topology, method="exact_diffusion", tolerance=1e-9)
    assert found.converged
    for i, x in enumerate(X):
        wanted, _ = by_cvxpy(objective, x, np.concatenate(D), low, high)
        codes = np.concatenate([C[i] for C in found.codes])
        np.testing.assert_allclose(codes, wanted, rtol=0, atol=1e-6)
        assert ((codes == low) | (codes == high)).any()
    A = metropolis_weights(topology).matrix.toarray()
    atc = infer(objective, X, D, topology, method="atc", step=0.1, n_rounds=40, tolerance=0)
    np.testing.assert_allclose(
        atc.nu[:, 0], by_hand(objective, X[0], D, A, 0.1, 40), rtol=0, atol=1e-12
    )
    with pytest.raises(ValueError, match=r"^objective"):
        infer(objective, X, D, topology)
    with pytest.raises(ValueError, match=r"^objective"):
        exact_dual(objective, X, D)


@pytest.mark.parametrize(("r", "n"), [(0.5, 12), (0.8, LONG + 3)])
def test_consensus_admm_is_the_recursion_of_multipliers_and_beliefs(r: float, n: int) -> None:
    objective = SparseSVD(0.2, 0.5)
    admm = program(ConsensusADMM, objective, features=n, relaxation=r, penalty=0.3)
    A, N, x = admm.topology.adjacency.toarray(), 6, admm.X[0]
    degrees = A.sum(axis=1)
    c = A / np.sqrt(np.outer(degrees, degrees))
    c *= 0.3 / c.sum(axis=1).mean()
    D = np.diag(c.sum(axis=1))
    p, q, nu = np.zeros((3, N, n))
    for _ in range(6):
        for k, (w,) in enumerate(admm.dictionaries):
            b, a = x / N + p[k] / 2 - q[k], 1 / N + D[k, k]
            s = w @ b / a  # of norm 1, a single atom has a code of its own
            nu[k] = (b - (s - np.clip(s, -0.2, 0.2)) / (0.5 + 1 / a) * w) / a
        q += r * (D - c) @ nu
        p = (1 - 2 * r) * p + 2 * r * (D + c) @ nu
    np.testing.assert_allclose(estimates(admm, 6)[:, 0], nu, atol=1e-12)


@every_method
def test_whoever_is_informed_the_answer_is_the_same(method: str) -> None:
    objective = HuberNMF(0.2, 0.5, 0.3)
    X, D = problem(objective)
    topology = Topology.small_world(8, 4, 0.3, seed=1)
    tight: dict[str, Any] = {"n_rounds": 3000, "tolerance": 1e-10, "method": method}
    answers = [
        infer(objective, X, D, topology, informed=informed, **tight).nu
        for informed in (None, [5], [2, 3])
    ]
    bias = 0.6 if method == "atc" else 1e-7  # it ends where its bias says
    for one in answers[1:]:
        np.testing.assert_allclose(one, answers[0], atol=bias)


def test_an_agent_that_is_not_informed_never_looks_at_the_sample() -> None:
    objective = SparseSVD(0.2, 0.5)
    X, D = problem(objective)
    admm = ConsensusADMM(objective, Topology.ring(8), D, X, informed=[2])
    other = ConsensusADMM(objective, Topology.ring(8), D, -X, informed=[2])
    blind = np.array([0, 1, 3, 4, 5, 6, 7])
    for mine, theirs in zip(admm.start(blind), other.start(blind), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@each_of(LOSSES[:2])
@every_method
def test_the_span_of_sample_and_atoms_holds_it_all(objective: Objective, method: str) -> None:
    X, D = problem(objective, n_atoms=2, n_features=60)
    topology = Topology.erdos_renyi(8, 0.4, seed=0)
    plain, short, chosen = (
        infer(objective, X, D, topology, method=method, n_rounds=80, tolerance=0, compress=how)
        for how in (False, True, None)
    )
    np.testing.assert_allclose(short.nu, plain.nu, atol=1e-10)
    np.testing.assert_allclose(np.hstack(short.codes), np.hstack(plain.codes), atol=1e-10)
    np.testing.assert_array_equal(chosen.nu, short.nu)


def test_samples_travel_together_as_they_do_alone() -> None:
    objective = HuberNMF(0.2, 0.5, 0.3)
    X, D = problem(objective, n_samples=7)
    options: dict[str, Any] = {"n_rounds": 4, "tolerance": 0}
    alone = [infer(objective, x[None], D, Topology.ring(8), **options).nu for x in X]
    many = infer(objective, np.tile(X, (600, 1)), D, Topology.ring(8), **options)  # several blocks
    wanted = np.tile(np.concatenate(alone, axis=1), (1, 600, 1))
    np.testing.assert_allclose(many.nu, wanted, atol=1e-12)
    assert many.codes[0].shape == (4200, 1)


@pytest.mark.parametrize(
    ("n_features", "n_atoms", "dtype"), [(12, 2, np.float64), (LONG + 3, 1, np.float32)]
)
@each
@every_method
def test_a_network_gives_the_same_bits(
    objective: Objective, method: str, n_features: int, n_atoms: int, dtype: type
) -> None:
    X, D = problem(objective, n_atoms=n_atoms, n_features=n_features)
    X, D = X.astype(dtype), [W.astype(dtype) for W in D]
    topology = Topology.erdos_renyi(8, 0.4, seed=2)
    options: dict[str, Any] = {"method": method, "n_rounds": 23, "tolerance": 0}
    memory = infer(objective, X, D, topology, compress=False, **options)
    network = infer(objective, X, D, InMemoryNetwork(topology), **options)
    np.testing.assert_array_equal(network.nu, memory.nu)
    np.testing.assert_array_equal(network.residual, memory.residual)
    assert network.rounds == memory.rounds == 23
    assert {a.dtype for a in (memory.nu, memory.residual, *memory.codes)} == {np.dtype(dtype)}


PATH = Topology.grid(1, 20)


@each
@pytest.mark.parametrize(
    ("topology", "method"),
    [
        *((graph, "admm") for graph in (Topology.ring(12), Topology.star(12), PATH)),
        (Topology.erdos_renyi(12, 0.3, seed=1), "admm"),
        (PATH, "exact_diffusion"),
    ],
)
def test_the_residual_bounds_the_error(
    topology: Topology, method: str, objective: Objective
) -> None:
    """What an agent knows by itself says how far it is from the answer."""
    X, D = problem(objective, n_agents=topology.n_nodes, n_features=5)
    exact = exact_dual(objective, X, D).nu
    for tolerance in (1e-2, 1e-4):
        limits: dict[str, Any] = {"tolerance": tolerance, "n_rounds": 50_000}
        found = infer(objective, X, D, topology, method=method, **limits)
        assert found.converged
        errors = np.linalg.norm(found.nu - exact, axis=2) / np.linalg.norm(found.nu, axis=2)
        assert (errors <= 2 * found.residual.max()).all()


def test_atc_says_that_it_has_not_converged() -> None:
    objective = SparseSVD(0.2, 0.5)
    X, D = problem(objective)
    found = infer(objective, X, D, Topology.ring(8), method="atc", n_rounds=5000)
    assert not found.converged
    assert found.rounds == 5000


@every_method
def test_a_network_may_lack_links_and_only_diffusions_may_use_others(method: str) -> None:
    objective = SparseSVD(0.2, 0.5)
    X, D = problem(objective)
    ring, complete = Topology.ring(8), Topology.complete(8)
    exact = exact_dual(objective, X, D).nu
    far = {}
    for graph, links in ((complete, ring), (ring, complete)):
        network = InMemoryNetwork(graph, metropolis_weights(links))
        if links is complete and method == "admm":
            with pytest.raises(ValueError, match=r"^network"):
                infer(objective, X, D, network, method=method)
            continue
        n_rounds = 1000 if method == "admm" else 2000
        nu = infer(objective, X, D, network, method=method, n_rounds=n_rounds).nu
        far[links] = np.abs(nu - exact).max()
    assert max(far.values()) < (1.0 if method == "atc" else 1e-6)
    with pytest.raises(ValueError, match=r"^dictionaries"):
        infer(objective, X, D, InMemoryNetwork(Topology.complete(9)), method=method)


def test_what_is_wrong_is_said_in_a_sentence() -> None:
    objective = SparseSVD(0.2, 0.5)
    X, D = problem(objective, n_agents=4)
    ring, apart = Topology.ring(4), Topology.from_edges(4, [(0, 1), (2, 3)])
    one_way = Topology.from_edges(4, [(0, 1), (1, 2), (2, 3), (3, 0)], directed=True)

    def refuse(name: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=rf"^{name} "):
            infer(objective, *(args or (X, D, ring)), **options)

    for graph in (apart, one_way):
        refuse("network", X, D, graph)
    refuse("dictionaries", X, D[:3], ring)
    refuse("dictionaries", X, [W[:, :5] for W in D], ring)
    refuse("dictionaries", X, [np.float32(W) for W in D], ring)
    refuse("informed", informed=[4])
    refuse("relaxation", relaxation=1.0)
    refuse("penalty", penalty=0.0)
    refuse("step", method="atc", step=0.0)
    refuse("compress", X, D, InMemoryNetwork(ring), compress=True)
    lopsided = np.full((4, 4), 0.25)
    lopsided[0], everyone = [0.7, 0.1, 0.1, 0.1], Topology.complete(4)
    refuse("network", X, D, CombinationMatrix(lopsided, everyone))


@pytest.mark.parametrize(("dtype", "large", "small"), [("f4", 1e20, 1e-29), ("f8", 1e160, 1e-200)])
@pytest.mark.parametrize(
    ("method", "n_features"), [("admm", 12), ("admm", LONG + 3), ("exact_diffusion", 12)]
)
def test_samples_of_any_size_get_the_right_answer_or_a_sentence(
    method: str, n_features: int, dtype: str, large: float, small: float
) -> None:
    objective, ring = SparseSVD(0.0, 0.1), Topology.ring(4)
    X, D = problem(objective, n_agents=4, n_features=n_features)
    D = [W.astype(dtype) for W in D]
    with pytest.raises(ValueError, match=r"^X"):
        infer(objective, (large * X).astype(dtype), D, ring, method=method)
    found = infer(objective, (small * X).astype(dtype), D, ring, method=method)
    assert found.converged
    # without an l1 norm the problem is linear in the sample
    truth = exact_dual(objective, X, [W.astype("f8") for W in D]).nu
    assert decibels(found.nu.astype("f8") / small, truth) > 40
    both = np.vstack([X[:1], small * X[1:2]]).astype(dtype)  # a faint sample beside a bright one
    found = infer(objective, both, D, ring, method=method)
    assert decibels(found.nu[:, 1].astype("f8") / small, truth[1]) > 40


@pytest.mark.parametrize(
    ("topology", "gap"),
    [
        (Topology.ring(601), 1 - np.cos(2 * np.pi / 601)),
        (Topology.ring(2000), 1 - np.cos(2 * np.pi / 2000)),
        (Topology.grid(1, 2000), 1 - np.cos(np.pi / 1999)),
        (Topology.complete(601), 601 / 600),
        (Topology.star(700), 1),
    ],
)
def test_the_gap_of_many_nodes_is_exact(topology: Topology, gap: float) -> None:
    X, atoms = np.zeros((1, 4)), {0: np.zeros((1, 4))}
    admm = ConsensusADMM(SparseSVD(0.1, 0.5), topology, atoms, X)
    np.testing.assert_allclose(admm.gap, gap, rtol=1e-6)


@pytest.mark.parametrize(
    ("topology", "objective", "scale"),
    [
        (Topology.complete(6), SparseSVD(0.05, 0.1), 1.0),
        (Topology.complete(6), HuberNMF(0.05, 0.1, 0.5), 0.05),  # no bound is met
        (Topology.complete(6), HuberNMF(0.05, 0.1, 0.5), 10.0),  # most bounds are met
        (Topology.from_edges(1, []), HuberNMF(0.05, 0.1, 0.5), 10.0),
    ],
)
def test_atc_without_bias_converges_and_says_so(
    topology: Topology, objective: Objective, scale: float
) -> None:
    rng = np.random.default_rng(0)
    W = np.abs(rng.standard_normal((topology.n_nodes, 1, 10)))
    W /= np.linalg.norm(W, axis=2, keepdims=True)
    X = scale * np.abs(rng.standard_normal((3, 10)))
    found = infer(objective, X, list(W), topology, method="atc")
    assert found.converged
    assert found.nu is not None
    assert decibels(found.nu, exact_dual(objective, X, list(W)).nu) > 40
