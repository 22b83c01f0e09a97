"""CPU accounting of the bench, against a real process that uses some."""

import os
import subprocess
import sys

import pytest

from harness.bench.cpu import cpu_seconds, store_pids, used_us

BURN = "import time\nwhile time.process_time() < {}: pass"


def test_cpu_counts_a_process_and_its_children_the_ended_ones_too():
    """A child burns 0.3 s and ends; the parent burns 0.2 s and stays."""
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(0.3)!r}])\n{BURN.format(0.2)}"
    with subprocess.Popen(
        [sys.executable, "-c", f"{script}\nprint('done', flush=True)\nsys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        used = cpu_seconds({"burner": process.pid})
        process.communicate()

    expected_s = 0.5 if sys.platform == "linux" else 0.2
    assert expected_s - 0.05 <= used["burner"] <= expected_s + 0.3


def test_used_is_per_job():
    assert used_us({"gateway": 1.0}, {"gateway": 1.5}, 1000) == pytest.approx({"gateway": 500.0})


def test_stores_are_found_by_their_pid_files(tmp_path):
    (tmp_path / "valkey.pid").write_text(f"{os.getpid()} 123.4\n")

    assert store_pids(tmp_path) == {"valkey": os.getpid()}
    assert store_pids(tmp_path / "none") == {}
