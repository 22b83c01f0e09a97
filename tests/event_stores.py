"""What tests of the event path's stores share: relays of a run, what they append, and a look at the stream."""

from collections.abc import Mapping

import redis.asyncio

from common.ids import RelayId, RunId, new_id
from common.store import keys
from common.store.eventlog import Appends, EventLog, Gap, LogEvent, NewEvent, Position, Writer
from common.store.leases import Held, Leases, Point, Refused, Taken, Verdict
from common.store.redis import Redis

TS = 1_790_000_000_000


def new_run() -> RunId:
    return RunId(f"run-{new_id()}")


def event(number: int, source: str = "coder", *, kind: str = "output", uid: str | None = None) -> NewEvent:
    """An upstream's event; its data is `source number`, its id `source:number`."""
    return NewEvent(source, f"{source}:{number}" if uid is None else uid, kind, f"{source} {number}", TS + number)


def events(first: int, last: int, source: str = "coder") -> list[NewEvent]:
    return [event(number, source) for number in range(first, last + 1)]


class Relay:
    """One relay that follows one run."""

    def __init__(self, store: Redis, run: RunId, name: str = "relay-a") -> None:
        self.run = run
        self.name = RelayId(name)
        self.leases = Leases(store, self.name)
        self._appends = Appends(store)
        self.taken: Taken | None = None

    async def try_take(self, epoch: int, saved: Mapping[str, Point] | None = None) -> Taken | Refused:
        return await self.leases.take(self.run, epoch, {"coder": Point()} if saved is None else saved)

    async def take(self, epoch: int, saved: Mapping[str, Point] | None = None) -> Writer:
        taken = await self.try_take(epoch, saved)
        assert isinstance(taken, Taken), taken
        self.taken = taken
        return Writer(self._appends, self.run, taken)

    async def refresh(self, writer: Writer, *, alive: bool = True, status: bytes = b"status") -> Verdict:
        (verdict,) = await self.leases.refresh([Held(self.run, writer.tail.epoch, writer.tail, alive, status)])
        return verdict

    async def release(self, writer: Writer) -> None:
        await self.leases.release([(self.run, writer.tail.epoch)])


class RunKeys:
    """What Redis has of a run."""

    def __init__(self, client: redis.asyncio.Redis, run: RunId) -> None:
        self.client = client
        self.run = run

    async def entries(self) -> list[tuple[str, dict[str, str]]]:
        found: list[tuple[str, dict[str, str]]] = await self.client.xrange(keys.events(self.run))
        return found

    async def data(self) -> list[str]:
        """Data of the events, in order; markers as `|`."""
        return [fields.get("data", "|") for _, fields in await self.entries()]

    async def has(self, data: str) -> bool:
        return data in await self.data()

    async def points(self) -> dict[str, str]:
        fields: dict[str, str] = await self.client.hgetall(keys.events_resume(self.run))
        return {name: value for name, value in fields.items() if not name.startswith(".")}

    async def owner(self) -> str | None:
        owner: str | None = await self.client.get(keys.owner(self.run))
        return owner

    async def lease_ms(self) -> int:
        left: int = await self.client.pttl(keys.owner(self.run))
        return left

    async def lapse(self) -> None:
        """The lease's time is over."""
        await self.client.delete(keys.owner(self.run))

    async def flush(self) -> None:
        """All that Redis had of the run is gone."""
        await self.client.delete(
            *(
                key(self.run)
                for key in (
                    keys.owner,
                    keys.events,
                    keys.events_resume,
                    keys.liveness,
                    keys.source_status,
                    keys.progress,
                )
            )
        )

    async def photograph(self) -> "Photograph":
        """What a replica has that hears nothing from now on."""
        names = [keys.events(self.run), keys.events_resume(self.run)]
        return Photograph(self, {name: await self.client.dump(name) for name in names})


class Photograph:
    """A run as an older replica knows it."""

    def __init__(self, of: RunKeys, dumps: dict[str, bytes]) -> None:
        self._of = of
        self._dumps = dumps

    async def take_over(self) -> None:
        """The replica is the primary now; leases have lapsed meanwhile."""
        await self._of.flush()
        for name, dump in self._dumps.items():
            await self._of.client.restore(name, 0, dump, replace=True)


class Reader:
    """A client that reads from one gateway or another, and checks nothing."""

    def __init__(self, store: Redis, run: RunId, position: Position) -> None:
        self._log = EventLog(store, keys.events)
        self._run = run
        self.position = position
        self.items: list[LogEvent | Gap] = []

    async def read(self, *, count: int = 100) -> list[str]:
        """Read to the tail; returns the new data, gaps as `gap`."""
        new: list[LogEvent | Gap] = []
        more = True
        while more:
            page = await self._log.read_after(self._run, self.position, count=count)
            new += page.items
            self.position, more = page.position, page.more
        self.items += new
        return ["gap" if isinstance(item, Gap) else item.data.decode() for item in new]
