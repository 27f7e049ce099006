-- What phased requests remember, and finding a key by what its steps carry.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: find
-- The keys whose steps or jobs have this downstream key, or this provider's id: for webhooks.
SELECT scope, key FROM idempotency_steps WHERE downstream_key = %(downstream_key)s
UNION
SELECT scope, key FROM idempotency_steps WHERE provider_id = %(provider_id)s
UNION
SELECT scope, key FROM idempotency_outbox WHERE downstream_key = %(downstream_key)s
UNION
SELECT scope, key FROM idempotency_outbox WHERE provider_id = %(provider_id)s
ORDER BY scope, key
LIMIT %(limit)s

-- name: steps
-- The steps of each of these keys, in the order in which they were first written.
SELECT w.place, s.name, s.kind, s.state, s.repeatable, s.result, s.downstream_key, s.provider_id
FROM unnest(%(scope)s, %(key)s) WITH ORDINALITY AS w (scope, key, place)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_steps AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
) AS s
ORDER BY w.place, s.number
