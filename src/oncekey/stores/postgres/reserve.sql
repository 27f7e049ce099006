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
