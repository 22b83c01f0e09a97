"""A real Prometheus for tests, and what `docs/operating.md` says that it finds.

Needs `prometheus` and `promtool` on the PATH (Debian: `prometheus`). Without them the tests are left out, unless
`REQUIRE_PROMETHEUS` is set.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from harness.ports import free_port
from harness.runner import Process
from harness.stack import Service

REPOSITORY = Path(__file__).parents[1]
# Compose's; it asks for the addresses of the services' names, and here they are known.
SCRAPE_CONFIGURATION = REPOSITORY / "deploy/compose/prometheus/prometheus.yml"
SCRAPE_EVERY_S = 1
READY_WITHIN_S = 30.0


def require(program: str) -> str:
    """Return a program's path; leaves the test out if it is not installed."""
    if (path := shutil.which(program)) is None:
        assert not os.environ.get("REQUIRE_PROMETHEUS"), f"REQUIRE_PROMETHEUS is set, and there is no {program}"
        pytest.skip(f"no {program} here")
    return path


def promtool(*arguments: str, text: str = "") -> None:
    """Have promtool check something. Raises: AssertionError with what it said."""
    checked = subprocess.run(
        [require("promtool"), *arguments], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Series(NamedTuple):
    """One series of an answer: labels, and the value at the time of the query."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """Scrapes the services of a stack each second, as the project's own configuration says otherwise."""

    def __init__(self, directory: Path, services: Mapping[str, Sequence[Service]]) -> None:
        """Describe it. `services`: by the name under which the scrape configuration finds their replicas."""
        self.configuration = directory / "prometheus.yml"
        self.configuration.write_text(json.dumps(_configuration(services)))  # JSON is YAML, too
        self._port = free_port()
        argv = [
            require("prometheus"),
            f"--config.file={self.configuration}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]
        self.process = Process("prometheus", argv, directory=directory, env={"PATH": os.defpath})

    async def start(self) -> None:
        """Start it, and wait until it answers queries."""
        await self.process.start()

        async def is_ready() -> bool:
            try:
                async with httpx.AsyncClient() as http:
                    return (await http.get(f"http://127.0.0.1:{self._port}/-/ready")).status_code == 200
            except httpx.HTTPError:
                return False

        await self.process.wait_ready(is_ready, within_s=READY_WITHIN_S)

    async def query(self, expression: str) -> list[Series]:
        """Evaluate an expression now."""
        data = await self._read("query", query=expression)
        return [Series(series["metric"], float(series["value"][1])) for series in data["result"]]

    async def types(self) -> dict[str, str]:
        """The type of each family of ours; a counter's name is without `_total`."""
        return {
            family.removesuffix("_total"): entries[0]["type"]
            for family, entries in (await self._read("metadata")).items()
            if family.startswith("towline_")
        }

    async def _read(self, what: str, **parameters: str) -> Any:
        async with httpx.AsyncClient(timeout=30) as http:
            answer = await http.get(f"http://127.0.0.1:{self._port}/api/v1/{what}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]


def _configuration(services: Mapping[str, Sequence[Service]]) -> dict[str, Any]:
    """The project's scrape configuration with the addresses of these services, and a test's patience."""
    configuration: dict[str, Any] = yaml.safe_load(SCRAPE_CONFIGURATION.read_text())
    configuration["global"] |= {
        "scrape_interval": f"{SCRAPE_EVERY_S}s",
        "scrape_timeout": f"{SCRAPE_EVERY_S}s",
        "evaluation_interval": f"{SCRAPE_EVERY_S}s",
    }
    (job,) = configuration["scrape_configs"]
    (discovery,) = job.pop("dns_sd_configs")
    assert sorted(discovery["names"]) == sorted(services)
    job["static_configs"] = [
        {
            "targets": [f"127.0.0.1:{replica.admin_port}" for replica in replicas],
            "labels": {"__meta_dns_name": name},
        }
        for name, replicas in services.items()
    ]
    return configuration


class Documented(NamedTuple):
    """One metric as the table of `docs/operating.md` has it. `values`: those of its label, where they are listed."""

    name: str
    type: str
    labels: frozenset[str]
    values: frozenset[str]
    services: frozenset[str]


def read_documentation() -> list[Documented]:
    """Read the table of metrics."""
    text = (REPOSITORY / "docs/operating.md").read_text()
    table = text.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    rows = [re.split(r" *[|] *", line)[1:-1] for line in table.splitlines() if "`towline_" in line]
    documented = []
    for cells in rows:
        if len(cells) != 5:  # a paragraph that names metrics
            continue
        names, types, labels, services, _ = cells
        label, _, values = labels.partition(":")
        services = services.replace("all", "gateway, worker, relay")
        kinds = types.split(", ")
        for name, kind in zip(_quoted(names), kinds * len(_quoted(names)) if len(kinds) == 1 else kinds, strict=False):
            documented.append(
                Documented(
                    name, kind, frozenset(_quoted(label)), frozenset(_quoted(values)), frozenset(services.split(", "))
                )
            )
    return documented


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)
