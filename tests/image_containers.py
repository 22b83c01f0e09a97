"""Containers of the built images, by the command line of docker or podman, hardened as a restricted pod is.

Owns:     the containers of one test: on this machine's network, so that they reach the tests' own stores, and removed
          at its end.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.ports import free_port

# The tag of the images under test; empty: there are none.
TAG = os.environ.get("TOWLINE_TEST_IMAGES", "")
# A root that takes no files, no capability and no way to any; and here not even a /tmp.
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
COMMAND_WITHIN_S = 90.0
READY_WITHIN_S = 60.0


def image_name(image: str) -> str:
    """What `scripts/images` calls it."""
    return f"towline-{image}:{TAG}"


class Engine:
    """Docker or podman."""

    def __init__(self, program: str) -> None:
        self.program = program
        # Podman gives a read-only container a writable /tmp and /run of its own accord.
        self.hardened = (*HARDENED, "--read-only-tmpfs=false") if program == "podman" else HARDENED

    @classmethod
    def find(cls) -> "Engine":
        """The one that `ENGINE` names, else the first that answers."""
        if named := os.environ.get("ENGINE"):
            return cls(named)
        for program in ("docker", "podman"):
            if shutil.which(program) and cls(program)("info", ok=False).returncode == 0:
                return cls(program)
        raise AssertionError("TOWLINE_TEST_IMAGES is set, and neither docker nor podman answers")

    def __call__(self, *arguments: str, ok: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command of it; a failure is the caller's to look at only with `ok=False`."""
        done = subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S
        )
        assert not ok or done.returncode == 0, f"{self.program} {' '.join(arguments)}: {done.stderr}"
        return done

    def inspect(self, kind: str, name: str) -> Any:
        """What it knows of a `container` or an `image`."""
        (found,) = json.loads(self(kind, "inspect", name).stdout)
        return found


@dataclass(frozen=True)
class Container:
    """A container, started, and perhaps ended since."""

    engine: Engine
    name: str
    admin_port: int

    def signal(self, name: str) -> None:
        """Send it a signal; one that has ended takes none, and that is no error."""
        self.engine("kill", "--signal", name, self.name, ok=False)

    def exit_code(self, within_s: float) -> int:
        """Wait for its end."""
        deadline = time.monotonic() + within_s
        while (state := self.engine.inspect("container", self.name)["State"])["Running"]:
            assert time.monotonic() < deadline, f"still running after {within_s:g} s: {self.logs()[-2000:]}"
            time.sleep(0.05)
        return int(state["ExitCode"])

    def logs(self) -> str:
        """What it has written so far, on both streams."""
        done = self.engine("logs", self.name)
        return done.stdout + done.stderr

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command beside process 1, as its user."""
        return self.engine("exec", *_variables(env or {}), self.name, *argv, ok=False)

    def python(self, source: str) -> Any:
        """The JSON document that a program prints inside."""
        done = self.run("python", "-c", source)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(self, path: str) -> tuple[int, str]:
        """Ask the admin port: status and body; status 0 while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def wait_for(self, path: str) -> None:
        """Wait until that path of the admin port is answered with 200."""
        deadline = time.monotonic() + READY_WITHIN_S
        while self.get(path)[0] != 200:
            assert time.monotonic() < deadline, f"no 200 from {path}: {self.logs()[-2000:]}"
            time.sleep(0.1)


class Containers:
    """The containers of one test."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names: list[str] = []

    def start(
        self, image: str, *command: str, env: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> Container:
        """Start one, with ports of its own on this machine; nothing is waited for."""
        name = f"towline-test-{image}-{uuid.uuid4().hex[:8]}"
        admin_port = free_port()
        ports = {"TOWLINE_ADMIN_PORT": str(admin_port), "TOWLINE_HTTP_PORT": "0", "TOWLINE_BRIDGE_PORT": "0"}
        self._names.append(name)
        self.engine(
            *("run", "--detach", "--name", name, "--network=host", "--no-healthcheck", *self.engine.hardened),
            *(*_variables({**ports, **(env or {})}), *options, image_name(image), *command),
        )
        return Container(self.engine, name, admin_port)

    def remove(self) -> None:
        """Remove all, also those that run."""
        for name in self._names:
            self.engine("rm", "--force", name, ok=False)


def _variables(env: Mapping[str, str]) -> list[str]:
    return [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
