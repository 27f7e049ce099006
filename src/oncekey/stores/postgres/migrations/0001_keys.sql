-- One row per (scope, key). The primary key starts with the scope, so that hash partitioning or a distributed SQL
-- engine shards by tenant, and every statement of ours touches one shard per row.
CREATE TABLE idempotency_keys (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    operation text NOT NULL,
    fingerprint bytea NOT NULL,
    fingerprint_version smallint NOT NULL,
    effects text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL CHECK (state IN (
        'in_progress', 'pending', 'completed', 'failed', 'failed_retryable', 'unknown', 'expired'
    )),
    attempt integer NOT NULL,
    owner text COLLATE "C" NOT NULL,
    lease_until timestamptz NOT NULL,
    recovery_point text,
    response_status smallint,
    response_headers text,
    response_body bytea,
    response_schema_version smallint,
    last_error text,
    reconcile_at timestamptz,
    reconcile_tries integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL,
    finished_at timestamptz,
    retention_seconds double precision NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, key)
);

-- One small index per duty of upkeep: each holds only the rows that the duty could be about.
CREATE INDEX idempotency_keys_leases ON idempotency_keys (lease_until) WHERE state = 'in_progress';
CREATE INDEX idempotency_keys_expired ON idempotency_keys (expires_at)
WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL);
CREATE INDEX idempotency_keys_abandoned ON idempotency_keys (expires_at) WHERE state = 'pending';
CREATE INDEX idempotency_keys_unknowns ON idempotency_keys (reconcile_at) WHERE state = 'unknown';
