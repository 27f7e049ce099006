-- What phased requests remember, and finding a key by what its steps carry.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: find
-- The keys whose steps or jobs have this downstream key, or this provider's id: for webhooks.
SELECT scope, key FROM idempotency_steps WHERE downstream_key = ?1
UNION
SELECT scope, key FROM idempotency_steps WHERE provider_id = ?2
UNION
SELECT scope, key FROM idempotency_outbox WHERE downstream_key = ?1
UNION
SELECT scope, key FROM idempotency_outbox WHERE provider_id = ?2
ORDER BY scope, key LIMIT ?3

-- name: forget_steps
-- Delete the steps of a key that is deleted, expires or starts over.
DELETE FROM idempotency_steps WHERE scope = ? AND key = ?

-- name: step
-- Insert a step, or update it. Its kind never changes, and a NULL does not overwrite the provider's id.
INSERT INTO idempotency_steps (
    scope, key, name, kind, state, repeatable, result, downstream_key, provider_id, created_at
) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (scope, key, name) DO UPDATE SET
    state = excluded.state,
    repeatable = excluded.repeatable,
    result = excluded.result,
    downstream_key = excluded.downstream_key,
    provider_id = coalesce(excluded.provider_id, provider_id)

-- name: steps
-- The steps of one key, in the order in which they were first written.
SELECT name, kind, state, repeatable, result, downstream_key, provider_id
FROM idempotency_steps
WHERE scope = ? AND key = ?
ORDER BY rowid
