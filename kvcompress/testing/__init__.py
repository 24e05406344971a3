"""For tests of policies, yours included; nothing here is needed at run time."""

from kvcompress.testing.contracts import PolicyContractError, check_policy, contracts
from kvcompress.testing.models import FAMILIES, tiny_model
from kvcompress.testing.oracle import Evictions, oracle, record
from kvcompress.testing.selection import kept_positions, scores

__all__ = [
    "FAMILIES",
    "Evictions",
    "PolicyContractError",
    "check_policy",
    "contracts",
    "kept_positions",
    "oracle",
    "record",
    "scores",
    "tiny_model",
]
