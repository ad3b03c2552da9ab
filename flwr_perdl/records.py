"""What messages carry, for clients of one's own: the keys' names, and arrays from a record.

==================  ==============================================================================
name                where it stands
==================  ==============================================================================
``PARTITION_ID``    key of a node's config
``ROUND``, ``RUN``  keys of a request's config: the round, and the token of the strategy's run
``SEED``, ``STEP``  keys of a request's config: the seed, and which step is asked for
``NUM_EXAMPLES``,   keys of a reply's metrics: weight, and whether the private state was made anew
``ANEW``
``EVALUATE``        the step of a report that is an evaluation
``Scalar``          type of a value in a config or in metrics
``to_arrays``       the arrays of a record, in order
==================  ==============================================================================
"""

from flwr_perdl._records import (
    ANEW,
    EVALUATE,
    NUM_EXAMPLES,
    PARTITION_ID,
    ROUND,
    RUN,
    SEED,
    STEP,
    Scalar,
    to_arrays,
)

__all__ = [
    "ANEW",
    "EVALUATE",
    "NUM_EXAMPLES",
    "PARTITION_ID",
    "ROUND",
    "RUN",
    "SEED",
    "STEP",
    "Scalar",
    "to_arrays",
]
