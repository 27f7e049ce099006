-- The keys, and the list of migrations that ran.
--
-- A rowid table on purpose: WITHOUT ROWID keeps whole rows in the tree of the primary key, and with stored bodies it
-- was 20 to 60 % slower. response_body stands last, so that no other column lies behind its overflow pages.
-- Text compares as bytes (BINARY is SQLite's default; said aloud, because the promise hangs on it).
-- Times are seconds since the epoch on the clock of this host.
CREATE TABLE oncekey_schema (
    number     INTEGER NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    applied_at REAL    NOT NULL
);

CREATE TABLE idempotency_keys (
    scope                   TEXT    NOT NULL COLLATE BINARY,
    key                     TEXT    NOT NULL COLLATE BINARY,
    operation               TEXT    NOT NULL,
    fingerprint             BLOB    NOT NULL,
    fingerprint_version     INTEGER NOT NULL,
    effects                 TEXT    NOT NULL,
    state                   TEXT    NOT NULL,
    attempt                 INTEGER NOT NULL,
    owner                   TEXT    NOT NULL COLLATE BINARY,
    lease_until             REAL    NOT NULL,
    recovery_point          TEXT,
    last_error              TEXT,
    reconcile_at            REAL,
    reconcile_tries         INTEGER NOT NULL DEFAULT 0,
    created_at              REAL    NOT NULL,
    finished_at             REAL,
    retention_seconds       REAL    NOT NULL,
    expires_at              REAL    NOT NULL,
    response_status         INTEGER,
    response_headers        TEXT,
    response_schema_version INTEGER,
    response_body           BLOB,
    PRIMARY KEY (scope, key)
);

-- One partial index per duty of upkeep. The due_*.sql and purge.sql repeat these conditions word for word: only then
-- does SQLite use them.
CREATE INDEX idempotency_keys_leases ON idempotency_keys (lease_until)
    WHERE state = 'in_progress';

CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at)
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL);

CREATE INDEX idempotency_keys_abandoned ON idempotency_keys (expires_at)
    WHERE state = 'pending';

CREATE INDEX idempotency_keys_unknowns ON idempotency_keys (reconcile_at)
    WHERE state = 'unknown';
