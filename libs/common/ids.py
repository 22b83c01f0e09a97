"""Identifiers: their types, and how new ones are minted."""

import secrets
import socket
from typing import NewType

import uuid_utils

UserId = NewType("UserId", str)
JobId = NewType("JobId", str)
MachineId = NewType("MachineId", str)
SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
RunId = NewType("RunId", str)
RelayId = NewType("RelayId", str)
AgentId = NewType("AgentId", str)
ThreadId = NewType("ThreadId", str)
EntryId = NewType("EntryId", str)
TurnId = NewType("TurnId", str)


def new_id() -> str:
    """A UUIDv7: unique, and sorting by the time it was minted."""
    return str(uuid_utils.uuid7())


def is_uuid(text: str) -> bool:
    """Whether `text` is an id in the one form that `new_id` writes."""
    try:
        return str(uuid_utils.UUID(text)) == text
    except ValueError:
        return False


def process_name() -> str:
    """A name for this process that no other can share, not even the next process of the same host or pod."""
    return f"{socket.gethostname()[:48]}-{secrets.token_hex(6)}"
