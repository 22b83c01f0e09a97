"""Agents over HTTP: who may define which, what is refused, and that secrets stay secret."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_door import Door, open_door
from gateway_threads import Product

from common.ids import new_id
from common.process.secrets import Secrets, new_key
from harness.servers import Servers

KEY = new_key()
SECRET = "s3cret-of-the-model"
OPENAI: dict[str, Any] = {"kind": "openai", "url": "http://127.0.0.1:9/v1", "model": "gpt"}


@pytest.fixture(scope="module")
async def door(servers: Servers, postgres_url: str, state_directory: Path) -> AsyncIterator[Door]:
    """One gateway that may keep secrets."""
    env = {"TOWLINE_SECRET_KEYS": KEY, "TOWLINE_LOG_LEVEL": "debug"}
    async with open_door(servers, postgres_url, state_directory / "agents", env=env) as opened:
        yield opened


@pytest.fixture
async def product(door: Door) -> AsyncIterator[Product]:
    async with Product(door) as opened:
        yield opened


async def test_an_agent_is_defined_and_defined_anew(product: Product) -> None:
    """Created, then replaced: what is left out is at its default again."""
    path = f"/v1/agents/agent-{new_id()}"
    first = await product.client.put(path, json=OPENAI | {"instructions": "be brief", "turn_cap_s": 60, "tools": ["t"]})
    assert first.status_code == 201
    shown = first.json()
    assert (shown["instructions"], shown["turn_cap_s"], shown["tools"]) == ("be brief", 60, ["t"])
    again = await product.client.put(path, json=OPENAI)
    assert again.status_code == 200
    assert again.json() == (await product.client.get(path)).json()
    assert again.json() | {"created_at": ""} == {
        "agent": path.rpartition("/")[2],
        "kind": "openai",
        "url": OPENAI["url"],
        "model": "gpt",
        "instructions": None,
        "tools": None,
        "has_api_key": False,
        "has_signing_secret": False,
        "turn_cap_s": 600,
        "created_at": "",
    }


async def test_secrets_are_stored_encrypted_and_shown_to_nobody(door: Door, product: Product) -> None:
    """Neither in an answer, nor in the table, nor in the log; whoever has the installation's key reads them."""
    agent = await product.new_agent(**OPENAI, api_key=SECRET)
    answer = await product.client.get(f"/v1/agents/{agent}")
    assert answer.json()["has_api_key"] is True
    (row,) = await door.rows("select api_key, agents::text as whole from agents where agent = %s", agent)
    assert SECRET not in answer.text + row.whole
    assert Secrets([KEY]).decrypt(bytes(row.api_key)) == {"api_key": SECRET}
    assert SECRET not in door.stack.gateways[0].read_log()


async def test_a_secret_stays_while_its_url_does(product: Product) -> None:
    """Left out, it is kept; where the URL changes it goes nowhere else than where it was given for."""
    agent = await product.new_agent(kind="http", url="http://127.0.0.1:9/a", signing_secret=SECRET)
    path = f"/v1/agents/{agent}"
    same = await product.client.put(path, json={"kind": "http", "url": "http://127.0.0.1:9/a", "turn_cap_s": 30})
    assert (same.status_code, same.json()["has_signing_secret"]) == (200, True)
    moved = await product.client.put(path, json={"kind": "http", "url": "http://127.0.0.1:9/b"})
    assert (moved.status_code, moved.json()["has_signing_secret"]) == (200, False)


@pytest.mark.parametrize(
    ("changes", "status", "slug"),
    [
        pytest.param({"url": None}, 400, "invalid-request", id="no url"),
        pytest.param({"model": None}, 400, "invalid-request", id="no model"),
        pytest.param({"kind": "echo"}, 400, "invalid-request", id="a url for echo"),
        pytest.param({"kind": "http"}, 400, "invalid-request", id="a model for http"),
        pytest.param({"kind": "other"}, 400, "invalid-request", id="an unknown kind"),
        pytest.param({"signing_secret": "x"}, 400, "invalid-request", id="a secret of another kind"),
        pytest.param({"api_key": "two\nlines"}, 400, "invalid-request", id="a key that no header carries"),
        pytest.param({"instructions": "a\x00b"}, 400, "invalid-request", id="NUL"),
        pytest.param({"tools": ["x"] * 5000}, 400, "invalid-request", id="too many tools"),
        pytest.param({"turn_cap_s": 0}, 400, "invalid-request", id="a cap too short"),
        pytest.param({"turn_cap_s": 1e9}, 400, "invalid-request", id="a cap too long"),
        pytest.param({"more": 1}, 400, "invalid-request", id="an unknown member"),
        pytest.param({"instructions": "x" * 300_000}, 413, "body-too-large", id="too large"),
        pytest.param({"url": "http://169.254.169.254/v1"}, 422, "egress-refused", id="a cloud's metadata"),
        pytest.param({"url": "http://10.1.2.3/v1"}, 422, "egress-refused", id="an address that is not allowed"),
        pytest.param({"url": "ftp://127.0.0.1/v1"}, 422, "egress-refused", id="another scheme"),
    ],
)
async def test_what_is_no_agent_is_refused(product: Product, changes: dict[str, Any], status: int, slug: str) -> None:
    """Readably, and nothing is recorded."""
    path = f"/v1/agents/agent-{new_id()}"
    body = {name: value for name, value in (OPENAI | changes).items() if value is not None}
    answer = await product.client.put(path, json=body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{slug}"), answer.text
    assert (await product.client.get(path)).status_code == 404


@pytest.mark.parametrize("name", ["-a", "a b", "a%2Fb", "%C3%A9", "x" * 201])
async def test_a_name_that_is_no_id_is_refused(product: Product, name: str) -> None:
    """As ids of users and runs are."""
    answer = await product.client.put(f"/v1/agents/{name}", json={"kind": "echo"})
    assert answer.status_code in (400, 404)


async def test_agents_are_listed_by_name_page_by_page(product: Product) -> None:
    """Each once, in order, whatever else is there."""
    made = sorted([await product.new_agent() for _ in range(5)])
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = (await product.client.get("/v1/agents", params=params)).json()
        seen += [agent["agent"] for agent in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == sorted(set(seen))
    assert set(made) <= set(seen)
    assert (await product.client.get("/v1/agents", params={"cursor": "!"})).status_code == 400


async def test_a_forgotten_agent_answers_nothing_more(product: Product) -> None:
    """Its threads stay readable; posting there says why not. Forgetting twice finds nothing."""
    agent = await product.new_agent()
    thread = await product.new_thread(agent=agent)
    await product.post(thread)
    path = f"/v1/agents/{agent}"
    assert (await product.client.delete(path)).status_code == 204
    assert (await product.client.delete(path)).status_code == 404
    assert (await product.client.get(f"/v1/threads/{thread}")).status_code == 200
    refused = await product.try_post(thread)
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/unknown-agent")
    assert (await product.client.post("/v1/threads", json={"agent": agent})).status_code == 422


async def test_keys_that_are_bound_or_lack_the_scope_define_none(door: Door, product: Product) -> None:
    """An agent belongs to no user, and says where an installation's requests go."""
    agent = await product.new_agent()
    for members in ({"users": ["alice"]}, {"scopes": ["jobs", "runs"]}):
        async with door.client(key=await product.api_key(**members)) as client:
            assert (await client.put("/v1/agents/mine", json={"kind": "echo"})).status_code == 403
            assert (await client.get(f"/v1/agents/{agent}")).status_code == 403
            assert (await client.get("/v1/agents")).status_code == 403
            assert (await client.delete(f"/v1/agents/{agent}")).status_code == 403


async def test_without_keys_no_secret_is_taken(door: Door) -> None:
    """An installation that cannot encrypt says so; an agent without secrets is no matter."""
    gateway = await door.add_gateway({"TOWLINE_SECRET_KEYS": ""})
    try:
        async with Product(door, gateway) as product:
            path = f"/v1/agents/agent-{new_id()}"
            answer = await product.client.put(path, json=OPENAI | {"api_key": SECRET})
            assert (answer.status_code, answer.json()["type"]) == (501, "/problems/not-configured")
            assert (await product.client.put(path, json=OPENAI)).status_code == 201
    finally:
        await gateway.stop()
        door.stack.gateways.remove(gateway)
