-- Every move that neither deletes nor starts over: compare (state, owner, lease, expiry) and set, in one statement.
-- 0 rows: the row is not as the swap says, and nothing was written (promise I3).
-- ?1-?4 key, state, owner · ?5 the lease ended this long ago · ?6 past expiry · ?7 now · ?8-?21 what it becomes · ?22 its effects
UPDATE idempotency_keys SET
    state = ?8,
    owner = coalesce(?9, owner),
    attempt = coalesce(?10, attempt),
    effects = coalesce(?20, effects),
    lease_until = coalesce(?7 + ?11, lease_until),
    recovery_point = coalesce(?12, recovery_point),
    last_error = ?13,
    reconcile_at = ?7 + ?14,
    reconcile_tries = coalesce(?21, reconcile_tries),
    finished_at = CASE WHEN ?15 THEN ?7 END,
    expires_at = CASE
        WHEN ?15 OR (?3 = 'unknown' AND ?8 = 'failed_retryable') THEN max(expires_at, ?7 + retention_seconds)
        ELSE expires_at
    END,
    response_status = ?16,
    response_headers = ?17,
    response_schema_version = ?18,
    response_body = ?19
WHERE scope = ?1 AND key = ?2 AND state = ?3 AND owner = ?4
  AND (?5 IS NULL OR lease_until + ?5 <= ?7)
  AND (NOT ?6 OR expires_at <= ?7)
  AND (?22 IS NULL OR effects = ?22)
