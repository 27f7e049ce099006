-- The rows of many keys at once: ?1 is a JSON list of [scope, key]. One statement releases the GIL once, not per row.
-- CROSS JOIN fixes the order: for each wanted key, one look-up in the primary key.
SELECT k.scope, k.key, k.operation, k.fingerprint, k.fingerprint_version, k.effects, k.state, k.attempt, k.owner,
       k.lease_until, k.recovery_point, k.last_error, k.reconcile_at, k.reconcile_tries, k.created_at, k.finished_at,
       k.retention_seconds, k.expires_at, k.fingerprint_recipe, k.quarantine_seconds,
       k.response_status, k.response_headers, k.response_schema_version, k.response_body
FROM json_each(?1) AS w
CROSS JOIN idempotency_keys AS k
WHERE k.scope = json_extract(w.value, '$[0]') AND k.key = json_extract(w.value, '$[1]')
