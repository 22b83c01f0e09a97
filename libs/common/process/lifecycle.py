"""Lifecycle: STARTING -> READY -> DRAINING -> STOPPED, from the first line to the exit code.

Owns:     the process's state, its signals and the budgets of its drain steps.
Promises: the first SIGTERM or SIGINT drains, a second one cancels at once, a third one kills. Before READY there is
          nothing to drain, so the first one stops. No drain step runs longer than its budget, however it behaves.
Used by:  `__main__` of each service (run_service); every long wait also waits on `draining`.
"""

import asyncio
import enum
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

logger = structlog.get_logger(__name__)

# How long a cancelled drain step has for its `finally` blocks before it is left behind.
CANCEL_GRACE_S = 1.0


class State(enum.StrEnum):
    """Where a process is in its life. There is no way back."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    """The state of one process.

    Attributes:
        draining: set from the moment on at which no new work may begin.
        stopped: set when the drain is over; loops that serve during the drain end now.
    """

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.stopped = asyncio.Event()
        self.cut_by: signal.Signals | None = None
        self._ready = False

    @property
    def state(self) -> State:
        """The state now."""
        if self.stopped.is_set():
            return State.STOPPED
        if self.draining.is_set():
            return State.DRAINING
        return State.READY if self._ready else State.STARTING

    def mark_ready(self) -> None:
        """Say that everything is built and serves. Without effect once draining: a signal may come during start."""
        if self.state is State.STARTING:
            self._ready = True
            logger.info("ready")

    def begin_drain(self, reason: str) -> None:
        """Stop taking work; only the first call counts."""
        if not self.draining.is_set():
            logger.info("draining", reason=reason)
            self.draining.set()

    def mark_stopped(self) -> None:
        """Say that the drain is over."""
        self.draining.set()
        self.stopped.set()

    def install_signals(self) -> None:
        """Take over SIGTERM and SIGINT. Call from the task that is the service: it is what a second signal cancels."""
        loop = asyncio.get_running_loop()
        service = asyncio.current_task()
        assert service is not None

        def handle(received: signal.Signals) -> None:
            if self.state is State.READY:
                self.begin_drain(received.name)
                return
            logger.warning("cut_short", signal=received.name, state=self.state)
            self.cut_by = received if self.draining.is_set() else None
            self.mark_stopped()
            for each in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(each)
            service.cancel()

        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, handle, each)

    async def run_budgeted(self, step: str, work: Coroutine[Any, Any, object], budget_s: float) -> bool:
        """Run one drain step; whatever becomes of it, the next step gets its turn.

        Returns:
            Whether the step ended by itself and without an error. An overrun is cancelled and logged, a failure logged.
        """
        began = time.monotonic()
        task = asyncio.create_task(work, name=f"drain:{step}")
        try:
            await asyncio.wait({task}, timeout=budget_s)
        finally:
            overran = not task.done()
            task.cancel()
        if overran:
            logger.warning("drain_step_overran", step=step, budget_s=budget_s)
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            return False
        if task.cancelled():
            return False
        if error := task.exception():
            logger.error("drain_step_failed", step=step, exc_info=error)
            return False
        logger.info("drain_step_done", step=step, took_s=round(time.monotonic() - began, 3))
        return True


def run_service(serve: Callable[[Lifecycle], Coroutine[Any, Any, None]]) -> int:
    """Run a service to its end in a loop of its own, with signals installed.

    Returns:
        The exit code: 0 after a drain, or when told to stop before it was ready; 1 when `serve` failed (logged);
        128 + signal when the drain was cut short.
    """

    async def main() -> int:
        lifecycle = Lifecycle()
        lifecycle.install_signals()
        try:
            await serve(lifecycle)
        except asyncio.CancelledError:
            return 128 + lifecycle.cut_by if lifecycle.cut_by else 0
        except Exception:
            logger.exception("service_failed")
            return 1
        logger.info("stopped")
        return 0

    return asyncio.run(main())
