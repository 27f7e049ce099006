"""A Prometheus server for tests: it fetches the metrics of an app, and answers queries about them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from oncekey.testing.servers.folders import Folder
from oncekey.testing.servers.packages import missing, unpacked
from oncekey.testing.servers.processes import HOST
from oncekey.testing.servers.server import Server

_CONFIG: Final = """\
global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval}}}
rule_files: {rules}
scrape_configs:
  - job_name: oncekey
    metrics_path: {path}
    static_configs: [{{targets: {targets}}}]
"""


def find_prometheus(program: str = "prometheus") -> Path:
    """``prometheus`` or ``promtool``: the system's, or the one that ``make servers`` unpacked."""
    root = unpacked("prometheus")
    places = [shutil.which(program), None if root is None else root / "usr" / "bin" / program]
    for place in places:
        if place is not None and Path(place).is_file():
            return Path(place)
    raise missing("Prometheus")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``promtool``, for example ``promtool("check", "rules", path)``."""
    command = [str(find_prometheus("promtool")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


class PrometheusServer(Server):
    """``PrometheusServer(["127.0.0.1:8080"], rules=[path])`` fetches ``/metrics`` of these targets.

    ``interval``: how often it fetches and evaluates the rules, as Prometheus writes a duration.
    """

    kind = "Prometheus"
    _stop_signal = signal.SIGKILL  # its data is of no use after the test

    def __init__(
        self, targets: Sequence[str], *, path: str = "/metrics", rules: Sequence[Path] = (), interval: str = "1s"
    ) -> None:
        super().__init__()
        self._binary: Path | None = None
        self._config = _CONFIG.format(
            interval=interval, rules=json.dumps([str(rule) for rule in rules]), path=path, targets=json.dumps(targets)
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query: each with ``metric`` (its labels) and ``value`` (time and number)."""
        result: list[dict[str, Any]] = self._get("/api/v1/query", {"query": expression})["data"]["result"]
        return result

    def number(self, expression: str) -> float | None:
        """The number of a query with one series; None: it has none yet."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> dict[str, str]:
        """The alerts that are pending or firing, by name."""
        return {each["labels"]["alertname"]: each["state"] for each in self._get("/api/v1/alerts")["data"]["alerts"]}

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        with urlopen(f"{self.url}{path}?{urlencode(query or {})}", timeout=5.0) as answer:  # noqa: S310 - our own
            return json.load(answer)

    def _prepare(self) -> None:
        self._binary = find_prometheus()
        self._folder = Folder("prometheus", None)
        (self._home / "prometheus.yml").write_text(self._config)

    def _command(self) -> list[str]:
        home = self._home
        return [
            str(self._binary),
            f"--config.file={home / 'prometheus.yml'}",
            f"--storage.tsdb.path={home / 'data'}",
            f"--web.listen-address={HOST}:{self.port}",
            "--log.level=warn",
        ]

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=1.0):  # noqa: S310 - our own
                return True
        except (URLError, OSError):
            return False
