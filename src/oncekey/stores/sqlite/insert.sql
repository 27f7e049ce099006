-- Insert a reservation if there is no row. 0 rows: another process was faster, and the caller must read its row.
INSERT INTO idempotency_keys (
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
    reconcile_tries, created_at, retention_seconds, expires_at, fingerprint_recipe,
    quarantine_seconds
) VALUES (?1, ?2, ?3, ?4, ?5, ?6, 'in_progress', 1, ?7, ?8, 0, ?9, ?10, ?11, ?12, ?13)
ON CONFLICT (scope, key) DO NOTHING
