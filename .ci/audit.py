"""Ask pip-audit for known vulnerabilities of every package that requirements/ pins: ``make audit``.

pip-audit counts a package that the service does not know as no vulnerability, and ends with 0. Where only the package
index can be reached, and not the service, that is every package. So a release with published vulnerabilities is asked
for first. If the service does not report it, the data cannot be reached, and nothing is said of our pins.

Exit status:

* 0: no known vulnerability
* 1: a pinned package has one, or the service does not know it
* 3: the data cannot be reached from here (0 with ``--allow-unreachable``: for CI without a network)

The files of requirements/matrix hold old versions on purpose, for tests of compatibility. Their vulnerabilities are
printed, and do not change the exit status.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("pypi", "osv")
CANARY = "jinja2==2.10"
"""Published in 2018; its escape from the sandbox (CVE-2019-10906) is in every database."""
FOUND, UNREACHABLE = 1, 3
SECONDS = 300.0

Audit = Callable[[Path, str], "Report | None"]


@dataclass(frozen=True)
class Report:
    """What pip-audit says of one file."""

    packages: int = 0
    vulnerable: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def read_report(text: str) -> Report | None:
    """The report in pip-audit's JSON. None: this is none."""
    try:
        packages = json.loads(text)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    report = Report(len(packages))
    for package in packages:
        if "skip_reason" in package:
            report.unknown.append(f"{package['name']}: {package['skip_reason']}")
        for found in package.get("vulns", ()):
            fixed = ", ".join(found.get("fix_versions") or ()) or "no version"
            report.vulnerable.append(f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    return report


def audit(path: Path, service: str) -> Report | None:
    """Run pip-audit on one file of pins. None: it could not reach the service."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service", service, "--requirement"]
    try:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if (report := read_report(done.stdout)) is None:
        print(f"pip-audit by {service}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return report


def reachable_service(ask: Audit) -> str | None:
    """The first service that reports the canary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "canary.txt"
        path.write_text(f"{CANARY}\n", "utf-8")
        for service in SERVICES:
            report = ask(path, service)
            if report is not None and report.vulnerable:
                return service
    return None


def check(files: Sequence[Path], ask: Audit, *, allow_unreachable: bool) -> int:
    """Print what is found in these files, and return the exit status."""
    service = reachable_service(ask)
    if service is None:
        return unreachable(allow_unreachable)
    status = 0
    for path in files:
        report = ask(path, service)
        if report is None:
            return unreachable(allow_unreachable)
        old = path.parent.name == "matrix"
        name = path.relative_to(path.parent.parent)
        print(
            f"{name}: {report.packages} packages, {len(report.vulnerable)} vulnerabilities" + " (old on purpose)" * old
        )
        for line in [*report.vulnerable, *report.unknown]:
            print(f"    {line}")
        if (report.vulnerable or report.unknown) and not old:
            status = FOUND
    print(f"audit: {'no known vulnerability' if status == 0 else 'see above'} (by {service})")
    return status


def unreachable(allowed: bool) -> int:
    print(
        f"audit: NOT DONE. None of {', '.join(SERVICES)} reports {CANARY}, which has published vulnerabilities: the "
        "data cannot be reached from here. Run `make audit` on a machine that reaches the JSON API of PyPI, or OSV."
    )
    return 0 if allowed else UNREACHABLE


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__.partition("\n")[0])
    parser.add_argument("--allow-unreachable", action="store_true", help="end with 0 if the data cannot be reached")
    options = parser.parse_args(arguments)
    folder = ROOT / "requirements"
    files = [*sorted(folder.glob("*.txt")), *sorted(folder.glob("matrix/*.txt"))]
    return check(files, audit, allow_unreachable=options.allow_unreachable)


if __name__ == "__main__":
    sys.exit(main())
