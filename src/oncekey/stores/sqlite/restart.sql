-- A key starts over after its expiry: the same comparison as swap.sql, and then the row is as insert.sql makes it.
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now · ?8-?17 the new reservation
UPDATE idempotency_keys SET
    operation = ?8,
    fingerprint = ?9,
    fingerprint_version = ?10,
    fingerprint_recipe = ?16,
    quarantine_seconds = ?17,
    effects = ?11,
    state = 'in_progress',
    attempt = 1,
    owner = ?12,
    lease_until = ?13,
    recovery_point = NULL,
    last_error = NULL,
    reconcile_at = NULL,
    reconcile_tries = 0,
    created_at = ?7,
    finished_at = NULL,
    retention_seconds = ?14,
    expires_at = ?15,
    response_status = NULL,
    response_headers = NULL,
    response_schema_version = NULL,
    response_body = NULL
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)
