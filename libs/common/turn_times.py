"""The numbers of a turn that must line up, in one place (PURE).

Promises: they keep the order that turns rely on; `tests/contract/test_turn_times.py` holds them to it. A turn's cap is
          its agent's (`turn_cap_s`, within what `towline.wire.threads` allows); all that ends a turn derives from it,
          so that the one who can say why comes first:

          the agent's time (cap - 5 s) < the cap < Absurd's own limit (cap + 60 s)
Used by:  the store (how a task is spawned, what is found), the worker (claims, heartbeats, caps, retries, retention).
"""

# How long a turn of a killed worker waits before another one may take it: three heartbeats may be lost.
CLAIM_S = 8
HEARTBEAT_S = 2.5
# Who hears of nothing looks this often: all that a lost notification costs.
NET_POLL_S = 2.0

# An agent that is asked over HTTP gets this much less, so that the turn can still say that it was too slow.
AGENT_MARGIN_S = 5.0
# Absurd cancels a task this long after its cap: only where no worker lives that would have ended it.
LIMIT_MARGIN_S = 60

# Counted when a claim begins, so that a turn which kills its workers runs out of attempts.
ATTEMPTS_MAX = 5
# After a failure that may pass (an agent's 5xx, a network): doubled with each attempt, and jittered. A claim that
# lapsed is taken again at once: the worker failed then, not the agent.
RETRY_FIRST_S = 1.0
RETRY_CAP_S = 15.0

# A turn that ended this long ago and was announced by nobody is announced by the net.
ANNOUNCE_AFTER_S = 10.0
# What happened longer ago than this is not announced any more: it can be read, and streams say that there is a gap.
ANNOUNCE_UNTIL_S = 3600.0

# Absurd's tasks, with their checkpoints, after their end: for whoever looks into a turn that failed.
TASK_RETENTION_S = 7 * 24 * 3600
# A thread that nobody used for this long is forgotten, with its entries and turns.
THREAD_RETENTION_S = 180 * 24 * 3600
# Usage outlives its thread: bills are asked about for a year.
USAGE_RETENTION_S = 400 * 24 * 3600


def agent_time_s(cap_s: float) -> float:
    """How long an agent may take in a turn with this cap, in seconds from its start."""
    return cap_s - AGENT_MARGIN_S


def retry_after_s(attempt: int, spread: float) -> float:
    """How long to wait after a failed attempt, in seconds.

    Args:
        attempt: the one that failed, from 1.
        spread: 0..1, drawn by the caller: many who failed together must not come back together.
    """
    bound = min(RETRY_FIRST_S * 2.0 ** (attempt - 1), RETRY_CAP_S)
    return bound * (0.5 + 0.5 * spread)
