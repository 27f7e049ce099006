-- What phased requests remember, and finding a key by what its steps carry.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: find
-- The keys whose steps or jobs have this downstream key, or this provider's id: for webhooks.
SELECT scope, `key` FROM idempotency_steps WHERE downstream_key = :downstream_key
UNION
SELECT scope, `key` FROM idempotency_steps WHERE provider_id = :provider_id
UNION
SELECT scope, `key` FROM idempotency_outbox WHERE downstream_key = :downstream_key
UNION
SELECT scope, `key` FROM idempotency_outbox WHERE provider_id = :provider_id
ORDER BY scope, `key`
LIMIT :limit

-- name: forget
-- Delete the steps of moved rows that are deleted, expire or start over. The row's lock keeps other writers away.
DELETE s FROM ({forgetting}) AS w
STRAIGHT_JOIN idempotency_steps AS s ON s.scope = w.scope AND s.`key` = w.`key`
WHERE {is_held} AND {is_moved};

-- name: step
-- Insert steps, or update them. Their kind never changes, and a NULL does not overwrite the provider's id.
INSERT INTO idempotency_steps (
    scope, `key`, name, kind, state, repeatable, result, downstream_key, provider_id, created_at
)
SELECT w.scope, w.`key`, w.name, w.kind, w.state, w.repeatable, w.result, w.downstream_key, w.provider_id, {now}
FROM ({steps}) AS w
WHERE {is_held} AND {is_moved}
ON DUPLICATE KEY UPDATE
    state = w.state,
    repeatable = w.repeatable,
    result = w.result,
    downstream_key = w.downstream_key,
    provider_id = coalesce(w.provider_id, idempotency_steps.provider_id);

-- name: steps
-- The steps of each of these keys, in the order in which they were first written.
SELECT w.n, s.name, s.kind, s.state, s.repeatable, s.result, s.downstream_key, s.provider_id
FROM ({placed}) AS w
STRAIGHT_JOIN idempotency_steps AS s ON s.scope = w.scope AND s.`key` = w.`key`
ORDER BY w.n, s.number
