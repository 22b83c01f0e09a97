"""Tool calls of turns: jobs on the user's machine, once each, whose outcomes the model is told in plain words."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg
import pytest
from bridge import WRITE
from support import eventually
from turn_workers import TurnWorld, kinds, open_world

from common.ids import UserId, new_id
from common.store.postgres import Postgres
from common.store.redis import Redis
from common.store.turns import Turn
from harness.model import Model, repeated
from towline.wire import events, frames
from worker import tool_calls

LOOK = frames.Tool("look", hints=frames.Hints(read_only=True))
# A name that the API of models does not allow.
FILL = frames.Tool("form.fill", description="fills a form", input_schema={"required": ["field"]})


@pytest.fixture
async def world(postgres: Postgres, redis_store: Redis, redis_url: str) -> AsyncIterator[TurnWorld]:
    async with open_world(postgres, redis_store, redis_url) as opened:
        yield opened


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with Model() as running:
        yield running


async def ask(
    world: TurnWorld, model: Model, user: UserId, behaviour: str, *calls: str, tools: list[str] | None = None
) -> Turn:
    """Post an entry whose lines say what the model is to call."""
    thread = await world.thread("openai", url=model.url, model=behaviour, api_key="sk-test", user=user, tools=tools)
    return await world.post(thread, "\n".join([new_id(), *(f"call {call}" for call in calls)]))


def told(model: Model) -> list[str]:
    """What the model was told by its last request."""
    return model.requests[-1].told


async def test_two_tools_are_called_and_told(world: TurnWorld, model: Model, user: UserId) -> None:
    """Each is a job in the turn's own scope, with the turn's trace; the outcome's own JSON is what the model reads."""
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[LOOK, FILL])
    turn = await ask(world, model, user, "tools-2", 'look {"mark": "m1"}', 'form_fill {"field": "name"}')
    first = await machine.next(frames.Job)
    assert (first.name, bytes(first.args), first.hinted) == ("look", b'{"mark":"m1"}', True)
    assert first.traceparent == turn.traceparent != ""
    await machine.answer(first, '{"seen": [1, 2]}')
    second = await machine.next(frames.Job)
    assert (second.name, second.hinted) == ("form.fill", False)
    await machine.answer(second, '"filled"')
    ended = await world.ended(turn)
    assert ended.reply_text == 'I was told: {"seen":[1,2]} | "filled"'
    assert model.requests[0].tools == ["look", "form_fill"]
    story = await world.coherent(turn.thread)
    assert story.turns[turn.turn].calls == ["tool-1", "tool-2"]
    assert {step: result.state for step, result in story.turns[turn.turn].results.items()} == {
        "tool-1": "completed",
        "tool-2": "completed",
    }
    records = await world.calls(turn)
    assert [(record.key, record.state) for record in records] == [
        (f"{turn.turn}:tool-1", "completed"),
        (f"{turn.turn}:tool-2", "completed"),
    ]
    (row,) = await world.usage(turn)
    assert (row.model_calls, row.tool_calls) == (3, 2)


async def test_calls_at_once_are_made_one_after_the_other(world: TurnWorld, model: Model, user: UserId) -> None:
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[LOOK])
    turn = await ask(world, model, user, "parallel-2", 'look {"mark": "a"}', 'look {"mark": "b"}')
    for mark in ("a", "b"):
        job = await machine.next(frames.Job)
        await machine.answer(job, f'"{mark}"')
    assert (await world.ended(turn)).reply_text == 'I was told: "a" | "b"'
    assert len(model.requests) == 2
    assert [kind for kind in kinds(await world.heard(turn.thread), turn) if kind.startswith("tool")] == [
        "tool.call",
        "tool.result",
    ] * 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("other {}", "there is no tool 'other' here; nothing was run"),
        ("look {not json}", "the arguments are not JSON"),
    ],
    ids=["unknown-tool", "bad-arguments"],
)
async def test_nonsense_is_told_to_the_model(
    world: TurnWorld, model: Model, user: UserId, call: str, says: str
) -> None:
    """No job is made of it, and the turn goes on."""
    worker = await world.worker(roles="bridge,turns")
    await world.machine(user, worker, tools=[LOOK])
    turn = await ask(world, model, user, "tools-1", call)
    assert (await world.ended(turn)).state == "completed"
    assert says in told(model)[0]
    assert await world.calls(turn) == []


async def test_an_agent_calls_only_the_tools_it_may(world: TurnWorld, model: Model, user: UserId) -> None:
    """What is not on its list is neither offered nor run, though the machine has it."""
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[LOOK, WRITE])
    turn = await ask(world, model, user, "tools-1", "fill_form {}", tools=["look"])
    assert (await world.ended(turn)).state == "completed"
    assert model.requests[0].tools == ["look"]
    assert "there is no tool 'fill_form' here" in told(model)[0]
    assert machine.jobs() == []


async def test_a_machine_that_is_not_there_is_told(world: TurnWorld, model: Model, user: UserId) -> None:
    """It was here once, so its tools are known; now it is not."""
    worker = await world.worker(roles="bridge,turns", heartbeat_s=1)
    machine = await world.machine(user, worker, tools=[LOOK])
    await machine.goodbye()
    turn = await ask(world, model, user, "tools-1", "look {}")
    assert (await world.ended(turn)).state == "completed"
    assert "the user's machine is not connected, so the tool did not run (machine-offline)" in told(model)[0]
    assert await world.calls(turn) == []
    story = await world.coherent(turn.thread)
    assert story.turns[turn.turn].results["tool-1"].state == "failed"


async def test_a_machine_that_goes_before_it_begins_is_told(world: TurnWorld, model: Model, user: UserId) -> None:
    """The call is taken back for good: the record says so, and a machine that comes later does not run it."""
    worker = await world.worker(roles="bridge,turns", heartbeat_s=1)
    machine = await world.machine(user, worker, tools=[WRITE, LOOK])
    # A job of somebody else keeps the machine busy, so the turn's stays queued.
    busy = await ask(world, model, user, "tools-1", "fill_form {}")
    await machine.next(frames.Job)
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    await eventually(lambda: world.calls(turn))
    machine.break_off()
    assert (await world.ended(turn)).state == "completed"
    story = await world.coherent(turn.thread)
    assert story.turns[turn.turn].results["tool-1"].state == "cancelled"
    assert [record.state for record in await world.calls(turn)] == ["cancelled"]
    again = await world.machine(user, worker, tools=[WRITE, LOOK])
    job = await again.next(frames.Job)
    await again.answer(job)
    assert (await world.ended(busy)).state == "completed"
    assert len(set(again.jobs())) == 1


async def test_an_outcome_that_nobody_knows_is_told(
    world: TurnWorld, model: Model, user: UserId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine goes while the tool runs, and does not come back before the call's deadline."""
    monkeypatch.setattr(tool_calls, "DEADLINE_S", 5.0)
    worker = await world.worker(roles="bridge,turns", heartbeat_s=1)
    machine = await world.machine(user, worker, tools=[WRITE])
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    await machine.next(frames.Job)
    machine.break_off()
    ended = await world.ended(turn, within_s=30)
    assert ended.state == "completed"
    assert "may or may not have run" in told(model)[0]
    (record,) = await world.calls(turn)
    assert (record.state, record.attempts) == ("unknown", 1)


async def test_a_full_queue_is_told(
    world: TurnWorld, model: Model, user: UserId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.store.keys.QUEUE_ENTRIES_MAX", 0)
    worker = await world.worker(roles="bridge,turns")
    await world.machine(user, worker, tools=[LOOK])
    turn = await ask(world, model, user, "tools-1", "look {}")
    assert (await world.ended(turn)).state == "completed"
    assert "too many calls wait" in told(model)[0]


async def test_a_cancelled_turn_cancels_its_running_tool(world: TurnWorld, model: Model, user: UserId) -> None:
    """The machine is told, no other tool starts, and the turn ends once."""
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[WRITE])
    turn = await ask(world, model, user, "tools-2", "fill_form {}", "fill_form {}")
    job = await machine.next(frames.Job)
    await world.stores.turns.cancel(turn.turn)
    cancel = await machine.next(frames.JobCancel)
    assert cancel.id == job.id
    assert (await world.ended(turn)).state == "cancelled"
    await machine.send(frames.JobResult(outcome="unknown", id=job.id))
    await eventually(lambda: _states(world, turn, ["unknown"]))
    assert machine.jobs() == [job.job]
    assert len(model.requests) == 1
    await world.coherent(turn.thread)


async def test_a_cancelled_turn_takes_back_a_tool_that_waits(world: TurnWorld, model: Model, user: UserId) -> None:
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[WRITE])
    busy = await ask(world, model, user, "tools-1", "fill_form {}")
    job = await machine.next(frames.Job)
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    await eventually(lambda: world.calls(turn))
    await world.stores.turns.cancel(turn.turn)
    assert (await world.ended(turn)).state == "cancelled"
    assert await _states(world, turn, ["cancelled"])
    await machine.answer(job)
    assert (await world.ended(busy)).state == "completed"
    assert len(machine.jobs()) == 1


async def test_a_turn_that_is_cancelled_while_its_tool_is_accepted_runs_none(
    world: TurnWorld, model: Model, user: UserId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent to Postgres is not taken back by leaving: the job would be there after everybody had looked."""
    is_cancelling, has_looked = asyncio.Event(), asyncio.Event()
    look = tool_calls.ToolCalls.cancel

    async def cancel(calls: tool_calls.ToolCalls, turn: Turn) -> None:
        is_cancelling.set()
        await look(calls, turn)
        has_looked.set()

    monkeypatch.setattr(tool_calls.ToolCalls, "cancel", cancel)
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[WRITE])
    async with await psycopg.AsyncConnection.connect(world.stores.postgres.url) as other:
        await other.execute("lock table requests in exclusive mode")
        turn = await ask(world, model, user, "tools-1", "fill_form {}")
        await eventually(lambda: _waits_for_a_lock(world, "insert into requests"))
        await world.stores.turns.cancel(turn.turn)
        await is_cancelling.wait()
        with contextlib.suppress(TimeoutError):  # it looks after the job is there, or it has looked in vain
            async with asyncio.timeout(1):
                await has_looked.wait()
    assert (await world.ended(turn)).state == "cancelled"
    await eventually(lambda: _states(world, turn, ["cancelled"]))
    assert machine.jobs() == []


async def test_a_tool_of_a_dead_worker_runs_once(world: TurnWorld, model: Model, user: UserId) -> None:
    """Its turn goes on elsewhere and joins the job that is under way; the model is not asked again."""
    bridge = await world.worker(roles="bridge")
    machine = await world.machine(user, bridge, tools=[WRITE])
    doomed = await world.worker()
    turn = await ask(world, model, user, "tools-2", 'fill_form {"n": 1}', 'fill_form {"n": 2}')
    first = await machine.next(frames.Job)
    await machine.answer(first, '"one"')
    second = await machine.next(frames.Job)
    await doomed.cut()
    await world.lapse(turn)
    await world.worker()
    await world.begun(turn, attempt=2)
    assert machine.jobs() == [first.job, second.job]
    await machine.answer(second, '"two"')
    ended = await world.ended(turn)
    assert (ended.reply_text, ended.attempts) == ('I was told: "one" | "two"', 2)
    assert machine.jobs() == [first.job, second.job]
    assert (repeated(model.requests), len(model.requests)) == (0, 3)
    (row,) = await world.usage(turn)
    assert (row.model_calls, row.tool_calls) == (3, 2)
    story = await world.coherent(turn.thread)
    assert story.turns[turn.turn].calls == ["tool-1", "tool-2"]


async def test_a_result_that_came_while_nobody_ran_the_turn_is_used(
    world: TurnWorld, model: Model, user: UserId
) -> None:
    """Killed after the tool's effect, before its checkpoint: the record has the outcome, also with the machine gone."""
    bridge = await world.worker(roles="bridge", heartbeat_s=1)
    machine = await world.machine(user, bridge, tools=[WRITE])
    doomed = await world.worker(heartbeat_s=1)
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    job = await machine.next(frames.Job)
    await doomed.cut()
    await machine.answer(job, '"done"')
    await eventually(lambda: _states(world, turn, ["completed"]))
    await machine.goodbye()
    await world.lapse(turn)
    await world.worker(heartbeat_s=1)
    ended = await world.ended(turn)
    assert (ended.reply_text, machine.jobs()) == ('I was told: "done"', [job.job])


async def test_a_tool_that_is_not_offered_any_more_is_not_said_not_to_have_run(
    world: TurnWorld, model: Model, user: UserId
) -> None:
    """Its worker died while it ran, and the agent was changed meanwhile: the model is told what came of it."""
    bridge = await world.worker(roles="bridge")
    machine = await world.machine(user, bridge, tools=[WRITE])
    doomed = await world.worker()
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    job = await machine.next(frames.Job)
    await doomed.cut()
    await world.stores.ask("update agents set tools = '{}' where agent = %s", turn.agent)
    await machine.answer(job, '"done"')
    await world.lapse(turn)
    await world.worker()
    ended = await world.ended(turn)
    assert (ended.reply_text, machine.jobs()) == ('I was told: "done"', [job.job])


async def test_large_arguments_are_left_out_of_events(world: TurnWorld, model: Model, user: UserId) -> None:
    """The machine has them; a thread's log, and everyone who reads it, would choke on them."""
    worker = await world.worker(roles="bridge,turns")
    machine = await world.machine(user, worker, tools=[LOOK])
    turn = await ask(world, model, user, "tools-1", 'look {"mark": "' + "x" * 70_000 + '"}')
    job = await machine.next(frames.Job)
    assert len(bytes(job.args)) > 70_000
    await machine.answer(job, '"seen"')
    assert (await world.ended(turn)).state == "completed"
    (call,) = [event for event in await world.heard(turn.thread) if event.type == events.TOOL_CALL]
    assert b"omitted_bytes" in bytes(call.data)
    assert len(call.data) < 1000


async def test_another_call_under_a_step_that_is_taken_fails_the_turn(
    world: TurnWorld, model: Model, user: UserId
) -> None:
    """Rule 34: nothing is run, and it is not tried for ever."""
    turn = await ask(world, model, user, "tools-1", "fill_form {}")
    await world.requests.accept(tool_calls.job_of(turn, user, "tool-1", "fill_form", b'{"other":1}', time_s=60))
    bridge = await world.worker(roles="bridge")
    machine = await world.machine(user, bridge, tools=[WRITE])
    await world.worker()
    ended = await world.ended(turn)
    assert (ended.state, ended.error_code, ended.attempts) == ("failed", "step-mismatch", 1)
    assert len(await world.calls(turn)) == 1
    assert set(machine.jobs()) <= {record.job for record in await world.calls(turn)}


async def _waits_for_a_lock(world: TurnWorld, statement: str) -> bool:
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    ((count,),) = await world.stores.ask(query, f"%{statement}%")
    return bool(count)


async def _states(world: TurnWorld, turn: Turn, states: list[str]) -> bool:
    return [record.state for record in await world.calls(turn)] == states
