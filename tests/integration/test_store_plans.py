"""Plans: no statement reads a whole table, however empty the table was when its plan was made."""

import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import psycopg
import pytest

from common.store.postgres import SESSION, statement

NAMES = sorted(path.name.removesuffix(".sql") for path in resources.files("common.store").joinpath("sql").iterdir())
# API keys are few, and looked at as a whole when one is added or all are listed.
WHOLE_TABLE = {"add_api_key", "list_api_keys"}
READS_ALL = re.compile(r"Seq Scan on (?!pg_|schema_migrations)\w+|Hash (?:\w+ )?Join|Merge (?:\w+ )?Join")


@pytest.fixture(scope="module")
async def session(postgres_url: str) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
    """A session such as the pool has, on tables that are empty and were never analyzed."""
    options = " ".join(f"-c {name}={value}" for name, value in SESSION.items())
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True, options=options) as connection:
        if connection.info.server_version < 160000:
            pytest.skip("PostgreSQL explains a statement without its parameters from 16 on")
        yield connection


@pytest.mark.parametrize("name", NAMES)
async def test_a_statement_goes_by_an_index(session: "psycopg.AsyncConnection[Any]", name: str) -> None:
    """Prepared statements keep such a plan: a scan that costs nothing at first costs more with every row."""
    found = READS_ALL.findall(await _plan(session, name))
    assert found == [] or (name in WHOLE_TABLE and found == ["Seq Scan on api_keys"]), found


async def _plan(session: "psycopg.AsyncConnection[Any]", name: str) -> str:
    """The generic plan of a statement, its named parameters numbered as the server knows them."""
    numbers: dict[str, int] = {}
    text = re.sub(
        r"%\((\w+)\)[sbt]", lambda match: f"${numbers.setdefault(match[1], len(numbers) + 1)}", statement(name)
    ).replace("%%", "%")
    cursor = await session.execute(f"explain (generic_plan, costs off) {text}".encode())
    return "\n".join([row[0] for row in await cursor.fetchall()])
