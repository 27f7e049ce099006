-- The rows that an operator asks for, in the order of their keys. The state and its index are part of the text: a
-- partial index with few rows is always better here than reading all keys, and SQLite does not know that.
-- ?1, ?2 after this (scope, key) · ?3 scope · ?4 operation · ?5 created by then · ?6 limit
SELECT scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
       recovery_point, last_error, reconcile_at, reconcile_tries, created_at, finished_at, retention_seconds,
       expires_at, fingerprint_recipe, quarantine_seconds
FROM idempotency_keys {index}
WHERE {state} AND {scope}
  AND (scope, key) > (?1, ?2)
  AND (?4 IS NULL OR operation = ?4)
  AND (?5 IS NULL OR created_at <= ?5)
ORDER BY scope, key LIMIT ?6
