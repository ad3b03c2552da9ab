"""What protects a client's samples, beside the algorithms: they do not change for it."""

from flwr_perdl.privacy.withholding import may_send

__all__ = ["may_send"]
