-- What runs on the app's own connection, inside its own transaction.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: transaction_advance
-- Set the recovery point and a new lease.
UPDATE idempotency_keys SET recovery_point = :name, lease_until = :now + :lease_seconds
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'

-- name: transaction_advanced
-- What advance.sql has just written. 0 rows: this attempt does not own the key.
SELECT lease_until FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress' AND recovery_point = :name

-- name: transaction_complete
-- The last statement of an enlisted transaction: it ends the key and stores its response, in the commit of the
-- business writes.
UPDATE idempotency_keys SET
    state = :to_state,
    response_status = :status,
    response_headers = :headers,
    response_schema_version = :schema_version,
    response_body = :body,
    last_error = :last_error,
    reconcile_at = NULL,
    finished_at = CASE WHEN :final THEN :now END,
    expires_at = CASE WHEN :final THEN max(expires_at, :now + retention_seconds) ELSE expires_at END
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'

-- name: transaction_completed
-- What complete.sql has just written. (SELECT instead of RETURNING, for the SQLite 3.34 of RHEL 9.)
SELECT lease_until, recovery_point, finished_at, expires_at, :now
FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = :to_state

-- name: transaction_enlist
-- Whether this attempt owns the key, under the write lock that lock.sql took. No row: it does not, or this is another
-- file.
SELECT NULL FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'

-- name: transaction_lock
-- The first statement of an enlisted transaction: a write, so that it takes the file's write lock now, or fails now.
UPDATE idempotency_keys SET owner = owner
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress'

-- name: transaction_step
-- Store a phase, in the transaction that did its work.
INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, result, created_at)
VALUES (:scope, :key, :name, :kind, 'done', 1, :result, :now)
ON CONFLICT (scope, key, name) DO UPDATE SET
    kind = excluded.kind,
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result
