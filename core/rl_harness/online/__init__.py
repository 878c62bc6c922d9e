"""Live assistants: sessions with a key each for calling and for rewarding, the episodes their rewards make of what they
did, and the batches that are trained on. Between the gateway and a run's database; knows nothing of backends."""

from rl_harness.online.areal import ArealRoutes
from rl_harness.online.batches import Batches
from rl_harness.online.keys import digest, new_admin_key
from rl_harness.online.recording import RecordingPolicy
from rl_harness.online.routes import PREFIX, Routes
from rl_harness.online.sessions import Host, OnlineSessions

__all__ = [
    "PREFIX",
    "ArealRoutes",
    "Batches",
    "Host",
    "OnlineSessions",
    "RecordingPolicy",
    "Routes",
    "digest",
    "new_admin_key",
]
