"""PyTorch's out-of-memory messages, read against a run."""

from costmodel.oom.diagnosis import Cause, Diagnosis, Match, diagnose
from costmodel.oom.message import LARGE_BLOCK, Figure, Message, block_bytes, read_message, read_size

__all__ = ["LARGE_BLOCK", "Cause", "Diagnosis", "Figure", "Match", "Message", "block_bytes", "diagnose", "read_message", "read_size"]
