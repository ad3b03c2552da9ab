"""Privacy: differential privacy, secure aggregation, sealed messages, encrypted state."""

from typing import TYPE_CHECKING

from flwr_perdl.core.lazy import lazily

if TYPE_CHECKING:
    from flwr_perdl.privacy.basis import PublicBasis
    from flwr_perdl.privacy.noise import Noise
    from flwr_perdl.privacy.sealed import make_key
    from flwr_perdl.privacy.secure_server import SecureMean
    from flwr_perdl.privacy.withholding import may_send

__all__ = ["Noise", "PublicBasis", "SecureMean", "make_key", "may_send"]

__getattr__, __dir__ = lazily(__name__, __file__)
