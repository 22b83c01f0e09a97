"""The threads of a drill, and what is expected of their turns.

Promises: as the stage does. What is expected of a turn is counted where it happened: entries, usage and tasks in
          Postgres, calls at the model, and every word that each watcher was told.
Used by:  the scenarios of the turn path, as `scene.threads`.
"""

import contextlib

import msgspec

from harness.drills.conversations import STARTS_WITHIN_S, Asked, Conversations, Thread
from harness.drills.dialogue import read_story
from harness.drills.target import DrillFailed
from harness.model import repeated
from towline.wire import events, threads


class Threads(Conversations):
    """See the module."""

    # ---- the end

    async def expect(
        self,
        asked: Asked,
        state: threads.TurnState,
        *,
        within_s: float,
        attempts: int | None = 1,
        usage: int = 1,
        repeats: int = 0,
        code: str = "",
    ) -> threads.Turn:
        """Wait until a turn has ended, and hold everything that can be counted of it against what is expected.

        Args:
            attempts: None where the cut leaves that open.
            usage: rows.
            repeats: of model calls that had been answered in full; none, unless nobody could take the answer.
            code: of the error.
        """
        check, key = self.stage.check, asked.key
        turn = await self.ended(asked, within_s=within_s)
        check(f"{key}: state", state, turn.state)
        if attempts is not None:
            check(f"{key}: attempts", attempts, turn.attempts)
        error = None if isinstance(turn.outcome, msgspec.UnsetType) else turn.outcome.error
        if code:
            check(f"{key}: error", code, getattr(error, "code", "none"))
        if state == "failed":
            reason = getattr(error, "message", "")
            check(f"{key}: reason", "a sentence", reason, is_met=" " in reason)
        # Every gateway tells the same end, to whoever reads it and to whoever comes with the same key.
        told = {_end_of(turn)}
        for gateway in range(len(self.target.gateways)):
            read = await self.turn(asked, first=gateway)
            again = (await self.post(asked.thread, asked.text, key, first=gateway)).turn
            check(f"{key}: the same key at gateway {gateway + 1}", (asked.turn, True), (again.turn, again.replayed))
            told |= {_end_of(read), _end_of(again)}
        check(f"{key}: terminals", 1, len(told))
        check(f"{key}: usage rows", usage, await self.evidence.usage_rows(asked.turn))
        requests = await self.target.model.about(asked.key + ".")
        check(f"{key}: finished model calls repeated", repeats, repeated(requests))
        return turn

    async def expect_told(self, *opened: Thread, gaps: bool | None = False) -> None:
        """Every watcher was told the same, coherently, and it is what the threads' entries say.

        Args:
            gaps: something was lost, and each watcher is to be told that; None: the cut leaves that open. Of who was
                told of a gap only answers and ends are compared.
        """
        for thread in opened or self.opened:
            name = f"thread {self.opened.index(thread) + 1}"
            await self._expect_order(thread, name)
            await self._expect_told(thread, name, gaps=gaps)

    async def _expect_order(self, thread: Thread, name: str) -> None:
        """Entries in one order, each answered in it, and nothing left to be run."""
        check, check_same = self.stage.check, self.stage.check_same
        entries = await self.entries(thread)
        check_same(f"{name}: positions", list(range(1, len(entries) + 1)), [entry.position for entry in entries])
        posted = [entry.entry for entry in entries if entry.role == "user"]
        check_same(f"{name}: entries posted", [asked.entry for asked in thread.asked], posted)
        turns = {asked.turn: await self.turn(asked) for asked in thread.asked}
        answered = [turn for turn, record in turns.items() if record.state == "completed"]
        check_same(f"{name}: answers", answered, [entry.turn for entry in entries if entry.role == "agent"])
        left = await self.evidence.open_tasks([asked.turn for asked in thread.asked])
        check(f"{name}: tasks left", 0, left)

    async def _expect_told(self, thread: Thread, name: str, *, gaps: bool | None) -> None:
        check, check_same = self.stage.check, self.stage.check_same
        turns = {asked.turn: await self.turn(asked) for asked in thread.asked}
        ends = {turn: f"signal.dispatch.{record.state}" for turn, record in turns.items()}

        async def are_told() -> bool:
            return all(
                set(ends) <= {heard.turn for heard in watcher.seen if heard.type in events.TURN_ENDS}
                for watcher in thread.watchers
            )

        with contextlib.suppress(DrillFailed):
            await self.stage.eventually("all watchers are told the end of all turns", are_told)
        entries = await self.entries(thread)
        answers = {entry.turn: entry.text for entry in entries if entry.role == "agent"}
        stories = [read_story(watcher.seen) for watcher in thread.watchers]
        for number, (watcher, story) in enumerate(zip(thread.watchers, stories, strict=True), 1):
            who = f"{name}, watcher {number}"
            check(f"{who}: faults", [], story.faults)
            check_same(f"{who}: answers told", answers, story.answers)
            check_same(f"{who}: ends told", ends, {turn: told.end for turn, told in story.turns.items()})
            refusals = sorted(set(watcher.refused) - {"503"})
            check(f"{who}: answers that were no stream, but 503", [], refusals)
            if gaps is not None:
                check(f"{who}: told of a gap", gaps, story.gaps > 0)
            if story.gaps or stories[0].gaps:
                continue
            check_same(f"{who}: entries told", {entry.entry for entry in entries}, set(story.messages))
            check_same(f"{who}: seen by all alike", stories[0].ids, story.ids)

    async def expect_health(self) -> None:
        """If there was a thread at all: one more is opened, watched at every gateway, and answered."""
        if not self.opened:
            return
        thread = await self.open("fast")
        for gateway in range(len(self.target.gateways)):
            self.watch(thread, first=gateway)
        await self.expect(await self.say(thread, "Are you well?"), "completed", within_s=STARTS_WITHIN_S)
        await self.expect_told(thread)


def _end_of(turn: threads.Turn) -> tuple[str, str, str]:
    outcome = "" if isinstance(turn.outcome, msgspec.UnsetType) else msgspec.json.encode(turn.outcome).decode()
    return turn.state, str(turn.ended_at), outcome
