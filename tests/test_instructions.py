"""The gate by instructions: counted requests are answered, costs go to their layers, a dearer request fails the run."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the counted app stands behind uvicorn's protocol")
pytest.importorskip("starlette", reason="the counted app is a Starlette app")

from benchmarks import apps, by_hand, callgrind, in_process, instructions, load
from benchmarks.__main__ import main as bench
from benchmarks.callgrind import LOOP, Counted, Layers, layer, read_costs
from benchmarks.instructions import FIGURES, SLACK, UPDATE, VERSIONS, gate, table
from benchmarks.serving import child_environment
from oncekey.web import tuning

COMMITTED = json.loads(FIGURES.read_text())
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mode", [*in_process.REQUESTS, *in_process.DOCUMENTS])
def test_counted_requests_are_answered(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "settle", lambda: None)  # it is for a process of its own
    steps: list[str] = []
    in_process.serve(
        mode,
        2 if mode in in_process.DOCUMENTS else 40,
        f"sqlite:///{tmp_path / 'counted.db'}",
        begin=lambda: steps.append("begin"),
        end=lambda: steps.append("end"),
    )
    assert steps == ["begin", "end"]


@pytest.mark.stores
@pytest.mark.parametrize("mode", in_process.INSERTS)
def test_counted_inserts_are_answered_and_written(mode: str, postgres_url: str) -> None:
    """In a process of their own, as they are counted: their pools of connections end with it."""
    psycopg = pytest.importorskip("psycopg")
    program = "from benchmarks.in_process import serve; import sys; serve(sys.argv[1], 40, sys.argv[2])"
    with psycopg.connect(postgres_url, autocommit=True) as own:
        for table in (apps.BUSINESS_TABLE, by_hand.TABLE):
            own.execute(table.encode())
        command = [sys.executable, "-c", program, mode, postgres_url]
        subprocess.run(command, cwd=ROOT, env=child_environment(), check=True, timeout=60)
        assert own.execute("SELECT count(*) FROM payments").fetchone() == (in_process.WARM + 40,)


def test_an_answer_that_was_not_asked_for_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "BODY", b"[" + in_process.BODY[2:] + b"]")
    with pytest.raises(RuntimeError, match="not the answer that was asked for"):
        in_process.serve("bare", 1, "")


def test_run_without_valgrind_is_skipped_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert bench(["--instructions"]) == 0
    assert "skipped: valgrind is not installed" in capsys.readouterr().out


@pytest.mark.stores  # ten seconds, most of them valgrind's start
@pytest.mark.skipif(shutil.which("valgrind") is None or load.compiler() is None, reason="valgrind and a C compiler")
def test_layers_of_a_bare_request_add_up_to_its_instructions(tmp_path: Path) -> None:
    counted = callgrind.count("bare", 32, "", callgrind.build(tmp_path), by_layer=True, at_once=32)
    assert 100_000 < counted.all < 1_000_000
    assert sum(counted.layers.values()) == pytest.approx(counted.all)
    assert counted.layers["starlette"] > counted.all / 5
    assert counted.layers["uvicorn"] > counted.all / 5
    assert counted.layers[LOOP] < counted.all / 5
    assert not [name for name in counted.layers if name.startswith("oncekey/")]


def test_cost_of_a_called_function_is_not_its_callers() -> None:
    """Callgrind names a function once, by ``fn=`` or ``cfn=``, and repeats only its number."""
    lines = """
fn=(1) main
0 1000
cfn=(2) Zlayer_000
calls=1 0
0 70
fn=(2)
0 40
cfn=(3) Zlayer_001'2
calls=1 0
0 30
fn=(3)
+0 30

totals: 1070
""".splitlines()
    assert read_costs(lines, ["web", "stores"]) == {"web": 40, "stores": 30}


def test_a_file_has_one_layer_and_the_last_ones_share_the_rest() -> None:
    assert layer("/x/src/oncekey/web/asgi.py") == "oncekey/web/asgi"
    assert layer("/x/site-packages/starlette/routing.py") == "starlette"
    assert layer("<frozen importlib._bootstrap>") == callgrind.REST
    layers = Layers()
    numbers = {layers.number(f"/src/oncekey/module{n}.py") for n in range(2 * callgrind.MOST_LAYERS)}
    assert numbers == set(range(callgrind.MOST_LAYERS))


def test_table_has_a_line_for_each_dear_layer_and_sums() -> None:
    counted = {
        "bare": Counted(90.0, {"starlette": 80.0, LOOP: 10.0}),
        "first": Counted(9000.0, {"oncekey/web/asgi": 8000.0, "oncekey/errors": 900.0, "starlette": 90.0, LOOP: 10.0}),
    }
    assert [row[::2] for row in table(counted, ["bare", "first"])] == [
        ("oncekey/web/asgi", "8,000"),
        ("oncekey/ other modules", "900"),
        ("oncekey in all", "8,900"),
        ("starlette", "90"),
        (LOOP, "10"),
        ("in all, without the hook for frames", "9,000"),
    ]


def counts(first: float, replay: float = 1.0, bare: float = 1.0) -> dict[str, Counted]:
    """The committed counts, times these."""
    times = {"first": first, "replay": replay, "bare": bare}
    return {mode: Counted(COMMITTED["instructions"][mode] * times[mode], {}) for mode in times}


@pytest.mark.parametrize("mode", ["first", "replay"])
def test_request_that_costs_over_three_percent_more_fails(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: COMMITTED["python"])
    above, below = 1 + SLACK + 0.002, 1 + SLACK - 0.002
    failed = [line for line in gate(counts(**{"first": 1.0, mode: above}), COMMITTED) if line.startswith("failed")]
    assert len(failed) == 1
    assert mode in failed[0]
    assert UPDATE in failed[0]
    assert not [line for line in gate(counts(**{"first": 1.0, mode: below}), COMMITTED) if line.startswith("failed")]


def test_another_python_is_not_compared_and_other_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of one run: where all requests cost more by the same part, nothing failed."""
    monkeypatch.setattr(platform, "python_version", lambda: "4.0.1")
    assert gate(counts(2.0), COMMITTED) == [f"not compared: {FIGURES.name} was made with Python {COMMITTED['python']}"]
    monkeypatch.setattr(platform, "python_version", lambda: COMMITTED["python"])
    assert not [line for line in gate(counts(2.0, 2.0, 2.0), COMMITTED) if line.startswith("failed")]
    other = {**COMMITTED, "packages": {**COMMITTED["packages"], "starlette": "0.1"}}
    assert "starlette 0.1, here" in gate(counts(1.0), other)[0]
    assert any(UPDATE in line for line in gate(counts(0.9), COMMITTED))


def test_committed_figure_names_the_pinned_versions() -> None:
    """A new pin changes what a request costs: after `make pins`, count again."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    assert COMMITTED["packages"] == {name: pins[name] for name in VERSIONS}
    assert set(COMMITTED["instructions"]) == set(in_process.REQUESTS)


def test_ci_runs_the_gate() -> None:
    assert "make bench ARGS=--instructions" in (ROOT / ".ci" / "run").read_text()
    assert "--instructions" in UPDATE


def test_layers_and_gate_are_refused_with_other_settings() -> None:
    with pytest.raises(SystemExit):
        instructions.read_options(["--at-once", "1"])
    assert instructions.read_options(["bare", "first", "--at-once", "1"]).at_once == 1
