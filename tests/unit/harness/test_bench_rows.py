"""The rows of the bench: what they need, and that they stand beside their goals."""

import io
import math

import pytest
from rich.console import Console

from harness.bench import rounds
from harness.bench.figures import Figure, Sample, result_of
from harness.bench.rows import ROWS, RUNS, runs_for
from harness.bench.runs import as_quick
from harness.bench.table import figures_table, number, runs_table

FIGURES = [figure for figures in ROWS.values() for figure in figures]


class Recording(dict[str, Sample]):
    """A round that knows which of its samples were looked at."""

    def __init__(self) -> None:
        super().__init__(
            {run.name: Sample(1, 1.0, 1.0, 1.0, {"gateway": 1.0}, memory_kib={"gateway": 1.0}) for run in RUNS}
        )
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Sample:
        self.seen.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_names_exactly_the_runs_that_it_looks_at(figure):
    """A run it forgot would be missing when its row is chosen alone; one too many would be measured for nothing."""
    samples = Recording()

    result_of(figure, [samples])

    assert samples.seen == set(figure.runs)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_the_later_goal_is_the_harder_one(figure):
    if figure.goal is not None and figure.then is not None:
        assert figure.then < figure.goal if figure.better == "lower" else figure.then > figure.goal


def test_every_run_serves_a_figure():
    assert {name for figure in FIGURES for name in figure.runs} == {run.name for run in RUNS}


def test_runs_come_once_each_with_peers_and_ours_in_turn():
    runs = runs_for(FIGURES)

    assert [run.name for run in runs] == [run.name for run in RUNS]
    ours = ["towline" in run.name for run in runs[:6]]
    assert ours == [False, True, False, True, False, True]


def test_a_row_alone_is_measured_alone():
    assert {run.peer for run in runs_for(ROWS["load"])} == {"naive hub", "towline"}
    assert {run.peer for run in runs_for(ROWS["status"])} == {"status"}


def test_the_run_of_six_has_the_requests_that_its_goal_asks_for():
    (run,) = runs_for(ROWS["six"])

    assert (run.load.in_flight, run.load.jobs >= 5000) == (6, True)


def test_a_quick_bench_has_the_same_loads_with_less_to_do():
    for run, quick in zip(RUNS, as_quick(RUNS), strict=True):
        assert (quick.name, quick.peer, type(quick.load)) == (run.name, run.peer, type(run.load))
        if run.unit == "job":
            assert (quick.load.in_flight, quick.load.tool) == (run.load.in_flight, run.load.tool)
        # A drill is the same however short the bench.
        assert size(quick.load) < size(run.load) or run.unit == "recovery"


def size(load: object) -> int:
    return math.prod(getattr(load, name, 1) for name in ("jobs", "events", "clients"))


def test_runs_that_stand_side_by_side_count_the_same_unit():
    for figure in FIGURES:
        assert len({run.unit for run in runs_for([figure])}) == 1


def test_what_a_machine_does_not_have_is_left_out_and_said_to_be(monkeypatch):
    monkeypatch.setattr(rounds, "unavailable", lambda: {"nchan": "nchan is not installed"})

    measurable, left_out = rounds.measurable(ROWS["fanout"])

    assert not any("nchan" in run.peer for run in runs_for(measurable))
    assert {figure.against for figure, _ in left_out} == {"nchan"}
    assert len(measurable) + len(left_out) == len(ROWS["fanout"])
    assert shown(figures_table([], left_out)).count("nchan: nchan is not installed") == len(left_out)


def shown(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=300).print(table)
    return text.getvalue()


def test_table_puts_a_figure_beside_its_goals_and_says_whether_it_meets_them():
    figure = Figure(
        "a job", ("ours",), "ms", lambda samples: samples["ours"].p50_ms, "a peer", lambda _: 2.0, goal=1.8, then=1.5
    )
    samples = {"ours": Sample(1, 1.0, 3.4, 1.0, {})}

    (line,) = [line for line in shown(figures_table([result_of(figure, [samples])])).splitlines() if "a job" in line]

    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["a job", "3.40 ms", "a peer: 2.00 ms", "1.70 ×", "≤ 1.8 ×", "ok", "≤ 1.5 ×", "no"]


def test_table_shows_no_verdict_without_a_goal():
    figure = Figure("a job", ("ours",), "ms", lambda _: 1.0, "a peer", lambda _: 1.0, better="higher")

    text = shown(figures_table([result_of(figure, [{}])]))

    assert not {"ok", "no", "≥"} & set(text.split())


def test_table_shows_waits_where_somebody_waits_and_memory_where_it_was_looked_at():
    sample = Sample(1000, 1.0, None, None, {"gateway": 20.0}, memory_kib={"gateway": 41.5})

    (line,) = [line for line in shown(runs_table({"idle": sample}, "client")).splitlines() if "gateway" in line]

    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["idle", "1 000", "", "", "20.0", "gateway 20.0", "", "0.00", "gateway 41.5"]


def test_table_keeps_processes_and_stores_apart():
    sample = Sample(100, 0.5, 1.0, 2.0, {"gateway-1": 300.0, "worker-1": 90.4}, 20.0, {"postgres": 55.0})

    (line,) = [line for line in shown(runs_table({"towline": sample})).splitlines() if "towline" in line]

    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["towline", "200", "1.00", "2.00", "390", "gateway-1 300, worker-1 90.4", "postgres 55.0", "20.0"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (9.994, "9.99"), (12.34, "12.3"), (100.4, "100"), (12345.6, "12 346")]
)
def test_numbers_have_the_figures_that_count(value, text):
    assert number(value) == text
