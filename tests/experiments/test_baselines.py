import numpy as np

from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance
from perdl_experiments.baselines import learn, learn_each, plain_average
from perdl_experiments.data import planted_clients


def test_learning_alone_finds_the_planted_atoms():
    planted = planted_clients(np.random.default_rng(0), [6], [300], 6, n_features=6)
    D = learn(planted.samples[0], OrthogonalLearner(6), np.random.default_rng(1), 5)
    assert dictionary_distance(planted.global_atoms, D) < 1e-9


def test_learning_each_is_learning_one_by_one():
    planted = planted_clients(np.random.default_rng(0), [4] * 5, [50] * 5, 0, n_features=4)
    learners = [OrthogonalLearner(r) for r in (4, 3, 2, 4, 3)]
    together = learn_each(
        planted.samples, learners, [np.random.default_rng(i) for i in range(5)], 2
    )
    for i, D in enumerate(together):
        alone = learn(planted.samples[i], learners[i], np.random.default_rng(i), 2)
        np.testing.assert_array_equal(D, alone)


def test_the_plain_average_is_atom_by_atom_and_has_unit_atoms():
    A, B = np.eye(2), np.array([[0.0, 1.0], [0.0, 1.0]])
    half = np.sqrt(0.5)
    np.testing.assert_allclose(plain_average([A, B]), [[half, half], [0, 1]])
