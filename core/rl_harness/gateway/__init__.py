"""The address agents point at: protocols, sessions, the turn tree."""

from rl_harness.gateway.limits import Limits
from rl_harness.gateway.policies import ChatPolicy, TokenPolicy
from rl_harness.gateway.sampling import DISTRIBUTION
from rl_harness.gateway.server import Gateway
from rl_harness.gateway.sessions import Policy, Session

__all__ = ["DISTRIBUTION", "ChatPolicy", "Gateway", "Limits", "Policy", "Session", "TokenPolicy"]
