-- All tables. Every statement here may run twice: DDL commits by itself, so a migration that was cut off starts again.
-- What is compared is VARBINARY, since collations fold case and trailing spaces. Times are UTC, in microseconds.

-- One row per (scope, key). The primary key starts with the scope, so that every statement touches one tenant's pages.
-- MySQL has no partial indexes. The generated columns take their place: `duty` and `due_at` say what upkeep will do with a
-- row, and when; `turn` is NULL for every row that upkeep has not to ask the outside world about.
CREATE TABLE idempotency_keys (
    scope VARBINARY(1024) NOT NULL,
    `key` VARBINARY(1024) NOT NULL,
    operation TEXT NOT NULL,
    fingerprint VARBINARY(64) NOT NULL,
    fingerprint_version SMALLINT NOT NULL,
    fingerprint_recipe TEXT,
    effects VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    attempt INTEGER NOT NULL,
    owner VARBINARY(255) NOT NULL,
    lease_until DATETIME(6) NOT NULL,
    recovery_point TEXT,
    response_status SMALLINT,
    response_headers LONGTEXT,
    response_body LONGBLOB,
    response_schema_version SMALLINT,
    last_error TEXT,
    reconcile_at DATETIME(6),
    reconcile_tries INTEGER NOT NULL DEFAULT 0,
    created_at DATETIME(6) NOT NULL,
    finished_at DATETIME(6),
    retention_seconds DOUBLE NOT NULL,
    quarantine_seconds DOUBLE,
    expires_at DATETIME(6) NOT NULL,
    enlisted BIGINT UNSIGNED, -- the number of the transaction that a request has enlisted
    duty VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin GENERATED ALWAYS AS (
        CASE
            WHEN state IN ('completed', 'failed') THEN 'over'
            WHEN state = 'failed_retryable' AND recovery_point IS NULL THEN 'over'
            WHEN state = 'failed_retryable' THEN 'half_done'
            ELSE state
        END
    ) STORED,
    due_at DATETIME(6) GENERATED ALWAYS AS (
        CASE state
            WHEN 'in_progress' THEN lease_until
            WHEN 'unknown' THEN reconcile_at
            WHEN 'expired' THEN expires_at + INTERVAL CAST(ROUND(retention_seconds * 1000000) AS SIGNED) MICROSECOND
            ELSE expires_at
        END
    ) STORED,
    turn VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin GENERATED ALWAYS AS (
        CASE WHEN state IN ('unknown', 'failed_retryable') AND reconcile_at IS NOT NULL THEN state END
    ) STORED,
    PRIMARY KEY (scope, `key`)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX idempotency_keys_due ON idempotency_keys (duty, due_at);
CREATE INDEX idempotency_keys_turns ON idempotency_keys (turn, scope, reconcile_at);
CREATE INDEX idempotency_keys_resumable ON idempotency_keys (turn, reconcile_at);

-- No foreign keys to idempotency_keys: every statement that removes or restarts a key removes its steps itself, and outbox
-- rows and audit lines outlive their key on purpose.

-- The steps of one key. Webhooks look for a key by what was sent to the provider, or by what it called it.
CREATE TABLE idempotency_steps (
    scope VARBINARY(1024) NOT NULL,
    `key` VARBINARY(1024) NOT NULL,
    name VARBINARY(1024) NOT NULL,
    kind VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    repeatable BOOLEAN NOT NULL,
    result LONGTEXT,
    downstream_key VARBINARY(1024),
    provider_id VARBINARY(1024),
    created_at DATETIME(6) NOT NULL,
    number BIGINT NOT NULL AUTO_INCREMENT, -- the order of first writes: a clock may be set back
    PRIMARY KEY (scope, `key`, name),
    UNIQUE KEY idempotency_steps_number (number)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX idempotency_steps_downstream ON idempotency_steps (downstream_key);
CREATE INDEX idempotency_steps_provider ON idempotency_steps (provider_id);

-- Work that was committed with a business write.
CREATE TABLE idempotency_outbox (
    number BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    id VARBINARY(255) NOT NULL,
    scope VARBINARY(1024) NOT NULL,
    `key` VARBINARY(1024) NOT NULL,
    key_owner VARBINARY(255) NOT NULL,
    operation TEXT NOT NULL,
    task VARBINARY(255) NOT NULL,
    payload LONGTEXT NOT NULL,
    downstream_key VARBINARY(1024) NOT NULL,
    settles BOOLEAN NOT NULL DEFAULT FALSE,
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'ready',
    attempt INTEGER NOT NULL DEFAULT 0,
    owner VARBINARY(255),
    lease_until DATETIME(6),
    run_at DATETIME(6) NOT NULL,
    provider_id VARBINARY(1024),
    last_error TEXT,
    history LONGTEXT NOT NULL,
    created_at DATETIME(6) NOT NULL,
    finished_at DATETIME(6),
    due_at DATETIME(6) GENERATED ALWAYS AS (
        CASE state WHEN 'ready' THEN run_at WHEN 'running' THEN lease_until ELSE finished_at END
    ) STORED,
    UNIQUE KEY idempotency_outbox_id (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX idempotency_outbox_due ON idempotency_outbox (state, due_at);
CREATE INDEX idempotency_outbox_turns ON idempotency_outbox (state, scope, due_at);
CREATE INDEX idempotency_outbox_key ON idempotency_outbox (scope, `key`);
CREATE INDEX idempotency_outbox_downstream ON idempotency_outbox (downstream_key);
CREATE INDEX idempotency_outbox_provider ON idempotency_outbox (provider_id);

-- Every change by an operator or the reconciler.
CREATE TABLE idempotency_audit (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at DATETIME(6) NOT NULL,
    who TEXT NOT NULL,
    event VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    scope VARBINARY(1024) NOT NULL,
    `key` VARBINARY(1024) NOT NULL,
    job_id VARBINARY(255),
    `before` VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    `after` VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin,
    why TEXT NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX idempotency_audit_key ON idempotency_audit (scope, `key`, id);
CREATE INDEX idempotency_audit_at ON idempotency_audit (at);
