-- What runs on the app's own connection, inside its own transaction.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py). CONVERT gives the bytes of a text for
-- a connection of any character set; bytes come as hexadecimal digits.
-- Two marks tell the enlisted transaction from every other. The savepoint `oncekey` is gone after a COMMIT, a ROLLBACK and a
-- statement that commits by itself (DDL): RELEASE SAVEPOINT then fails, and the key does not complete. The number in the
-- key's row is gone after a ROLLBACK, and stays after a COMMIT: it tells later what became of the transaction.

-- name: transaction_savepoint
SAVEPOINT oncekey

-- name: transaction_mark
-- Lock the key's row, and write a number into it. From here on the lock does the work of the lease. 0 rows: another attempt
-- owns the key, or this is another database. `:number` is given if a rollback to a savepoint undid this: the name of the
-- transaction stays.
UPDATE idempotency_keys SET enlisted = coalesce(:number, uuid_short())
WHERE
    scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4)
    AND owner = CONVERT(:owner USING utf8mb4) AND state = 'in_progress'

-- name: transaction_marked
-- The name of the transaction, for `transaction_fate`.
SELECT concat(hex(scope), ':', hex(`key`), ':', hex(owner), ':', enlisted) FROM idempotency_keys
WHERE
    scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4)
    AND owner = CONVERT(:owner USING utf8mb4) AND state = 'in_progress' AND row_count() = 1

-- name: transaction_fate
-- What became of an enlisted transaction that the handler ended. The row is skipped while that transaction is open.
SELECT enlisted <=> :number FROM idempotency_keys
WHERE scope = unhex(:scope) AND `key` = unhex(:key) AND owner = unhex(:owner)
FOR UPDATE SKIP LOCKED

-- name: transaction_there
SELECT 1 FROM idempotency_keys WHERE scope = unhex(:scope) AND `key` = unhex(:key) AND owner = unhex(:owner)

-- name: transaction_release
RELEASE SAVEPOINT oncekey

-- name: transaction_still
-- Whether this is still the transaction that was enlisted: `transaction_release` did not fail.
SELECT true

-- name: transaction_complete
-- The last statement of an enlisted transaction: it ends the key and stores its response, in the commit of the
-- business writes.
UPDATE idempotency_keys SET
    state = :to_state,
    response_status = :status,
    response_headers = CONVERT(:headers USING utf8mb4),
    response_body = unhex(:body),
    response_schema_version = :schema_version,
    last_error = CONVERT(:last_error USING utf8mb4),
    reconcile_at = NULL,
    finished_at = CASE WHEN :final THEN utc_timestamp(6) END,
    expires_at = CASE
        WHEN :final THEN greatest(
            expires_at, utc_timestamp(6) + INTERVAL CAST(round(retention_seconds * 1000000) AS SIGNED) MICROSECOND
        )
        ELSE expires_at
    END
WHERE
    scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4)
    AND owner = CONVERT(:owner USING utf8mb4) AND state = 'in_progress'

-- name: transaction_completed
-- What `transaction_complete` has just written, if it was one row.
SELECT
    timestampdiff(MICROSECOND, '1970-01-01', lease_until) / 1000000e0, recovery_point,
    timestampdiff(MICROSECOND, '1970-01-01', finished_at) / 1000000e0,
    timestampdiff(MICROSECOND, '1970-01-01', expires_at) / 1000000e0,
    timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) / 1000000e0
FROM idempotency_keys
WHERE scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4) AND row_count() = 1

-- name: transaction_step
-- Store a phase, in the transaction that did its work.
INSERT INTO idempotency_steps (scope, `key`, name, kind, state, repeatable, result, created_at)
VALUES (
    CONVERT(:scope USING utf8mb4), CONVERT(:key USING utf8mb4), CONVERT(:name USING utf8mb4), :kind, 'done', true,
    CONVERT(:result USING utf8mb4), utc_timestamp(6)
)
ON DUPLICATE KEY UPDATE
    kind = :kind, state = 'done', repeatable = true, result = CONVERT(:result USING utf8mb4)

-- name: transaction_advance
-- Set the recovery point and a new lease.
UPDATE idempotency_keys SET
    recovery_point = CONVERT(:name USING utf8mb4),
    lease_until = utc_timestamp(6) + INTERVAL CAST(round(:lease_seconds * 1000000) AS SIGNED) MICROSECOND
WHERE
    scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4)
    AND owner = CONVERT(:owner USING utf8mb4) AND state = 'in_progress'

-- name: transaction_advanced
-- What `transaction_advance` has just written, if it was one row.
SELECT timestampdiff(MICROSECOND, '1970-01-01', lease_until) / 1000000e0 FROM idempotency_keys
WHERE scope = CONVERT(:scope USING utf8mb4) AND `key` = CONVERT(:key USING utf8mb4) AND row_count() = 1
