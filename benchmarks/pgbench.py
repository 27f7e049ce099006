"""The yardstick for the store alone: pgbench, the same two statements, one row per transaction.

The statements are the store's own for a batch of one, written with plain values: the anti-join and ON
CONFLICT of ``reserve.sql``, the compare of ``swap.sql``. Plain values are the form that costs PostgreSQL
least, so the ratio errs against us.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

CLIENTS = 32
FINGERPRINT = bytes(range(32))
HEADERS = '[["content-type","application/json"],["location","/payments/1"]]'
BODY = b'{"id":1,"amount":1299,"currency":"EUR","status":"created"}'

RESERVE = rf"""INSERT INTO idempotency_keys (
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
    lease_until, created_at, retention_seconds, expires_at
)
SELECT
    'bench', w.key, 'POST /payments', '\x{FINGERPRINT.hex()}'::bytea, 1, 'external',
    'in_progress', 1, w.owner,
    now() + interval '60 seconds', now(), 86400, now() + interval '86400 seconds'
FROM (SELECT {{key}}::text AS key, {{owner}}::text AS owner) AS w
WHERE NOT EXISTS (SELECT FROM idempotency_keys AS e WHERE e.scope = 'bench' AND e.key = w.key)
ON CONFLICT (scope, key) DO NOTHING
RETURNING scope, key, state, owner, lease_until, created_at, expires_at, now()"""
COMPLETE = rf"""UPDATE idempotency_keys AS k SET
    state = 'completed', response_status = 201, response_headers = '{HEADERS}',
    response_body = '\x{BODY.hex()}'::bytea, response_schema_version = 1, finished_at = now(),
    expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
WHERE k.scope = 'bench' AND k.key = {{key}}::text
    AND k.state = 'in_progress' AND k.owner = {{owner}}::text
RETURNING scope, key, state, owner, lease_until, created_at, expires_at, now()"""
"""The two statements, with places for the key and the owner."""

_RANDOM = {"key": "md5(:n::bigint::text)::uuid", "owner": "md5((:n::bigint + 1)::text)"}
SCRIPT = rf"""\set n random(1, 9000000000000000000)
{RESERVE.format(**_RANDOM)};
{COMPLETE.format(**_RANDOM)};
"""


class PgbenchFailed(Exception):
    """pgbench is not there, or said something else than a clean result."""


def find(binaries: Path | None) -> Path | None:
    """pgbench from the server's folder, or else from PATH."""
    if binaries is not None and (binaries / "pgbench").is_file():
        return binaries / "pgbench"
    found = shutil.which("pgbench")
    return Path(found) if found else None


def run(program: Path, url: str, folder: Path, seconds: int, clients: int = CLIENTS) -> float:
    """Pairs per second: each run of the script is one reservation and its completion, committed apart."""
    script = folder / "pair.sql"
    script.write_text(SCRIPT)
    command = [
        *(str(program), "--no-vacuum", "--protocol=prepared", f"--client={clients}", "--jobs=2"),
        *(f"--time={seconds}", f"--file={script}", url),
    ]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds + 60)
    rate = re.search(r"^tps = ([\d.]+) \(without initial connection time\)", ended.stdout, re.MULTILINE)
    failed = re.search(r"^number of failed transactions: (\d+)", ended.stdout, re.MULTILINE)
    if ended.returncode != 0 or not rate or (failed and failed[1] != "0"):
        raise PgbenchFailed(f"pgbench failed\n{ended.stderr[-2000:]}\n{ended.stdout[-2000:]}")
    return float(rate[1])
