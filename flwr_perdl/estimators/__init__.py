"""Fit and transform over a list of sites, as in scikit-learn; Flower runs underneath, in process.

============================  =====================================================================
you have                      take
============================  =====================================================================
tables of several sites with  `PersonalizedDictionaryLearning`: the factors that all sites share,
the same columns              and those that are a site's own (PerMA)
groups of few points, each    `MixedRegression`: the models, and which group follows which
of one of k linear models     (FedMD and FedX)
groups that differ a little   `PersonalizedRidge`: a shared model, and each group's own
                              (one exchange of sums)
nodes that only talk to       `NetworkDictionaryLearning`: one dictionary, without a server
their neighbors               (diffusion over data)
============================  =====================================================================
"""

from flwr_perdl.core.extras import load_extra

if not hasattr(load_extra("sklearn.utils.validation", __name__, "estimators"), "validate_data"):
    raise ImportError(
        f"scikit-learn must be 1.6 or newer for {__name__}: pip install -U scikit-learn."
    )

from flwr_perdl.estimators.dictionary import PersonalizedDictionaryLearning
from flwr_perdl.estimators.history import to_frame
from flwr_perdl.estimators.network import NetworkDictionaryLearning
from flwr_perdl.estimators.regression import MixedRegression
from flwr_perdl.estimators.ridge import PersonalizedRidge

__all__ = [
    "MixedRegression",
    "NetworkDictionaryLearning",
    "PersonalizedDictionaryLearning",
    "PersonalizedRidge",
    "to_frame",
]
