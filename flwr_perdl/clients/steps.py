"""A client of a protocol: one method per step, which the decorator `step` registers.

A request names the step that it asks for, and reaches a registered method or nothing. The base
class reads the request, hands the method what the client kept after an earlier round, and keeps
what it returns: only after the method has succeeded, so that a step that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients.base import Member, PrivateArrays, PrivateState, private_shelf, step_of
from flwr_perdl.core.checks import Matrix, check_choice, check_count, check_kind
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.records import EVALUATE, LARGEST_INT, ROUND, RUN, SEED, Scalar

TRAIN = "train"


class StepRequest(NamedTuple):
    """What a request says, as a step receives it; nothing in it depends on the client's data.

    Attributes
    ----------
    step : str
        The step's name.
    arrays : list of ndarray
        The request's arrays; not to be changed.
    config : mapping of str to scalar
        The request's config.
    round, seed : int
        The communication round, from 1, and the run's one seed.
    run : str
        The run's token.
    kept : dict of str to ndarray, or None
        What the client kept in an earlier round of this run; None if there is nothing.

    Examples
    --------
    >>> from flwr_perdl.clients import StepRequest
    >>> StepRequest("mean", [], {}, round=1, seed=0, run="", kept=None).step
    'mean'
    """

    step: str
    arrays: list[Matrix]
    config: Mapping[str, Scalar]
    round: int
    seed: int
    run: str
    kept: PrivateArrays | None


class StepResult(NamedTuple):
    """What a step comes to.

    Attributes
    ----------
    arrays : list of ndarray
        What leaves the client; nothing in an evaluation.
    num_examples : int
        For how many samples the reply counts.
    metrics : mapping of str to float
        What leaves the client besides; an evaluation's loss is ``"loss"``.
    keep : mapping of str to ndarray, or None
        What the client keeps for the next step; None leaves what it has. An evaluation keeps
        nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import StepResult
    >>> StepResult([np.zeros(2)], 10).metrics
    {}
    """

    arrays: list[Matrix]
    num_examples: int
    metrics: Mapping[str, Scalar] = {}
    keep: Mapping[str, NDArray[Any]] | None = None


Step = TypeVar("Step", bound=Callable[[Any, StepRequest], StepResult])


def step(name: str, *, kind: str = TRAIN) -> Callable[[Step], Step]:
    """Register a method as a step of its client's protocol.

    Parameters
    ----------
    name : str
        What requests call it.
    kind : {"train", "evaluate"}, default "train"
        The messages that it answers.

    Returns
    -------
    callable
        The decorator.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import ProtocolClient, StepResult, step
    >>> class MeanClient(ProtocolClient):
    ...     @step("mean")
    ...     def mean(self, request):
    ...         return StepResult([np.ones(2)], 1)
    >>> MeanClient.steps
    {('train', 'mean'): 'mean'}
    """
    check_kind("name", name, str, "a text")
    check_choice("kind", kind, (TRAIN, EVALUATE))

    def register(method: Step) -> Step:
        vars(method)["_step"] = kind, name
        return method

    return register


class ProtocolClient(Member):
    """A NumPyClient with a method per step, which knows who it is and may keep private arrays.

    Parameters
    ----------
    context : Context
        What Flower hands to the client's factory; says who the client is and keeps its state.
    algorithm : str, optional
        What the private arrays are of, so that no other algorithm takes them up; by default the
        class's name.
    state_dir : str or Path, optional
        Folder for the private arrays; by default as `private_shelf` finds it; nothing is kept on
        disk where there is none.

    Attributes
    ----------
    steps : dict
        ``(kind, step's name) -> method's name``, of this class and its bases.

    Raises
    ------
    ValueError
        If the context does not say who the client is.

    Examples
    --------
    A client that remembers how often it was asked:

    >>> import numpy as np
    >>> from flwr_perdl.clients import ProtocolClient, StepResult, step
    >>> class CountingClient(ProtocolClient):
    ...     @step("count")
    ...     def count(self, request):
    ...         before = 0 if request.kept is None else int(request.kept["n"])
    ...         return StepResult([np.array([before])], 1, keep={"n": np.array(before + 1)})
    """

    steps: ClassVar[Mapping[tuple[str, str], str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the steps of the class and of its bases."""
        super().__init_subclass__(**options)
        own = {m._step: name for name, m in vars(cls).items() if hasattr(m, "_step")}
        cls.steps = {**cls.steps, **own}

    def __init__(
        self,
        context: Context,
        *,
        algorithm: str | None = None,
        state_dir: str | Path | None = None,
    ) -> None:
        super().__init__(context)
        check_kind("state_dir", state_dir, (str, Path, type(None)), "a path or None")
        check_kind("algorithm", algorithm, (str, type(None)), "a name or None")
        self.context = context
        self._shelf = private_shelf(context, algorithm or type(self).__name__, state_dir)

    @one_blas_thread()
    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Take the training step that ``config`` asks for, and keep what it returns for later.

        Parameters
        ----------
        parameters : list of ndarray
            The request's arrays.
        config : dict
            The request's config.

        Returns
        -------
        parameters : list of ndarray
            What leaves the client.
        num_examples : int
            Number of samples.
        metrics : dict
            What the step says besides.
        """
        # Kept last: a step that fails leaves the state as it was, and can be asked for again.
        result, state, round_ = self._take(TRAIN, parameters, config)
        if result.keep is not None:
            state.save(round_, result.keep)
        return list(result.arrays), result.num_examples, dict(result.metrics)

    @one_blas_thread()
    def evaluate(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Take the evaluation step, whose metric ``"loss"`` is the loss, else NaN."""
        result, _, _ = self._take(EVALUATE, parameters, config)
        metrics = dict(result.metrics)
        return float(metrics.pop("loss", nan)), result.num_examples, metrics

    def admit(self, kind: str, request: StepRequest) -> None:
        """Raise a ValueError if the request may not be answered; a subclass's to say."""

    def _take(
        self, kind: str, parameters: list[Matrix], config: Mapping[str, Scalar]
    ) -> tuple[StepResult, PrivateState, int]:
        """Return what the step comes to, and where its state is kept, after which round."""
        name, run = step_of(config), str(config.get(RUN, ""))
        known = [step_ for kind_, step_ in self.steps if kind_ == kind]
        check_choice("step", name, known)
        try:
            round_ = check_count(ROUND, config[ROUND], 0, LARGEST_INT)
            seed = check_count(SEED, config[SEED], 0, LARGEST_INT)
        except KeyError as error:
            raise ValueError(f"config must have {error}, got {sorted(config)}.") from None
        state = PrivateState(self.context, run, self._shelf)
        request = StepRequest(name, list(parameters), config, round_, seed, run, None)
        self.admit(kind, request)
        # A server that crashed asks for a round again: training begins from the state before it, so
        # that the same request has the same reply.
        kept = state.before(round_ + (kind == EVALUATE))
        method = getattr(self, self.steps[kind, name])
        return method(request._replace(kept=kept)), state, round_
