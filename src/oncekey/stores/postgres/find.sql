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
