"""`towline agents`, `threads`, `entries` and `usage` on a whole installation: gateway, worker, and a model played."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from command import towline
from support import redis_database

from harness.model import Model
from harness.servers import Servers
from harness.stack import Stack

MODEL_OF_THE_AGENT = "fast"


@pytest.fixture(scope="module")
async def shell(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[dict[str, str]]:
    """The variables of a shell that may use a running installation with an agent `helper`."""
    redis_url = redis_database(servers.redis_url, 1)
    async with (
        Model() as model,
        Stack(state_directory / "thread-commands", postgres_url=postgres_url, redis_url=redis_url) as stack,
    ):
        await stack.add_gateway()
        await stack.add_worker({"TOWLINE_ROLES": "turns"})
        variables = {
            "TOWLINE_URL": stack.gateways[0].url,
            "TOWLINE_API_KEY": stack.api_key,
            "KEY_OF_MODEL": "sk-of-the-model",
        }
        created = await towline(
            *("agents", "create", "helper", "--kind", "openai", "--endpoint", model.url),
            *("--model", MODEL_OF_THE_AGENT, "--api-key", "env:KEY_OF_MODEL"),
            **variables,
        )
        assert created.code == 0, created.err
        yield variables


async def new_thread(shell: dict[str, str], *options: str) -> str:
    created = await towline("threads", "create", "helper", *options, **shell)
    assert created.code == 0, created.err
    return created.out.strip()


async def test_what_is_said_is_answered_read_and_counted(shell: dict[str, str]) -> None:
    thread = await new_thread(shell)
    said = await towline("threads", "say", thread, "good morning", "--key", "k", **shell)
    assert (said.code, said.out.strip()) == (0, "You said: good morning"), said.err
    again = await towline("threads", "say", thread, "good morning", "--key", "k", **shell)
    assert (again.code, again.out) == (0, said.out)
    read = await towline("entries", "read", thread, "--json", **shell)
    view = read.document()
    assert (read.code, [entry["role"] for entry in view["entries"]]) == (0, ["user", "agent"])
    assert (view["turns"][0]["attempts"], view["turns"][0]["replays"]) == (1, 1)
    (row,) = (await towline("usage", "--thread", thread, "--json", **shell)).lines()
    assert (row["seam"], row["model"], row["model_calls"]) == ("reply", MODEL_OF_THE_AGENT, 1)


async def test_every_event_of_an_answer_comes_in_its_order(shell: dict[str, str]) -> None:
    thread = await new_thread(shell, "--model", "slow-1")
    said = await towline("threads", "say", thread, "count", "--json", **shell)
    _, *events, last = said.lines()
    kinds = [event["type"] for event in events]
    assert (said.code, kinds[:2], kinds[-2:]) == (
        0,
        ["message", "signal.dispatch.started"],
        ["message", "signal.dispatch.completed"],
    )
    deltas = [event["data"] for event in events if event["type"] == "message.delta"]
    assert [delta["n"] for delta in deltas] == list(range(1, len(deltas) + 1))
    assert len(deltas) > 1
    assert "".join(delta["text"] for delta in deltas) == last["turn"]["outcome"]["text"]


async def test_a_model_that_is_not_there_is_a_visible_failure(shell: dict[str, str]) -> None:
    thread = await new_thread(shell, "--model", "no-such-model")
    created = await towline("entries", "create", thread, "hello", **shell)
    assert created.code == 0, created.err
    read = await towline("entries", "read", thread, **shell)
    assert read.code == 1
    assert "no-such-model" in read.out.splitlines()[-1]
    assert read.out.splitlines()[-1].startswith("failed: ")
