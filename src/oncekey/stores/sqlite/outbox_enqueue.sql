-- One job, in the transaction of the request that adds it: the job exists if and only if that transaction commits.
-- The clock of this host, in seconds since the epoch. (unixepoch('subsec') is not in the SQLite 3.34 of RHEL 9.)
INSERT INTO idempotency_outbox (
    id, scope, key, key_owner, operation, task, payload, downstream_key, settles, run_at, created_at
) VALUES (
    :id, :scope, :key, :key_owner, :operation, :task, :payload, :downstream_key, :settles,
    coalesce(:run_at, (julianday('now') - 2440587.5) * 86400.0), (julianday('now') - 2440587.5) * 86400.0
)
