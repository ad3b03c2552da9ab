"""What differs between the supported versions of Flower, in one place: flwr >= 1.26.1, < 2."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl._shortcuts import alike

#: Flower's log. Its name is public, Flower's function of this name is not.
log = logging.getLogger("flwr").log


def _first(*candidates: str) -> Any:
    """Return the first ``module:name`` that exists, or None."""
    for candidate in candidates:
        module, name = candidate.split(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return None


#: From the older interface's reply to the records of a message.
fitres_to_recorddict = _first(
    "flwr.compat.common.recorddict_compat:fitres_to_recorddict",
    "flwr.common.recorddict_compat:fitres_to_recorddict",
)


def empty_run(run_id: int) -> Any:
    """Return a Flower ``Run`` with nothing in it but its id."""
    run = _first("flwr.supercore.run:Run", "flwr.common.typing:Run")
    return run.create_empty(run_id)


def become_server(run_id: int) -> None:
    """Let this process create messages outside a Flower run.

    Since 1.38 a message takes its origin from the process-wide TaskIdentity; inside a real run
    that is set already and is left alone.
    """
    identity = _first("flwr.supercore.task_identity:TaskIdentity")
    if identity is not None and identity._run_id is None:
        identity.run_id, identity.node_id, identity.task_id = run_id, 1, 1


def stamp(message: Message, run_id: int, message_id: str) -> None:
    """Give ``message`` what Flower's link gives it when it is pushed."""
    message.metadata.__dict__.update(_run_id=run_id, _message_id=message_id, _src_node_id=1)


def addressed(request: Message, node: int) -> Message:
    """Return a request like ``request``, whose content it shares, to another node."""
    content, kind = request.content, request.metadata.message_type
    return alike(request, content, _dst_node_id=node) or Message(content, node, kind)


def of_type(request: Message, content: RecordDict, kind: str) -> Message:
    """Return a message of this type with this content, whose reply answers ``request``."""
    node = request.metadata.dst_node_id
    return alike(request, content, _message_type=kind) or Message(content, node, kind)


def has_handler(app: ClientApp, name: str, *, unknown: bool = False) -> bool:
    """Whether a ClientApp has a handler of this name; ``unknown`` where it has no list of them."""
    registered = getattr(app, "_registered_funcs", {})
    return name in registered if registered else unknown


def is_legacy(app: ClientApp) -> bool:
    """Whether a ClientApp was made from a ``client_fn``."""
    return getattr(app, "_call", None) is not None


def answered(reply: Message, content: RecordDict, request: Message) -> Message:
    """Return a reply like ``reply`` with this content, to a request like that of ``reply``."""
    asked = request.metadata
    return alike(
        reply,
        content,
        _src_node_id=asked.dst_node_id,
        _dst_node_id=asked.src_node_id,
        _reply_to_message_id=asked.message_id,
        _group_id=asked.group_id,
    ) or Message(content, reply_to=request)
