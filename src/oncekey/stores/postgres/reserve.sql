-- Read each row, or insert it where there is none; one statement, one commit.
--
-- It reads before it inserts: a row that somebody's open transaction has updated is seen as it was committed, where a
-- bare ON CONFLICT would wait for that transaction and hold up the whole batch. ORDER BY makes two batches insert in the
-- same order, so that inserts cannot deadlock (together with end.sql in one transaction they can: it ends by the short
-- lock_timeout of in_loop.py, and the lanes take over). A row inserted by a rival between our snapshot and our insert shows up in neither
-- branch (or breaks the plain INSERT, which is tried first since it writes a third less): the caller asks again in a new
-- statement. OFFSET 0: one look-up by primary key for each row, whatever the statistics say (see held.sql).
-- Of rows that are new only the time is sent back, since the caller knows the rest: once for all of them where the plain
-- INSERT takes all or none (fresh_now.sql), with each key where it may have taken some (fresh_each.sql).
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
