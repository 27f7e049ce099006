"""``make audit`` never calls pins clean that it could not check, and ``make sbom`` lists what oncekey installs."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / ".venv-audit/bin/python"
needs_tools = pytest.mark.skipif(not TOOLS.exists(), reason="pip-audit is in .venv-audit: run `make audit` first")


def program(name: str) -> Any:
    """A file of .ci as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / f".ci/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


audit, sbom = program("audit"), program("sbom")


def said(*packages: tuple[str, str], unknown: tuple[str, ...] = ()) -> str:
    """pip-audit's JSON for packages with the id of a vulnerability each, and for those that it does not know."""
    listed = [
        {"name": n, "version": "1", "vulns": [{"id": i, "fix_versions": ["2"]}] if i else []} for n, i in packages
    ]
    return json.dumps({"dependencies": [*listed, *({"name": n, "skip_reason": "not found"} for n in unknown)]})


class Asked:
    """Answers for pip-audit: the canary first, then each file."""

    def __init__(self, canary: str, files: str = said(("orjson", ""))) -> None:
        self.canary, self.files = canary, files
        self.services: list[str] = []

    def __call__(self, path: Path, service: str) -> Any:
        self.services.append(service)
        return audit.read_report(self.canary if path.name == "canary.txt" else self.files)


PINS = [ROOT / "requirements/dev.txt"]
OLD = [ROOT / "requirements/matrix/oldest.txt"]
SEEN = said(("jinja2", "PYSEC-2019-217"))


@pytest.mark.parametrize("canary", ["", "Traceback", said(("jinja2", "")), said(unknown=("jinja2",))])
def test_service_that_does_not_report_the_canary_ends_with_a_status_of_its_own(canary: str, capsys: Any) -> None:
    """The last two are what pip-audit calls "No known vulnerabilities found"."""
    asked = Asked(canary)
    assert audit.check(PINS, asked, allow_unreachable=False) == 3
    assert audit.check(PINS, asked, allow_unreachable=True) == 0
    assert asked.services == ["pypi", "osv"] * 2
    assert capsys.readouterr().out.count("audit: NOT DONE") == 2


@pytest.mark.parametrize(
    ("files", "status"),
    [(said(("orjson", "")), 0), (said(("orjson", "CVE-1")), 1), (said(unknown=("orjson",)), 1), ("cut off", 3)],
)
def test_status_says_what_was_found_in_the_pins(files: str, status: int) -> None:
    assert audit.check(PINS, Asked(SEEN, files), allow_unreachable=False) == status


def test_old_versions_of_the_matrix_are_printed_and_do_not_fail(capsys: Any) -> None:
    assert audit.check(OLD, Asked(SEEN, said(("django", "CVE-1"))), allow_unreachable=False) == 0
    assert "django 1: CVE-1, fixed in 2" in capsys.readouterr().out


@contextmanager
def vulnerability_service(vulnerable: set[str]) -> Iterator[str]:
    """As much of OSV as pip-audit asks."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = json.loads(self.rfile.read(int(self.headers["content-length"])))["package"]["name"].lower()
            fixed = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}
            affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": [fixed]}]
            known = {"id": "PYSEC-1", "summary": "s", "details": "d", "affected": affected}
            body = json.dumps({"vulns": [known]} if name in vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


@needs_tools
@pytest.mark.parametrize(("vulnerable", "status"), [({"jinja2"}, 0), ({"jinja2", "orjson"}, 1)])
def test_real_pip_audit_is_read_right(tmp_path: Path, vulnerable: set[str], status: int) -> None:
    """With a service of our own, on one file of pins."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/pins.txt").write_text("orjson==3.11.0\n", "utf-8")
    run = (
        f"import sys; sys.path.insert(0, {str(ROOT / '.ci')!r}); import audit, pathlib; audit.SERVICES = ('osv',); "
        f"audit.ROOT = pathlib.Path({str(tmp_path)!r}); sys.exit(audit.main([]))"
    )
    with vulnerability_service(vulnerable) as url:
        environment = os.environ | {"PIP_AUDIT_OSV_URL": url, "HOME": str(tmp_path)}
        done = subprocess.run([TOOLS, "-c", run], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr


# ---------------------------------------------------------------- the bill of materials


@pytest.fixture(scope="module")
def bill() -> Any:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return sbom.bill_of(project, {sbom.canonical(found.name): found for found in distributions()})


def test_bill_has_what_every_extra_installs_and_no_tool_of_ours(bill: Any) -> None:
    assert bill.missing == set()
    assert bill.extras["orjson"] >= {"(always)"}
    assert bill.extras["psycopg-binary"] == {"postgres"}
    assert {"cli", "demo"} <= bill.extras["typer"]
    assert bill.extras["starlette"] >= {"starlette", "fastapi", "demo"}
    assert not bill.extras.keys() & {"oncekey", "pytest", "ruff", "mypy", "hypothesis"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    with_packages = {extra for extra, lines in extras.items() if lines and extra != "all"}
    assert set().union(*bill.extras.values()) == with_packages | {"(always)"}


@needs_tools
def test_bill_is_valid_cyclonedx(tmp_path: Path) -> None:
    """The program validates by the schema before it writes."""
    packages = Path(pytest.__file__).parent.parent
    run = (
        f"import sys; sys.path.insert(0, {str(ROOT / '.ci')!r}); import sbom, tomllib; "
        f"project = tomllib.loads(open({str(ROOT / 'pyproject.toml')!r}).read())['project']; "
        f"installed = {{sbom.canonical(f.name): f for f in sbom.distributions(path=[{str(packages)!r}])}}; "
        "print(sbom.document(project, installed, sbom.bill_of(project, installed)))"
    )
    done = subprocess.run([TOOLS, "-c", run], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "oncekey")
    names = {component["name"] for component in document["components"]}
    (own,) = (each for each in document["dependencies"] if each["ref"].startswith("oncekey=="))
    assert {each.partition("==")[0] for each in own["dependsOn"]} <= names
    assert {"orjson", "rfc8785", "http-sfv"} <= names
