-- One row by its key. The response comes last: rows.py reads the columns by position.
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds,
       response_status, response_headers, response_schema_version, response_body
FROM idempotency_keys
WHERE scope = ? AND key = ?
