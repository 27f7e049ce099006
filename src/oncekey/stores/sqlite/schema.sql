-- The tables after all migrations, for readers. A test runs the migrations and compares.
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
    fingerprint_recipe      TEXT,
    quarantine_seconds      REAL,
    PRIMARY KEY (scope, key)
);

-- One partial index per duty of upkeep. SQLite uses an index only if due_*.sql and purge.sql repeat its condition word
-- for word.
CREATE INDEX idempotency_keys_leases ON idempotency_keys (lease_until)
    WHERE state = 'in_progress';

CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at)
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL);

CREATE INDEX idempotency_keys_abandoned ON idempotency_keys (expires_at)
    WHERE state = 'pending';

CREATE INDEX idempotency_keys_unknowns ON idempotency_keys (reconcile_at)
    WHERE state = 'unknown';

-- The steps of phased requests, the outbox, and the audit. The same tables as PostgreSQL's.
-- No foreign keys to idempotency_keys: every statement that removes or restarts a key removes its steps itself, and
-- outbox rows and audit lines outlive their key on purpose.
CREATE TABLE idempotency_steps (
    scope          TEXT    NOT NULL COLLATE BINARY,
    key            TEXT    NOT NULL COLLATE BINARY,
    name           TEXT    NOT NULL COLLATE BINARY,
    kind           TEXT    NOT NULL,
    state          TEXT    NOT NULL,
    repeatable     INTEGER NOT NULL,
    result         TEXT,
    downstream_key TEXT,
    provider_id    TEXT,
    created_at     REAL    NOT NULL,
    PRIMARY KEY (scope, key, name)
);

CREATE INDEX idempotency_steps_downstream ON idempotency_steps (downstream_key) WHERE downstream_key IS NOT NULL;

CREATE INDEX idempotency_steps_provider ON idempotency_steps (provider_id) WHERE provider_id IS NOT NULL;

CREATE INDEX idempotency_keys_lapsed ON idempotency_keys (expires_at)
    WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL;

-- Expired, and kept for a second retention, for the audit.
CREATE INDEX idempotency_keys_tombstones ON idempotency_keys (expires_at + retention_seconds)
    WHERE state = 'expired';

CREATE TABLE idempotency_outbox (
    id             TEXT    NOT NULL PRIMARY KEY,
    scope          TEXT    NOT NULL COLLATE BINARY,
    key            TEXT    NOT NULL COLLATE BINARY,
    key_owner      TEXT    NOT NULL,
    operation      TEXT    NOT NULL,
    task           TEXT    NOT NULL,
    payload        TEXT    NOT NULL,
    downstream_key TEXT    NOT NULL,
    settles        INTEGER NOT NULL DEFAULT 0,
    state          TEXT    NOT NULL DEFAULT 'ready',
    attempt        INTEGER NOT NULL DEFAULT 0,
    owner          TEXT,
    lease_until    REAL,
    run_at         REAL    NOT NULL,
    provider_id    TEXT,
    last_error     TEXT,
    history        TEXT    NOT NULL DEFAULT '[]',
    created_at     REAL    NOT NULL,
    finished_at    REAL
);

CREATE INDEX idempotency_outbox_ready ON idempotency_outbox (run_at) WHERE state = 'ready';

CREATE INDEX idempotency_outbox_running ON idempotency_outbox (lease_until) WHERE state = 'running';

CREATE INDEX idempotency_outbox_dead ON idempotency_outbox (finished_at) WHERE state = 'dead';

CREATE INDEX idempotency_outbox_over ON idempotency_outbox (finished_at) WHERE state IN ('done', 'cancelled');

CREATE INDEX idempotency_outbox_key ON idempotency_outbox (scope, key);

CREATE INDEX idempotency_outbox_downstream ON idempotency_outbox (downstream_key);

CREATE INDEX idempotency_outbox_provider ON idempotency_outbox (provider_id) WHERE provider_id IS NOT NULL;

CREATE TABLE idempotency_audit (
    id     INTEGER PRIMARY KEY,
    at     REAL    NOT NULL,
    who    TEXT    NOT NULL,
    event  TEXT    NOT NULL,
    scope  TEXT    NOT NULL COLLATE BINARY,
    key    TEXT    NOT NULL COLLATE BINARY,
    job_id TEXT,
    before TEXT    NOT NULL,
    after  TEXT,
    why    TEXT    NOT NULL
);

CREATE INDEX idempotency_audit_key ON idempotency_audit (scope, key);

-- The keys that upkeep asks providers about, by tenant: thousands of one tenant must not delay the key of another.
CREATE INDEX idempotency_keys_turns ON idempotency_keys (state, scope, reconcile_at)
    WHERE state IN ('unknown', 'failed_retryable') AND reconcile_at IS NOT NULL;

-- The audit has its own retention: the reaper finds the oldest lines by this index.
CREATE INDEX idempotency_audit_at ON idempotency_audit (at);

-- Half-done requests that the resumer continues.
CREATE INDEX idempotency_keys_resumable ON idempotency_keys (reconcile_at)
    WHERE state = 'failed_retryable' AND reconcile_at IS NOT NULL;
