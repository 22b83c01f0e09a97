"""Topics: what has a stream of events, runs and threads alike, and what Postgres says of it.

Owns:     all that tells the stream of a run from that of a thread: its name in Redis, where it begins, whether it ends.
Used by:  `stream`, `fanout`, `feeds` and `frames`, which know topics only.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from common.ids import RunId, ThreadId
from common.store import keys
from common.store.runs import Run, Runs


class Topic(NamedTuple):
    """Something whose events can be followed. `noun`: also the member that names it in frames."""

    noun: Literal["run", "thread"]
    id: str


def of_run(run: RunId) -> Topic:
    """A run's events."""
    return Topic("run", run)


def of_thread(thread: ThreadId) -> Topic:
    """A thread's events."""
    return Topic("thread", thread)


def stream_of(topic: Topic) -> str:
    """The name of its stream, which no other topic has."""
    return keys.events(RunId(topic.id)) if topic.noun == "run" else keys.thread_events(ThreadId(topic.id))


class Extent(NamedTuple):
    """Where a topic's stream begins and ends.

    Attributes:
        first_seq: number just before its first event; None: nobody has begun it.
        ended: the record of a run that has ended; None: more may come.
    """

    first_seq: int | None
    ended: Run | None = None

    @property
    def last_seq(self) -> int | None:
        """Number of the last event of all; None: there is none yet."""
        return None if self.ended is None else self.ended.last_seq or 0


# A thread's first event is number 1, and it has no last one.
EXTENT_OF_THREAD = Extent(0)


class Topics:
    """The records of topics."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def read_many(self, topics: Iterable[Topic]) -> dict[Topic, Extent]:
        """What is recorded of some topics, in one statement at most; unknown runs are left out.

        That a thread exists its reader has made sure of. Raises: StoreUnavailable.
        """
        found = {topic: EXTENT_OF_THREAD for topic in topics if topic.noun == "thread"}
        runs = [RunId(topic.id) for topic in topics if topic.noun == "run"]
        records = await self._runs.read_many(runs) if runs else {}
        return found | {
            of_run(run): Extent(record.first_seq, record if record.terminal else None)
            for run, record in records.items()
        }
