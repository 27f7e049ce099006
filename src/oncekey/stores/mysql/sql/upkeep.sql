-- What is due, what is over, and how much waits.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: counts
-- Rows by state, each duty counted up to a limit: a health check never reads the whole table.
SELECT k.state, count(*) FROM (
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'in_progress' LIMIT :limit)
    UNION ALL
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'pending' LIMIT :limit)
    UNION ALL
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'unknown' LIMIT :limit)
    UNION ALL
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'half_done' LIMIT :limit)
    UNION ALL
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'expired' LIMIT :limit)
    UNION ALL
    (SELECT state FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'over' LIMIT :limit)
) AS k
GROUP BY k.state

-- name: due
-- The rows of a duty whose time has come, oldest first.
SELECT {columns} FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_due)
WHERE k.duty = :duty AND k.due_at <= utc_timestamp(6)
ORDER BY k.due_at
LIMIT :limit

-- name: due_resumable
SELECT {columns} FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_resumable)
WHERE k.turn = 'failed_retryable' AND k.reconcile_at <= utc_timestamp(6)
ORDER BY k.reconcile_at
LIMIT :limit

-- name: fair_keys
-- The oldest due keys of one scope, up to a limit.
(
    SELECT {columns} FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_turns)
    WHERE k.turn = :state AND k.scope = :scope AND k.reconcile_at <= utc_timestamp(6)
    ORDER BY k.reconcile_at
    LIMIT :limit
)

-- name: fair_scopes
-- The next scopes that have keys to ask about, and whether the oldest key of each is due: one probe of the index for each
-- scope, for any number of keys.
SELECT k.scope, min(k.reconcile_at) <= utc_timestamp(6)
FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_turns)
WHERE k.turn = :state AND k.scope > :after
GROUP BY k.scope
ORDER BY k.scope
LIMIT :limit

-- name: half_done
-- Half-done keys by operation that wait: no attempt for a while, and no try of upkeep.
SELECT k.operation, count(*), timestampdiff(MICROSECOND, min(k.lease_until), utc_timestamp(6)) FROM (
    SELECT operation, lease_until, reconcile_tries FROM idempotency_keys FORCE INDEX (idempotency_keys_due)
    WHERE duty = 'half_done' LIMIT :limit
) AS k
WHERE k.reconcile_tries = 0 AND k.lease_until + INTERVAL :waiting MICROSECOND <= utc_timestamp(6)
GROUP BY k.operation
ORDER BY count(*) DESC, k.operation
LIMIT :operations

-- name: doomed
-- The keys that the purge deletes, oldest first. The purge locks them again, by their keys.
SELECT k.scope, k.`key` FROM idempotency_keys AS k FORCE INDEX (idempotency_keys_due)
WHERE k.duty = :duty AND k.due_at <= utc_timestamp(6)
ORDER BY k.due_at
LIMIT :limit

-- name: purge
-- Delete these keys and their steps, if their time still has come. Rows in an open transaction are skipped.
{begin};
SELECT group_concat(w.n), count(*) INTO @oncekey_held, @oncekey_count
FROM ({placed}) AS w {at_keys}
WHERE k.duty IN ('over', 'expired') AND k.due_at <= utc_timestamp(6)
FOR UPDATE SKIP LOCKED;
DELETE s FROM ({placed}) AS w {at_keys}
STRAIGHT_JOIN idempotency_steps AS s ON s.scope = w.scope AND s.`key` = w.`key`
WHERE {is_held} AND k.duty IN ('over', 'expired') AND k.due_at <= utc_timestamp(6);
DELETE k FROM ({placed}) AS w {at_keys}
WHERE {is_held} AND k.duty IN ('over', 'expired') AND k.due_at <= utc_timestamp(6);
SELECT @oncekey_count;
{whole};
COMMIT

-- name: unknowns
-- Unknown keys by operation, counted up to a limit; and for how many of them the last reconciler had no resolver.
SELECT k.operation, count(*), CAST(sum(coalesce(left(k.last_error, :length) = :no_resolver, 0)) AS SIGNED) FROM (
    SELECT operation, last_error FROM idempotency_keys FORCE INDEX (idempotency_keys_due)
    WHERE duty = 'unknown' LIMIT :limit
) AS k
GROUP BY k.operation
ORDER BY count(*) DESC, k.operation
LIMIT :operations

-- name: waiting
-- What has waited too long: the oldest lease, the oldest of the counted unknown outcomes, and the dead letters: unknown
-- outcomes and half-done requests after their last try. Times are microseconds.
SELECT
    (
        SELECT timestampdiff(MICROSECOND, min(due_at), utc_timestamp(6))
        FROM idempotency_keys FORCE INDEX (idempotency_keys_due)
        WHERE duty = 'in_progress'
    ),
    (
        SELECT timestampdiff(MICROSECOND, min(k.created_at), utc_timestamp(6)) FROM (
            SELECT created_at FROM idempotency_keys FORCE INDEX (idempotency_keys_due) WHERE duty = 'unknown' LIMIT :limit
        ) AS k
    ),
    (
        SELECT count(*) FROM (
            SELECT 1 FROM idempotency_keys FORCE INDEX (idempotency_keys_due)
            WHERE duty = 'unknown' AND due_at IS NULL LIMIT :limit
        ) AS k
    ) + (
        SELECT count(*) FROM (
            SELECT reconcile_at, reconcile_tries FROM idempotency_keys FORCE INDEX (idempotency_keys_due)
            WHERE duty = 'half_done' LIMIT :limit
        ) AS k
        WHERE k.reconcile_at IS NULL AND k.reconcile_tries > 0
    )
