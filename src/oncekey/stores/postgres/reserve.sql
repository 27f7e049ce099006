-- Read each row, or insert it where there is none; one statement, one commit.
--
-- The anti-join reads before it inserts: a row that somebody's open transaction has updated is seen as it was
-- committed, where a bare ON CONFLICT would wait for that transaction and hold up the whole batch. ORDER BY makes two
-- batches insert in the same order, so they cannot deadlock. A row inserted by a rival between our snapshot and our
-- insert shows up in neither branch: the caller asks again in a new statement.
-- OFFSET 0: a look-up by primary key for each row, whatever the statistics say (see held.sql).
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(operation)s, %(fingerprint)s, %(fingerprint_version)s, %(effects)s, %(owner)s,
        %(lease_seconds)s, %(retention_seconds)s
    ) AS w (
        scope, key, operation, fingerprint, fingerprint_version, effects, owner, lease_seconds, retention_seconds
    )
),

fresh AS (
    INSERT INTO idempotency_keys AS k (
        scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner,
        lease_until, created_at, retention_seconds, expires_at
    )
    SELECT
        w.scope, w.key, w.operation, w.fingerprint, w.fingerprint_version, w.effects, 'in_progress', 1, w.owner,
        now() + w.lease_seconds * interval '1 second', now(), w.retention_seconds,
        now() + w.retention_seconds * interval '1 second'
    FROM wanted AS w
    WHERE NOT EXISTS (SELECT FROM idempotency_keys AS e WHERE e.scope = w.scope AND e.key = w.key OFFSET 0)
    ORDER BY w.scope COLLATE "C", w.key COLLATE "C"
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING {columns}
)

SELECT * FROM fresh
UNION ALL
SELECT {columns}
FROM wanted AS w
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_keys AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
) AS k
