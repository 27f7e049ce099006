-- What phased requests remember, the outbox, and who changed what by hand.
-- No foreign keys to idempotency_keys: every statement that removes or restarts a key removes its steps itself, and
-- outbox rows and audit lines outlive their key on purpose.

-- The steps of one key. Webhooks look for a key by what was sent to the provider, or by what it called it.
CREATE TABLE idempotency_steps (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL CHECK (kind IN ('phase', 'effect')),
    state text COLLATE "C" NOT NULL CHECK (state IN ('intended', 'done')),
    repeatable boolean NOT NULL,
    result text,
    downstream_key text COLLATE "C",
    provider_id text COLLATE "C",
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    number bigint GENERATED ALWAYS AS IDENTITY, -- the order of first writes: a clock may be set back
    PRIMARY KEY (scope, key, name)
);
CREATE INDEX idempotency_steps_downstream ON idempotency_steps (downstream_key) WHERE downstream_key IS NOT NULL;
CREATE INDEX idempotency_steps_provider ON idempotency_steps (provider_id) WHERE provider_id IS NOT NULL;

-- Retryable with steps, past expiry: half done, and its client did not retry.
CREATE INDEX idempotency_keys_lapsed ON idempotency_keys (expires_at)
WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL;

-- Expired, and kept for the audit for as long again as the key was. (UTC: only then is the sum the same for everybody.)
CREATE INDEX idempotency_keys_tombstones ON idempotency_keys (
    ((expires_at AT TIME ZONE 'UTC') + retention_seconds * interval '1 second')
) WHERE state = 'expired';

-- Work that was committed with a business write.
CREATE TABLE idempotency_outbox (
    id text COLLATE "C" PRIMARY KEY,
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    key_owner text COLLATE "C" NOT NULL,
    operation text NOT NULL,
    task text COLLATE "C" NOT NULL,
    payload text NOT NULL,
    downstream_key text COLLATE "C" NOT NULL,
    settles boolean NOT NULL DEFAULT false,
    state text COLLATE "C" NOT NULL DEFAULT 'ready' CHECK (state IN ('ready', 'running', 'done', 'dead', 'cancelled')),
    attempt integer NOT NULL DEFAULT 0,
    owner text COLLATE "C",
    lease_until timestamptz,
    run_at timestamptz NOT NULL,
    provider_id text COLLATE "C",
    last_error text,
    history text NOT NULL DEFAULT '[]',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz
);
CREATE INDEX idempotency_outbox_ready ON idempotency_outbox (run_at) WHERE state = 'ready';
CREATE INDEX idempotency_outbox_running ON idempotency_outbox (lease_until) WHERE state = 'running';
CREATE INDEX idempotency_outbox_dead ON idempotency_outbox (finished_at) WHERE state = 'dead';
CREATE INDEX idempotency_outbox_over ON idempotency_outbox (finished_at) WHERE state IN ('done', 'cancelled');
CREATE INDEX idempotency_outbox_key ON idempotency_outbox (scope, key);
CREATE INDEX idempotency_outbox_downstream ON idempotency_outbox (downstream_key);
CREATE INDEX idempotency_outbox_provider ON idempotency_outbox (provider_id) WHERE provider_id IS NOT NULL;

-- Every change by an operator or the reconciler.
CREATE TABLE idempotency_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text NOT NULL,
    event text NOT NULL,
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    job_id text COLLATE "C",
    before text NOT NULL,
    after text,
    why text NOT NULL
);
CREATE INDEX idempotency_audit_key ON idempotency_audit (scope, key, id);
