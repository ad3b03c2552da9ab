"""The maths on arrays of other libraries: NumPy's results, where the arrays are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flwr_perdl._arrays import namespace
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    MODLearner,
    OrthogonalLearner,
    atom_distances,
    coding,
    dictionary_distance,
    hard_threshold,
    lasso,
    match_atoms,
    normalize_atoms,
    omp,
    polar_factor,
    reconstruct,
    soft_threshold,
    sparse_code,
    top_k,
)
from flwr_perdl.dictionary.atoms import _symmetric_inverse, least_squares_atoms, signs_of
from flwr_perdl.dictionary.learners import atom_support
from flwr_perdl.dictionary.polar import polar_factors
from flwr_perdl.dictionary.stacks import update_stack

# Clients, samples, features, atoms (more than eigenvalues serve best, atoms._SMALL), global ones.
N, M, D, R, G = 5, 60, 16, 12, 4


class Library:
    """How a test makes arrays of a library, and reads them."""

    def __init__(self, name: str, device: str | None = None) -> None:
        self.xp = np if name == "numpy" else pytest.importorskip(name)
        if name != "numpy":
            pytest.importorskip("array_api_compat")
        self.on: dict[str, Any] = {"device": self.xp.Device(device)} if device else {}
        self.type = type(self.array(np.zeros(1)))

    def array(self, value: np.ndarray) -> Any:
        """Return a copy of a NumPy array that shares no memory with it."""
        return self.xp.asarray(value.copy(), **self.on)

    def numpy(self, array: Any) -> np.ndarray:
        """Return the array as NumPy's, from whatever device it is on."""
        if self.on:
            array = array.to_device(self.xp.Device("CPU_DEVICE"))
        return np.asarray(array)

    def owns(self, array: Any) -> bool:
        """Whether the array is of this library, and where all others are."""
        return type(array) is self.type and (not self.on or array.device == self.on["device"])


LIBRARIES = {
    "numpy": ("numpy", None),
    "strict": ("array_api_strict", None),
    "strict, another device": ("array_api_strict", "device1"),
    "torch": ("torch", None),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return Library(*LIBRARIES[request.param])


def orthonormal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Stacks of dictionaries with orthonormal rows."""
    return np.linalg.qr(rng.standard_normal((*shape[:-2], *shape[:-3:-1])))[0].swapaxes(-1, -2)


def samples() -> dict[str, np.ndarray]:
    """Arguments by name; ``stack_`` for those of many clients."""
    rng = np.random.default_rng(0)
    stack_D = orthonormal(rng, N, R, D)
    codes = rng.standard_normal((N, M, R)) * (rng.random((N, M, R)) < 0.3)
    stack_X = codes @ stack_D + 0.05 * rng.standard_normal((N, M, D))
    overcomplete = rng.standard_normal((20, D))
    return {
        "A": rng.standard_normal((M, 20)),
        "X": stack_X[0],
        "Q": stack_D[0],
        "D": overcomplete / np.linalg.norm(overcomplete, axis=1, keepdims=True),
        "C": codes[0],
        "stack_X": stack_X,
        "stack_D": stack_D,
        "G": stack_D[0, :G] + 0.01 * orthonormal(rng, G, D),
    }


def used_once(C: np.ndarray) -> np.ndarray:
    """Codes of which one atom is unused and one is used by a single sample."""
    C = C.copy()
    C[:, 0] = 0
    C[1:, 1] = 0
    C[0, 1] = 1
    return C


def rank(S: np.ndarray, n: int) -> np.ndarray:
    """Return ``S`` with rows that are nearly combinations of the first ``n``."""
    S = S.copy()
    S[n:] = S[0] + 1e-9 * S[n:]
    return S


def row_of_zeros(S: np.ndarray) -> np.ndarray:
    S = S.copy()
    S[..., 2, :] = 0
    return S


def permuted(D: np.ndarray) -> np.ndarray:
    """The atoms in another order, half of them with other signs, slightly moved."""
    moved = D[..., ::-1, :] + 1e-3 * np.cos(np.arange(D.size)).reshape(D.shape)
    moved[..., ::2, :] *= -1
    return moved / np.linalg.norm(moved, axis=-1, keepdims=True)


# What is called, and with which arrays.
Case = tuple[Callable[..., Any], Callable[[dict[str, np.ndarray]], tuple[np.ndarray, ...]]]
ORTHOGONAL = OrthogonalLearner(R)
CASES: dict[str, Case] = {
    "hard_threshold": (lambda A: hard_threshold(A, 0.5), lambda s: (s["A"],)),
    "soft_threshold": (lambda A: soft_threshold(A, 0.5), lambda s: (s["A"],)),
    "top_k": (lambda A: top_k(A, 3), lambda s: (s["A"],)),
    "top_k, none": (lambda A: top_k(A, 0), lambda s: (s["A"],)),
    "top_k, all": (lambda A: top_k(A, 20), lambda s: (s["A"],)),
    "signs_of": (signs_of, lambda s: (s["A"],)),
    "omp": (lambda X, D: omp(X, D, 5), lambda s: (s["X"], s["D"])),
    "omp, exact early": (lambda X, D: omp(X, D, 9), lambda s: (s["C"] @ s["Q"], s["Q"])),
    "lasso": (lambda X, D: lasso(X, D, 0.2), lambda s: (s["X"], s["D"])),
    "lasso, nonnegative": (
        lambda X, D: lasso(X, D, 0.2, nonnegative=True),
        lambda s: (s["X"], s["D"]),
    ),
    "reconstruct": (reconstruct, lambda s: (s["C"], s["Q"])),
    "sparse_code, omp": (lambda X, D: sparse_code(X, D, n_nonzero=2), lambda s: (s["X"], s["D"])),
    "sparse_code, threshold": (
        lambda X, D: sparse_code(X, D, threshold=0.3),
        lambda s: (s["X"], s["D"]),
    ),
    "sparse_code, lasso": (lambda X, D: sparse_code(X, D, alpha=0.5), lambda s: (s["X"], s["D"])),
    "normalize_atoms": (normalize_atoms, lambda s: (s["A"],)),
    "normalize_atoms, fallback": (normalize_atoms, lambda s: (row_of_zeros(s["D"]), s["D"])),
    "polar_factor": (polar_factor, lambda s: (s["C"].T @ s["X"], s["Q"])),
    "polar_factor, small": (
        polar_factor,
        lambda s: ((s["C"].T @ s["X"])[:4, :6], np.eye(4, 6)),
    ),
    "polar_factor, zero": (polar_factor, lambda s: (0 * s["Q"], s["Q"])),
    "polar_factor, a row of zeros": (polar_factor, lambda s: (row_of_zeros(s["Q"]), s["Q"])),
    "polar_factor, bad": (polar_factor, lambda s: (rank(s["C"].T @ s["X"], 11), s["Q"])),
    "polar_factors": (
        polar_factors,
        lambda s: (s["stack_D"] + 0.2 * s["stack_D"][::-1, ::-1], s["stack_D"]),
    ),
    "polar_factors, some bad": (
        polar_factors,
        lambda s: (
            np.stack([*s["stack_D"][:2], row_of_zeros(s["Q"]), rank(s["Q"], 11), 0 * s["Q"]]),
            s["stack_D"],
        ),
    ),
    "least_squares_atoms": (
        least_squares_atoms,
        lambda s: (
            used_once(s["C"]).T @ used_once(s["C"]),
            used_once(s["C"]).T @ s["X"],
            s["Q"],
        ),
    ),
    "atom_distances": (atom_distances, lambda s: (s["Q"], permuted(s["Q"]))),
    "match_atoms": (match_atoms, lambda s: (s["Q"], permuted(s["Q"]))),
    "match_atoms, two want one": (
        match_atoms,
        lambda s: (np.stack([s["D"][0], s["D"][0], *s["D"][2:]]), s["D"]),
    ),
    "dictionary_distance": (dictionary_distance, lambda s: (s["Q"], permuted(s["Q"]))),
    "dictionary_distance, 2": (
        lambda A, B: dictionary_distance(A, B, "2"),
        lambda s: (s["Q"], permuted(s["Q"])),
    ),
    "atom_support": (atom_support, lambda s: (used_once(s["C"]),)),
    "atom_support, out of range": (atom_support, lambda s: (1e-160 * s["C"],)),
    "atom_support, out of float32's range": (atom_support, lambda s: (1e-25 * s["C"],)),
    **{
        f"{type(learner).__name__}.{name}, {learner.n_nonzero}": (call, arrays)
        for learner, of in (
            (ORTHOGONAL, "Q"),
            (OrthogonalLearner(R, n_nonzero=3), "Q"),
            (GradientLearner(20), "D"),
            (GradientLearner(20, n_nonzero=3), "D"),
            (MODLearner(20), "D"),
            (MODLearner(20, threshold=1.0), "D"),
        )
        for name, call, arrays in (
            ("code", learner.code, lambda s, of=of: (s["X"], s[of])),
            ("step", learner.step, lambda s, of=of: (s["X"], s[of])),
            (
                "update",
                learner.update,
                lambda s, of=of: (
                    s["X"],
                    used_once(hard_threshold(s["X"] @ s[of].T, 0.5)),
                    s[of],
                ),
            ),
            ("loss", learner.loss, lambda s, of=of: (s["X"], s["X"] @ s[of].T, s[of])),
        )
    },
    "KSVDLearner.code": (KSVDLearner(20).code, lambda s: (s["X"], s["D"])),
    **{
        f"update_stack, {words}": (
            lambda X, D, G, options=options: update_stack(X, D, G, ORTHOGONAL, **options),
            arrays,
        )
        for words, options, arrays in (
            ("statistics", {}, lambda s: (s["stack_X"], s["stack_D"], s["G"])),
            (
                "much support",
                {"min_support": 10},
                lambda s: (s["stack_X"], s["stack_D"], s["G"]),
            ),
            (
                "atoms",
                {"statistics": False, "n_steps": 2},
                lambda s: (s["stack_X"], permuted(s["stack_D"]), s["G"]),
            ),
            (
                "represented exactly",
                {},
                lambda s: (s["C"] @ s["stack_D"], s["stack_D"], s["G"]),
            ),
            ("one client", {}, lambda s: (s["stack_X"][:1], s["stack_D"][:1], s["G"])),
        )
    },
}


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether two arrays differ by rounding: 1e-12 of the largest number, in float64."""
    if wanted.dtype.kind == "i":
        return np.array_equal(found, wanted)
    scale = max(np.abs(wanted).max(initial=0), np.finfo(wanted.dtype).tiny)
    return bool(np.abs(found - wanted).max(initial=0) <= 4500 * np.finfo(wanted.dtype).eps * scale)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_numpy(name: str, dtype: type, library: Library) -> None:
    function, arguments = CASES[name]
    given = [array.astype(dtype) for array in arguments(samples())]
    wanted = function(*given)
    arrays = [library.array(array) for array in given]
    found = function(*arrays)
    for array, before in zip(arrays, given, strict=True):
        assert np.array_equal(library.numpy(array), before), "an input was modified"
    assert type(found) is (type(wanted) if isinstance(wanted, tuple | float) else library.type)
    if not isinstance(wanted, tuple):
        wanted, found = (wanted,), (found,)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, np.ndarray):
            assert library.owns(one)
            one = library.numpy(one)
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert close(one, other)
        else:
            rounding = float(4500 * np.finfo(dtype).eps)
            assert one == pytest.approx(other, rel=rounding, abs=rounding)


#: Numbers that may leave the device, by case: of all others, none.
LEAVE = {
    **dict.fromkeys(("lasso", "lasso, nonnegative", "sparse_code, lasso"), M * D + 20 * D),
    # which matrices are badly conditioned, and these with their fallbacks
    **{name: 1 + 2 * R * D for name in CASES if name.startswith("polar_factor, ")},
    **{name: 1 + 2 * R * D for name in CASES if name.startswith("OrthogonalLearner.update")},
    "polar_factor, small": 0,
    "polar_factors, some bad": N + 6 * R * D,
    "match_atoms, two want one": 1 + 20 * 20,  # that they do, and an assignment's costs
    "dictionary_distance": R * R,
    "dictionary_distance, 2": R * R,
    "atom_support, out of range": 1,
    # energies, where errors cancel, whose atoms want one, and an assignment's costs
    **{name: N * (3 + G * R) for name in CASES if name.startswith("update_stack")},
    "update_stack, atoms": N * (2 + 2 * (1 + G * R)),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_else_leaves_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = Library("array_api_strict", "device1")
    function, arguments = CASES[name]
    arrays = [strict.array(array) for array in arguments(samples())]
    left, move = [], strict.type.to_device

    def counted(array: Any, *args: Any, **kwargs: Any) -> Any:
        left.append(math.prod(array.shape))
        return move(array, *args, **kwargs)

    monkeypatch.setattr(strict.type, "to_device", counted)
    function(*arrays)
    assert sum(left) <= LEAVE.get(name, 0)


TWO = {name: case for name, case in CASES.items() if len(case[1](samples())) > 1}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("strict", "numpy", r"array_api_strict on \S+Device\('CPU_DEVICE'\) and numpy"),
        ("numpy", "torch", "numpy and torch on cpu"),
        ("strict", "strict, another device", r"'CPU_DEVICE'\) and array_api_strict on .*'device1'"),
        ("torch", "strict", "torch on cpu and array_api_strict on "),
    ],
)
@pytest.mark.parametrize("name", TWO)
def test_libraries_and_devices_do_not_mix(name: str, first: str, second: str, words: str) -> None:
    function, arguments = TWO[name]
    one, *others = arguments(samples())
    own, other = Library(*LIBRARIES[first]), Library(*LIBRARIES[second])
    arrays = [own.array(one), *map(other.array, others)]
    with pytest.raises(ValueError, match=r"must be of one library and on one device, got .* and"):
        function(*arrays)
    with pytest.raises(ValueError, match=words):
        namespace(*arrays)


def test_bad_arrays_are_told_as_numpys_are(library: Library) -> None:
    good = library.array(np.eye(3))
    for bad, words in (
        (np.zeros((2, 3), np.int64), "X must be float64 or float32, got "),
        (np.zeros(3), r"X must have 2 dimensions, got shape \(3,\)"),
        (np.array([[1, np.nan, np.inf]]), r"X must be finite, got 2 NaN or infinite value"),
    ):
        with pytest.raises(ValueError, match=words):
            omp(library.array(bad), good, 1)
    with pytest.raises(ValueError, match=r"D must have 2 columns, got shape \(3, 3\)"):
        omp(library.array(np.zeros((4, 2))), good, 1)
    with pytest.raises(ValueError, match="D must have no zero row, got one at 1"):
        normalize_atoms(library.array(np.diag([1.0, 0, 1])))


def test_large_finite_numbers_are_finite(library: Library) -> None:
    huge = 1e200 * np.eye(2)
    with np.errstate(over="ignore"):  # array_api_strict is made of NumPy
        found = reconstruct(library.array(huge), library.array(np.eye(2)))
    assert np.array_equal(library.numpy(found), huge)


def test_samples_are_pursued_in_pieces(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    given = samples()
    whole = omp(given["X"], given["D"], 4)
    monkeypatch.setattr(coding, "_WORKSPACE", 1000)
    pieces = omp(library.array(given["X"]), library.array(given["D"]), 4)
    assert close(library.numpy(pieces), whole)


def test_nothing_is_coded_where_nothing_is_given(library: Library) -> None:
    none, D = library.array(np.zeros((0, 3))), library.array(np.eye(3))
    for codes in (omp(none, D, 2), lasso(none, D, 0.1).codes, sparse_code(none, D, threshold=1)):
        assert library.numpy(codes).shape == (0, 3)


def test_k_svd_updates_numpys_arrays_only(library: Library) -> None:
    given = samples()
    X, D = library.array(given["X"]), library.array(given["D"])
    learner = KSVDLearner(20)
    if library.xp is np:
        assert learner.step(X, D).shape == D.shape
        return
    with pytest.raises(ValueError, match="X must be a NumPy array for K-SVD, got one of "):
        learner.step(X, D)


@pytest.mark.parametrize("name", ["strict", "torch"])
def test_starts_are_numpys(name: str) -> None:
    X = samples()["X"]
    made = ORTHOGONAL.start(Library(*LIBRARIES[name]).array(X), np.random.default_rng(0))
    assert isinstance(made, np.ndarray)
    assert np.array_equal(made, ORTHOGONAL.start(X, np.random.default_rng(0)))


def test_other_libraries_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = Library("array_api_strict")
    X, D = samples()["X"], samples()["D"]
    monkeypatch.setitem(sys.modules, "array_api_compat", None)
    assert omp(X, D, 2).shape == (M, 20)
    with pytest.raises(
        ImportError, match=r"need the extra 'arrays' \(pip install .*, got array_api_"
    ):
        omp(strict.array(X), strict.array(D), 2)
    with pytest.raises(ImportError, match="need the extra 'arrays'"):
        omp(X, strict.array(D), 2)


def test_the_inverse_of_least_squares_is_numpys_pseudo_inverse(rng: np.random.Generator) -> None:
    C = rng.standard_normal((30, 40)) * (rng.random((30, 40)) < 0.3)
    gram = C.T @ C  # 10 eigenvalues are zero
    wanted = np.linalg.pinv(gram, rcond=1e-10, hermitian=True)
    assert close(_symmetric_inverse(gram), wanted)


def test_what_is_no_array_counts_as_numpys() -> None:
    assert namespace([[1.0]], np.float64(1), np.eye(2)) is np
    assert np.array_equal(omp([[2.0, 1.0]], np.eye(2), 1), [[2, 0]])
