-- Taking, moving, reading and listing keys.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: columns
-- The columns of a Record, in the order in which rows.py reads them; `k` is the row.
k.scope, k.key, k.operation, k.fingerprint, k.fingerprint_version, k.effects, k.state, k.attempt, k.owner,
date_part('epoch', k.lease_until), k.recovery_point,
k.response_status, k.response_headers, k.response_body, k.response_schema_version,
k.last_error, date_part('epoch', k.reconcile_at), k.reconcile_tries,
date_part('epoch', k.created_at), date_part('epoch', k.finished_at),
k.retention_seconds, date_part('epoch', k.expires_at), date_part('epoch', now()),
k.fingerprint_recipe, k.quarantine_seconds

-- name: end
-- The owner ends its attempt: the row becomes final, with its response. Every request waits for this statement, so it
-- sets only what such a move can change; swap.sql does every other move. It returns the time, and, only if not all rows
-- were moved, the numbers of those that were. The state to compare comes from `w`: with a constant the planner would
-- consider the index of leases.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(owner)s, %(to_state)s, %(status)s, %(headers)s, %(body)s, %(schema_version)s, %(last_error)s
    ) WITH ORDINALITY AS w (
        scope, key, owner, to_state, status, headers, body, schema_version, last_error, number
    )
),

held AS (
    SELECT w.*, k.part, k.place
    FROM (
        SELECT wanted.*, 'in_progress' AS from_state FROM wanted ORDER BY scope COLLATE "C", key COLLATE "C"
    ) AS w
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_keys AS i
        WHERE i.scope = w.scope AND i.key = w.key AND i.state = w.from_state AND i.owner = w.owner
        OFFSET 0
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS k
),

ended AS (
    UPDATE idempotency_keys AS k SET
        state = w.to_state,
        response_status = w.status,
        response_headers = w.headers,
        response_body = w.body,
        response_schema_version = w.schema_version,
        last_error = w.last_error,
        reconcile_at = NULL,
        finished_at = now(),
        expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    FROM held AS w
    WHERE k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
    RETURNING w.number
)

SELECT
    date_part('epoch', now()),
    CASE WHEN count(*) < cardinality(%(scope)s) THEN coalesce(array_agg(number), ARRAY[]::bigint[]) END
FROM ended

-- name: forgotten
-- Delete the steps of moved rows that are deleted, expire or start over. The row's lock keeps other writers away.
-- LATERAL with OFFSET 0: see held.sql.
forgotten AS (
    DELETE FROM idempotency_steps AS s
    USING (SELECT scope, key FROM moved WHERE forgets) AS m
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_steps AS i
        WHERE i.scope = m.scope AND i.key = m.key
        OFFSET 0
    ) AS p
    WHERE s.ctid = p.place AND s.tableoid IS NOT DISTINCT FROM p.part
)

-- name: fresh_each
-- The columns of columns.sql with the key of a row that was just inserted, and the time.
SELECT
    k.scope, k.key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, date_part('epoch', now()), NULL, NULL
FROM fresh AS k

-- name: fresh_now
-- The columns of columns.sql, with only the time.
SELECT
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, date_part('epoch', now()), NULL, NULL

-- name: held
-- The rows of a batch of swaps that still are as their swap says, locked in key order (no deadlocks).
-- SKIP LOCKED: a row in another open transaction is busy, and the other rows of the batch do not wait for it.
-- LATERAL with OFFSET 0 leaves the planner only one plan, a look-up by primary key for each row. With the statistics of
-- an almost empty table it would read the whole index, and keep that plan when the table grows.
-- The result has all of `w` and the row's place (ctid), so that no second join is needed. In a partitioned table a
-- place is unique only within its partition (`part`). IS NOT DISTINCT FROM instead of =, because the planner would use
-- = as one more join, and read the whole index of an almost empty table again.
held AS (
    SELECT w.*, k.part, k.place
    FROM (SELECT * FROM wanted ORDER BY scope COLLATE "C", key COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_keys AS i
        WHERE
            i.scope = w.scope AND i.key = w.key AND i.state = w.from_state AND i.owner = w.owner
            AND (w.lease_over_by IS NULL OR i.lease_until + w.lease_over_by * interval '1 second' <= now())
            AND (NOT w.past_expiry OR i.expires_at <= now())
        OFFSET 0
        FOR {lock} SKIP LOCKED
    ) AS k
)

-- name: listing
-- The rows that an operator asks for, in the order of their keys. The state is part of the text, so that PostgreSQL can
-- use its partial index. If the state has one, MATERIALIZED keeps the planner from reading all keys in their order.
WITH asked AS {materialized} (
    SELECT k.* FROM idempotency_keys AS k
    WHERE
        {state}
        AND {scope}
        AND (k.scope, k.key) > (%(after_scope)s, %(after_key)s)
        AND (%(operation)s::text IS NULL OR k.operation = %(operation)s)
        AND (
            %(older_than)s::double precision IS NULL
            OR k.created_at <= now() - %(older_than)s::double precision * interval '1 second'
        )
)

SELECT {columns} FROM asked AS k
ORDER BY k.scope, k.key
LIMIT %(limit)s

-- name: read
SELECT {columns}
FROM unnest(%(scope)s, %(key)s) AS w (scope, key)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_keys AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
) AS k

-- name: remove
-- Delete each row that still is (from_state, owner), with its steps, and return it as it was. A key in progress is
-- deleted only in its first attempt, and without steps.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(event)s, %(who)s, %(why)s
    ) AS w (scope, key, from_state, owner, lease_over_by, past_expiry, event, who, why)
),

{held},

moved AS (
    DELETE FROM idempotency_keys AS k
    USING held AS w
    WHERE
        k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
        AND (k.state <> 'in_progress' OR (k.attempt = 1 AND k.recovery_point IS NULL))
    RETURNING k.*, true AS forgets, w.event, w.from_state AS before, NULL::text AS after, w.who, w.why
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k

-- name: reserve
-- Read each row, or insert it where there is none; one statement, one commit.
--
-- It reads before it inserts. So it sees a row that another open transaction has updated as it was committed before. An
-- ON CONFLICT alone would wait for that transaction and delay the whole batch.
-- ORDER BY lets all batches insert in the same order, so that inserts cannot deadlock. Together with end.sql in one
-- transaction they can: then the short lock_timeout of in_loop.py ends it, and the lanes take over.
-- If a rival inserts a row between the snapshot and the insert, the row is in neither branch, or the plain INSERT fails
-- (it is tried first, because it writes a third less). Then the caller asks again in a new statement.
-- OFFSET 0 forces one look-up by primary key for each row (see held.sql).
-- Of new rows the statement returns only the time, since the caller knows the rest: once for all rows if the plain
-- INSERT takes all or none (fresh_now.sql), with each key if it may have taken some (fresh_each.sql).
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(operation)s, %(fingerprint)s, %(fingerprint_version)s, %(effects)s, %(owner)s,
        %(lease_seconds)s, %(retention_seconds)s, %(fingerprint_recipe)s, %(quarantine_seconds)s
    ) AS w (
        scope, key, operation, fingerprint, fingerprint_version, effects, owner, lease_seconds, retention_seconds,
        fingerprint_recipe, quarantine_seconds
    )
),

seen AS (
    SELECT w.*, k.found
    FROM wanted AS w
    LEFT JOIN LATERAL (
        SELECT i AS found FROM idempotency_keys AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
    ) AS k ON true
),

fresh AS (
    INSERT INTO idempotency_keys AS k (
        scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
        lease_until, created_at, retention_seconds, expires_at, fingerprint_recipe, quarantine_seconds
    )
    SELECT
        w.scope, w.key, w.operation, w.fingerprint, w.fingerprint_version, w.effects, 'in_progress', 1, w.owner,
        now() + w.lease_seconds * interval '1 second', now(), w.retention_seconds,
        now() + w.retention_seconds * interval '1 second', w.fingerprint_recipe, w.quarantine_seconds
    FROM seen AS w
    WHERE (w.found).scope IS NULL
    ORDER BY w.scope COLLATE "C", w.key COLLATE "C"
    {on_conflict}
)

{fresh}
UNION ALL
SELECT {columns}
FROM seen AS s, LATERAL (SELECT (s.found).*) AS k
WHERE (s.found).scope IS NOT NULL

-- name: restart
-- A key starts over after its expiry: attempt 1, a new request, nothing of the old request or its steps.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(operation)s, %(fingerprint)s, %(fingerprint_version)s, %(effects)s, %(new_owner)s,
        %(lease_seconds)s, %(retention_seconds)s, %(fingerprint_recipe)s, %(quarantine_seconds)s, %(event)s, %(who)s, %(why)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        operation, fingerprint, fingerprint_version, effects, new_owner, lease_seconds, retention_seconds,
        fingerprint_recipe, quarantine_seconds, event, who, why
    )
),

{held},

moved AS (
    UPDATE idempotency_keys AS k SET
        operation = w.operation,
        fingerprint = w.fingerprint,
        fingerprint_version = w.fingerprint_version,
        fingerprint_recipe = w.fingerprint_recipe,
        quarantine_seconds = w.quarantine_seconds,
        effects = w.effects,
        state = 'in_progress',
        attempt = 1,
        owner = w.new_owner,
        lease_until = now() + w.lease_seconds * interval '1 second',
        recovery_point = NULL,
        response_status = NULL,
        response_headers = NULL,
        response_body = NULL,
        response_schema_version = NULL,
        last_error = NULL,
        reconcile_at = NULL,
        reconcile_tries = 0,
        created_at = now(),
        finished_at = NULL,
        retention_seconds = w.retention_seconds,
        expires_at = now() + w.retention_seconds * interval '1 second'
    FROM held AS w
    WHERE k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
    RETURNING k.*, true AS forgets, w.event, w.from_state AS before, k.state AS after, w.who, w.why
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k

-- name: set
-- The new values of a row, for a swap `w` that neither deletes it nor starts it over.
state = w.to_state,
owner = coalesce(w.new_owner, k.owner),
attempt = coalesce(w.attempt, k.attempt),
effects = coalesce(w.effects, k.effects),
lease_until = coalesce(now() + w.lease_seconds * interval '1 second', k.lease_until),
recovery_point = coalesce(w.recovery_point, k.recovery_point),
response_status = w.status,
response_headers = w.headers,
response_body = w.body,
response_schema_version = w.schema_version,
last_error = w.last_error,
reconcile_at = now() + w.reconcile_in * interval '1 second',
finished_at = CASE WHEN w.to_state IN ('completed', 'failed') THEN now() END,
expires_at = CASE
    WHEN w.to_state IN ('completed', 'failed') OR (w.from_state = 'unknown' AND w.to_state = 'failed_retryable')
        THEN greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    ELSE k.expires_at
END

-- name: swap
-- Move each row that still is (from_state, owner); a row that is not returned was not moved. Requests wait for this
-- statement, so a move that also writes a step or an audit line uses swap_beside.sql.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(to_state)s, %(new_owner)s, %(attempt)s, %(lease_seconds)s,
        %(status)s, %(headers)s, %(body)s, %(schema_version)s,
        %(last_error)s, %(recovery_point)s, %(reconcile_in)s, %(effects)s, %(from_effects)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        to_state, new_owner, attempt, lease_seconds,
        status, headers, body, schema_version,
        last_error, recovery_point, reconcile_in, effects, from_effects
    )
),

{held}

UPDATE idempotency_keys AS k SET
    {set}
FROM held AS w
WHERE
    k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
    AND (w.from_effects IS NULL OR k.effects = w.from_effects)
RETURNING {columns}

-- name: tally
-- How many keys a tenant has, for limits; no more than the limit are read. Scopes are compared as bytes.
SELECT count(*) FROM (
    SELECT FROM idempotency_keys AS k
    WHERE
        k.scope >= %(tenant)s AND k.scope < %(end)s
        AND (
            %(newer_than)s::double precision IS NULL
            OR k.created_at > now() - %(newer_than)s::double precision * interval '1 second'
        )
    LIMIT %(limit)s
) AS counted

-- name: swap_beside
-- The same as swap.sql, and in the same commit a step, an audit line, and the reconciler's tries.
-- All of these come from `moved`, not from `held`: a row that changed between the snapshot and the lock is held, but
-- not moved.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(from_state)s, %(owner)s, %(lease_over_by)s, %(past_expiry)s,
        %(to_state)s, %(new_owner)s, %(attempt)s, %(lease_seconds)s,
        %(status)s, %(headers)s, %(body)s, %(schema_version)s,
        %(last_error)s, %(recovery_point)s, %(reconcile_in)s, %(effects)s, %(from_effects)s,
        %(reconcile_tries)s, %(event)s, %(who)s, %(why)s,
        %(step_name)s, %(step_kind)s, %(step_state)s, %(step_repeatable)s, %(step_result)s,
        %(step_downstream_key)s, %(step_provider_id)s
    ) AS w (
        scope, key, from_state, owner, lease_over_by, past_expiry,
        to_state, new_owner, attempt, lease_seconds,
        status, headers, body, schema_version,
        last_error, recovery_point, reconcile_in, effects, from_effects,
        reconcile_tries, event, who, why,
        step_name, step_kind, step_state, step_repeatable, step_result,
        step_downstream_key, step_provider_id
    )
),

{held},

moved AS (
    UPDATE idempotency_keys AS k SET
        reconcile_tries = coalesce(w.reconcile_tries, k.reconcile_tries),
        {set}
    FROM held AS w
    WHERE
        k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
        AND (w.from_effects IS NULL OR k.effects = w.from_effects)
    RETURNING
        k.*, w.to_state = 'expired' AS forgets, w.event, w.from_state AS before, w.to_state AS after, w.who, w.why,
        w.step_name, w.step_kind, w.step_state, w.step_repeatable, w.step_result,
        w.step_downstream_key, w.step_provider_id
),

stepped AS (
    INSERT INTO idempotency_steps AS s (
        scope, key, name, kind, state, repeatable, result, downstream_key, provider_id
    )
    SELECT
        m.scope, m.key, m.step_name, m.step_kind, m.step_state, m.step_repeatable, m.step_result,
        m.step_downstream_key, m.step_provider_id
    FROM moved AS m
    WHERE m.step_name IS NOT NULL
    -- The kind never changes, and a NULL does not overwrite the provider's id.
    ON CONFLICT (scope, key, name) DO UPDATE SET
        state = excluded.state,
        repeatable = excluded.repeatable,
        result = excluded.result,
        downstream_key = excluded.downstream_key,
        provider_id = coalesce(excluded.provider_id, s.provider_id)
),

{forgotten},

{noted}

SELECT {columns} FROM moved AS k
