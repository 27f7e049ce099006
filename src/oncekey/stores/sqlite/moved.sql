-- The row that swap.sql just moved, without the response: the swap has it.
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds
FROM idempotency_keys
WHERE scope = ? AND key = ?
