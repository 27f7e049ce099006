-- The keys whose steps or jobs have this downstream key, or this provider's id: for webhooks.
SELECT scope, key FROM idempotency_steps WHERE downstream_key = ?1
UNION
SELECT scope, key FROM idempotency_steps WHERE provider_id = ?2
UNION
SELECT scope, key FROM idempotency_outbox WHERE downstream_key = ?1
UNION
SELECT scope, key FROM idempotency_outbox WHERE provider_id = ?2
ORDER BY scope, key LIMIT ?3
