-- What runs on the app's own connection, inside its own transaction.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).
-- The state comes from a subquery, so that the planner does not know its value. Otherwise it may read the whole index of
-- leases, which has only keys in progress, instead of the primary key: on the app's connection oncekey has no settings.

-- name: transaction_advance
-- The last statement of a phase sets the recovery point and a new lease. 0 rows: the phase ended its own transaction.
UPDATE idempotency_keys AS k SET
    recovery_point = CAST(:name AS text),
    lease_until = clock_timestamp() + CAST(:lease_seconds AS double precision) * interval '1 second'
WHERE
    k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
    AND k.state = (SELECT 'in_progress') AND current_setting('oncekey.owner', true) = CAST(:owner AS text)
RETURNING date_part('epoch', k.lease_until)

-- name: transaction_complete
-- The last statement of an enlisted transaction: it ends the key and stores its response, in the commit of the
-- business writes. If the handler ended that transaction, the mark of enlist.sql is gone: 0 rows, and the key does not
-- complete. clock_timestamp, because now() is the time when the transaction began.
UPDATE idempotency_keys AS k SET
    state = CAST(:to_state AS text),
    response_status = CAST(:status AS smallint),
    response_headers = CAST(:headers AS text),
    response_body = CAST(:body AS bytea),
    response_schema_version = CAST(:schema_version AS smallint),
    last_error = CAST(:last_error AS text),
    reconcile_at = NULL,
    finished_at = CASE WHEN CAST(:final AS boolean) THEN clock_timestamp() END,
    expires_at = CASE
        WHEN CAST(:final AS boolean)
            THEN greatest(k.expires_at, clock_timestamp() + k.retention_seconds * interval '1 second')
        ELSE k.expires_at
    END
WHERE
    k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
    AND k.state = (SELECT 'in_progress') AND current_setting('oncekey.owner', true) = CAST(:owner AS text)
RETURNING
    date_part('epoch', k.lease_until), k.recovery_point, date_part('epoch', k.finished_at),
    date_part('epoch', k.expires_at), date_part('epoch', clock_timestamp())

-- name: transaction_complete_or_fail
-- transaction_complete for one message with COMMIT. If it finds no row, the division fails, and COMMIT does not run.
-- The answer of a message has no rows, so the caller gives the end of the retention, a second or two later than the
-- statement's own. If the commit comes later than that, the key is kept for longer.
WITH done AS (
    UPDATE idempotency_keys AS k SET
        state = CAST(:to_state AS text),
        response_status = CAST(:status AS smallint),
        response_headers = CAST(:headers AS text),
        response_body = CAST(:body AS bytea),
        response_schema_version = CAST(:schema_version AS smallint),
        last_error = CAST(:last_error AS text),
        reconcile_at = NULL,
        finished_at = CASE WHEN CAST(:final AS boolean) THEN clock_timestamp() END,
        expires_at = CASE
            WHEN CAST(:final AS boolean)
                THEN greatest(
                    k.expires_at,
                    to_timestamp(CAST(:expires_at AS double precision)),
                    clock_timestamp() + k.retention_seconds * interval '1 second'
                )
            ELSE k.expires_at
        END
    WHERE
        k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
        AND k.state = (SELECT 'in_progress') AND current_setting('oncekey.owner', true) = CAST(:owner AS text)
    RETURNING k.owner
)

SELECT 1 / count(*) FROM done

-- name: transaction_enlist
-- The first statement of an enlisted transaction: lock the key's row, and set a mark that ends with the transaction.
-- From here on the lock does the work of the lease. Under REPEATABLE READ and SERIALIZABLE it also prevents a renewal
-- after the snapshot, which would let the last statement fail.
-- 0 rows: another attempt owns the key, this is another database, or the snapshot is older than the reservation.
-- It returns the transaction's number, so that oncekey can ask the server later whether it was committed
-- (transaction_fate); the time; and whether this session has the prepared statement that will end the transaction.
-- The commit must be on disk before the response is sent, as with oncekey's own connections: with
-- synchronous_commit = off a crash would lose an answered request. Every stronger setting stays as it is.
WITH mine AS (
    SELECT k.owner FROM idempotency_keys AS k
    WHERE
        k.scope = CAST(:scope AS text) AND k.key = CAST(:key AS text) AND k.owner = CAST(:owner AS text)
        AND k.state = (SELECT 'in_progress')
    FOR NO KEY UPDATE
)

SELECT
    txid_current(),
    date_part('epoch', clock_timestamp()),
    CASE
        WHEN CAST(:statement AS text) <> ''
            THEN EXISTS (SELECT FROM pg_prepared_statements AS p WHERE p.name = CAST(:statement AS text))
    END,
    set_config('oncekey.owner', mine.owner, true),
    set_config(
        'synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
        true
    )
FROM mine

-- name: transaction_fate
-- The state of an enlisted transaction that the handler ended: 'committed', 'aborted', or 'in progress'.
SELECT txid_status(CAST(%(number)s AS bigint))

-- name: transaction_step
-- Store a phase, in the transaction that did its work.
INSERT INTO idempotency_steps (scope, key, name, kind, state, repeatable, result)
SELECT
    CAST(:scope AS text), CAST(:key AS text), CAST(:name AS text), CAST(:kind AS text), 'done', true,
    CAST(:result AS text)
WHERE current_setting('oncekey.owner', true) = CAST(:owner AS text)
ON CONFLICT (scope, key, name) DO UPDATE SET
    kind = excluded.kind,
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result

-- name: transaction_still
-- Whether this is still the transaction that was enlisted.
SELECT current_setting('oncekey.owner', true) = CAST(:owner AS text)
